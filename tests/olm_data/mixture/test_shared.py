"""Documents that reach a run by two ways are said: two sources, or a held-out set and a source."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from support.project import Project
from support.small_datasets import random_shards, write_dataset

from olm_data.cli import cli
from olm_data.dataset.dataset import Dataset
from olm_data.mixture.mix import mix
from olm_data.mixture.shared import Common, in_common, warnings_of_held_out

SHARDS = [[8] * 20, [4] * 10]
SCORES = pa.array([n % 5 for n in range(30)])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`web`, a copy of its first shard with another one, `copy`, and a stranger, `other`."""
    folder = tmp_path_factory.mktemp("shared")
    first, second, third = random_shards(3, [*SHARDS, [6] * 30], vocab_size=49_000)
    write_dataset(folder / "web", [first, second], columns={"score": SCORES})
    write_dataset(folder / "copy", [first, third])
    write_dataset(folder / "other", [third])
    return folder


def write_manifest(folder: Path, sources: str) -> str:
    path = folder / "mix.yaml"
    names = [line.split(":")[0].strip() for line in sources.splitlines()]
    weights = ", ".join(f"{name}: 1" for name in names)
    path.write_text(
        f"version: 1\nsequence_length: 4\nsources:\n{sources}\n"
        f"stages:\n  - {{name: main, tokens: 40, weights: {{{weights}}}}}\n"
    )
    return str(path)


def warned(folder: Path, sources: str) -> tuple[str, ...]:
    return mix(write_manifest(folder, sources), dry_run=True).warnings


def test_sources_with_shards_of_one_another_are_named_with_what_they_share(data: Path) -> None:
    assert warned(data, "  a: {data: web}\n  b: {data: other}") == ()
    (whole,) = warned(data, "  a: {data: web}\n  b: {data: ./web}")
    assert whole.startswith("sources 'a' and 'b' share 30 documents (200 tokens)")
    (part,) = warned(data, "  a: {data: web}\n  b: {data: copy}")
    assert part.startswith("sources 'a' and 'b' share 20 documents (160 tokens)")


def test_views_of_one_dataset_share_what_both_keep(data: Path) -> None:
    def views(first: str, second: str) -> tuple[str, ...]:
        lines = [f'  {n}: {{data: web, where: "{w}"}}' for n, w in (("a", first), ("b", second))]
        return warned(data, "\n".join(lines))

    assert views("score >= 3", "score < 3") == ()
    (both,) = views("score >= 2", "score <= 2")  # of 30 documents 6, of which 4 have 8 tokens
    assert both.startswith("sources 'a' and 'b' share 6 documents (40 tokens)")
    (beside,) = warned(data, '  a: {data: web}\n  b: {data: web, where: "score == 0"}')
    assert beside.startswith("sources 'a' and 'b' share 6 documents (40 tokens)")


def test_the_command_says_it_and_so_does_its_json(data: Path) -> None:
    path = write_manifest(data, "  a: {data: web}\n  b: {data: web}")
    done = CliRunner().invoke(cli, ["mix", path, "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    assert "warning: sources 'a' and 'b' share 30 documents" in done.stderr
    assert any("share 30 documents" in text for text in json.loads(done.stdout)["warnings"])


def test_a_source_that_is_never_drawn_shares_nothing(data: Path) -> None:
    path = Path(write_manifest(data, "  a: {data: web}\n  b: {data: web}"))
    path.write_text(path.read_text().replace("b: 1}", "b: 0}"))
    assert mix(str(path), dry_run=True).warnings == ()


def test_the_same_texts_in_other_shards_are_known_by_their_content(project: Project) -> None:
    lines = [json.dumps({"text": f"story {n} is this one"}) + "\n" for n in range(60)]
    (project / "one.jsonl").write_text("".join(lines))
    (project / "two.jsonl").write_text("".join(reversed(lines)))
    (project / "three.jsonl").write_text("".join(lines[:50]))

    def made(name: str, file: str, holdout: str = "0") -> Dataset:
        made_of = [project / f"{file}.jsonl"]
        project.make(made_of, name, holdout=holdout)
        return Dataset.open(str(project / name))

    one, two, three = made("one", "one"), made("two", "two"), made("three", "three")
    parted = made("parted", "two", "0.3")
    held = Dataset.open(str(project / "parted" / "validation"))
    assert in_common(one.manifest, two.manifest) == Common(60, one.tokens)
    assert in_common(one.manifest, three.manifest).documents == 0
    assert in_common(one.manifest, parted.manifest) == Common(len(parted), parted.tokens)
    assert in_common(held.manifest, one.manifest) == Common(len(held), held.tokens)
    assert in_common(held.manifest, parted.manifest).documents == 0
    (said,) = warned(project.folder, "  a: {data: one}\n  b: {data: two}")
    assert said.startswith(f"sources 'a' and 'b' share 60 documents ({one.tokens:,} tokens)")


def test_a_held_out_set_that_is_trained_on_is_named(data: Path) -> None:
    lock = mix(write_manifest(data, "  a: {data: web}\n  b: {data: other}"), dry_run=True).lock
    sets = {name: Dataset.open(str(data / name)) for name in ("web", "copy")}
    said = warnings_of_held_out(sets, lock, lock.open_datasets())
    assert [text[: text.index(", too")] for text in said] == [
        "30 documents (200 tokens) of the held-out data set 'web' are in source 'a'",
        "20 documents (160 tokens) of the held-out data set 'copy' are in source 'a'",
        "30 documents (180 tokens) of the held-out data set 'copy' are in source 'b'",
    ]
    stranger = {"x": Dataset.open(str(data / "other"))}
    alone = mix(write_manifest(data, "  a: {data: web}"), dry_run=True).lock
    assert warnings_of_held_out(stranger, alone, alone.open_datasets()) == []
