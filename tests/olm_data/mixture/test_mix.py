"""mix: from a manifest to a lock, also after a kill, and what it says of shared documents."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from support.faulty_disk import fail, faults, kill
from support.project import Project
from support.small_datasets import random_shards, write_dataset
from support.stand_in import MANIFEST, compiled, parse_mixture, stand_in_dataset, stand_ins

from olm_data.cli import cli
from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, OlmError, ResourceError, ValidationError
from olm_data.extensions.doctor.doctor import clean
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import MixPlan, mix, open_sources, open_views
from olm_data.mixture.shared import Common, in_common, warnings_of_held_out


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with two small datasets and a manifest."""
    rng = np.random.default_rng(0)
    write_dataset(tmp_path / "tokens/web", random_shards(rng, [[100] * 50, [37] * 30]))
    write_dataset(tmp_path / "tokens/code", random_shards(rng, [[20] * 100]))
    (tmp_path / "manifest.yaml").write_text(
        "version: 1\nseed: 5\nsequence_length: 16\n"
        "sources:\n  web: {data: tokens/web}\n  code: {data: ./tokens/code, max_epochs: 2}\n"
        "stages:\n  - {name: main, tokens: 8K, weights: {web: 85, code: 15}}\n"
    )
    return tmp_path


def run(*arguments: object) -> tuple[int, str, str]:
    """Run olm-data as its entry point does: (exit code, stdout, stderr with the error message)."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments], standalone_mode=False)
    if isinstance(result.exception, OlmError):
        return result.exception.exit_code, result.stdout, str(result.exception)
    if result.exception is not None:
        raise result.exception
    return 0, result.stdout, result.stderr


def test_the_whole_path_from_manifest_to_opened_datasets(small: Path) -> None:
    code, out, err = run("mix", small / "manifest.yaml")
    assert code == 0
    assert "85.0000%" in out
    assert "written" in err
    assert "next: torchrun" in err
    lock = Lock.read(small / "manifest.lock.json")
    opened = lock.open_datasets()
    assert [d.digest for d in opened] == [s.dataset for s in lock.sources]
    assert lock.sources[0].max_documents_per_row >= 2
    schedule = lock.schedule()
    assert schedule.total_rows == lock.total_rows == 500
    assert np.bincount(schedule.locate(np.arange(500)).source).tolist() == [75, 425]


def test_running_mix_again_says_unchanged(small: Path) -> None:
    run("mix", small / "manifest.yaml")
    before = (small / "manifest.lock.json").stat()
    _, _, err = run("mix", small / "manifest.yaml")
    assert "unchanged" in err
    assert (small / "manifest.lock.json").stat().st_mtime_ns == before.st_mtime_ns


def test_a_dry_run_prints_the_same_plan_and_writes_nothing(small: Path) -> None:
    _, dry, err = run("mix", small / "manifest.yaml", "--dry-run")
    assert not (small / "manifest.lock.json").exists()
    assert "dry run" in err
    _, wet, _ = run("mix", small / "manifest.yaml")
    assert dry == wet


def test_a_changed_manifest_conflicts_with_the_lock_until_overwrite(small: Path) -> None:
    manifest = small / "manifest.yaml"
    run("mix", manifest)
    manifest.write_text(manifest.read_text().replace("seed: 5", "seed: 6"))
    assert run("mix", manifest)[0] == 7
    assert run("mix", manifest, "--output", small / "other.lock.json")[0] == 0
    assert run("mix", manifest, "--overwrite")[0] == 0
    assert Lock.read(small / "manifest.lock.json").seed == 6


def test_the_json_plan_adds_up(small: Path) -> None:
    _, out, _ = run("mix", small / "manifest.yaml", "--json")
    plan = json.loads(out)
    assert (plan["status"], plan["lock"]) == ("written", str(small / "manifest.lock.json"))
    assert plan["digest"] == Lock.read(plan["lock"]).digest
    main = plan["stages"][0]["sources"]
    assert [s["source"] for s in main] == ["code", "web"]
    assert [s["rows"] for s in main] == [75, 425]
    assert [s["share_wanted"] for s in main] == [0.15, 0.85]
    assert sum(s["tokens"] for s in plan["sources"]) == plan["tokens"] == 8000
    assert plan["sources"][0]["epochs"] == 75 / 124
    assert plan["sources"][0]["tokens_in_no_row"] == 2000 - 124 * 16 - 1


def test_the_lock_works_from_another_folder_and_moves_with_its_tree(
    small: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run("mix", small / "manifest.yaml", "--output", small / "locks/a.lock.json")
    moved = tmp_path_factory.mktemp("moved") / "tree"
    small.rename(moved)
    assert len(Lock.read(moved / "locks/a.lock.json").open_datasets()) == 2
    moved.rename(small)


def test_a_dataset_that_is_not_there_is_an_input_error_with_the_manifests_line(
    small: Path,
) -> None:
    manifest = small / "manifest.yaml"
    manifest.write_text(manifest.read_text().replace("tokens/web", "tokens/wob"))
    code, _, err = run("mix", manifest)
    assert code == 4
    assert "manifest.yaml:5" in err
    assert not (small / "manifest.lock.json").exists()


def test_opening_a_lock_on_another_dataset_names_what_differs(small: Path) -> None:
    run("mix", small / "manifest.yaml")
    (small / "tokens/web").rename(small / "tokens/old")
    write_dataset(small / "tokens/web", random_shards(np.random.default_rng(1), [[50] * 100]))
    with pytest.raises(ValidationError, match="'web' is not the one in the lock") as error:
        Lock.read(small / "manifest.lock.json").open_datasets()
    assert "tokens 5,000, in the lock 6,110" in str(error.value)
    assert error.value.exit_code == 3


def test_a_source_smaller_than_a_row_is_refused_with_the_numbers(small: Path) -> None:
    manifest = small / "manifest.yaml"
    manifest.write_text(manifest.read_text().replace("length: 16", "length: 2048"))
    code, _, err = run("mix", manifest)
    assert code == 4
    assert "'code' has 2,000 tokens; one row takes 2,049" in err


def test_the_output_must_be_a_json_file(small: Path) -> None:
    assert run("mix", small / "manifest.yaml", "--output", small / "lock")[0] == 2


def test_a_lock_can_be_written_to_and_read_from_s3(small: Path, s3: dict[str, str]) -> None:
    url = f"s3://{s3['bucket']}/mix/m.lock.json"
    assert run("mix", small / "manifest.yaml", "--output", url)[0] == 0
    assert "unchanged" in run("mix", small / "manifest.yaml", "--output", url)[2]
    assert len(Lock.read(url).open_datasets()) == 2


def test_the_plan_says_what_rows_a_stage_is_trained_in(small: Path) -> None:
    manifest = small / "manifest.yaml"
    manifest.write_text(
        manifest.read_text().replace("name: main,", "name: main, sequence_length: 4,")
        + "  - {name: long, tokens: 1K, weights: {web: 1}}\n"
    )
    stages = json.loads(run("mix", manifest, "--dry-run", "--json")[1])["stages"]
    assert [stage["sequence_length"] for stage in stages] == [4, 16]


# Promises of compiling: exact shares and boundaries, one digest, refusals that name both sides.
def test_every_prefix_of_the_run_holds_each_source_within_a_row_of_its_share() -> None:
    lock = compiled(MANIFEST.replace("2048", "4000"))
    schedule = lock.schedule()
    place = schedule.locate(np.arange(lock.total_rows))
    start = 0
    for stage in lock.stages:
        here = place.source[start : start + stage.rows]
        for index, wanted in enumerate(map(Fraction, stage.wanted)):
            drawn, slots = np.cumsum(here == index), np.arange(1, stage.rows + 1)
            assert np.abs(drawn - slots * float(wanted)).max() < 1
        start += stage.rows


def test_stage_ends_are_token_counts_of_the_run_rounded_down_once() -> None:
    stages = "\n".join(f"  - {{name: s{i}, tokens: 2500, weights: {{web: 1}}}}" for i in range(20))
    text = MANIFEST[: MANIFEST.index("stages:")] + "stages:\n" + stages
    lock = compiled(text.replace("2048", "1000"))
    assert [stage.rows for stage in lock.stages] == [2, 3] * 10
    assert lock.total_rows == 50


def test_extending_the_last_stage_changes_no_earlier_row() -> None:
    end, longer_end = (
        "5M,  tokens_from: {web: 2M, code: 3M}",
        "20M, tokens_from: {web: 8M, code: 12M}",
    )
    short, long = compiled(MANIFEST), compiled(MANIFEST.replace(end, longer_end))
    rows = np.arange(short.total_rows)
    ours, theirs = short.schedule().locate(rows), long.schedule().locate(rows)
    assert np.array_equal(ours.source, theirs.source)
    assert np.array_equal(ours.row, theirs.row)


def test_the_order_of_sources_in_the_manifest_has_no_meaning() -> None:
    lines = MANIFEST.splitlines()
    lines[5], lines[6] = lines[6], lines[5]
    swapped = "\n".join(lines).replace("web: 85, code: 15", "code: 15, web: 85")
    assert compiled(swapped).digest == compiled(MANIFEST).digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("20260101", "1"),
        ("2048", "1024"),
        ("95M", "94M"),
        ("85", "86"),
        ("2.5", "2"),
        ("web", "wep"),
    ],
)
def test_whatever_changes_the_run_changes_the_digest(old: str, new: str) -> None:
    assert compiled(MANIFEST.replace(old, new)).digest != compiled(MANIFEST).digest


@pytest.mark.parametrize(
    "options", [{"tokenizer": "two"}, {"vocab_size": 501}, {"bos": 1}], ids=lambda o: next(iter(o))
)
def test_sources_of_different_tokenizers_are_refused_naming_both(options: dict[str, Any]) -> None:
    mixture = parse_mixture(MANIFEST)
    opened = stand_ins(mixture) | {"web": stand_in_dataset("web", 60_000_000, **options)}
    with pytest.raises(
        ValidationError, match=r"'code' and 'web' were .* different tokenizers"
    ) as error:
        MixPlan(mixture, opened).compile()
    assert (error.value.exit_code, error.value.where) == (3, "manifest.yaml:6")


def test_sources_may_differ_in_dtype() -> None:
    mixture = parse_mixture(MANIFEST)
    opened = stand_ins(mixture) | {"web": stand_in_dataset("web", 60_000_000, dtype="uint32")}
    assert [s.dtype for s in MixPlan(mixture, opened).compile().sources] == ["uint16", "uint32"]


KILLED = """\
import os, sys
from olm_data.mixture import mix
def kill(dataset, packing, length, folder, scan):
    (folder / "half").write_bytes(b"x" * 1000)
    os._exit(9)
mix.write_plan = kill
mix.mix(sys.argv[1], dry_run=len(sys.argv) > 2)
"""

HELD = """\
import sys
from pathlib import Path
from olm_data.storage.disk import scratch
with scratch(Path(sys.argv[1]) if len(sys.argv) > 1 else None) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("olm_data.extensions.doctor.doctor.abandoned_sockets", list)
    write_dataset(tmp_path / "data", [[[1] * 40, [2] * 50]])
    path = tmp_path / "run" / "mix.yaml"
    path.write_text(
        "version: 1\nseed: 1\nsequence_length: 16\npacking: best_fit\n"
        "sources: {web: {data: ../data, max_epochs: 9}}\n"
        "stages: [{name: main, tokens: 64, weights: {web: 1}}]\n"
    )
    return path


def kill_one(manifest: Path, *words: str) -> None:
    run = subprocess.run([sys.executable, "-c", KILLED, str(manifest), *words])
    assert run.returncode == 9


@pytest.mark.parametrize("words", [(), ("dry run",)])
def test_gc_names_what_a_killed_mix_left_and_the_next_mix_clears_it(
    manifest: Path, words: tuple[str, ...]
) -> None:
    folder = manifest.parent if not words else manifest.parents[1] / "tmp"
    before = set(folder.iterdir())
    kill_one(manifest, *words)
    (left,) = set(folder.iterdir()) - before
    (stale,) = clean(str(manifest.parent), 0, dry_run=True).found
    assert (Path(stale.name), stale.bytes >= 1000) == (left, True)
    mix(str(manifest))
    assert not left.exists()
    assert {path.name for path in manifest.parent.iterdir()} == {
        *("mix.yaml", "mix.lock.json", "row-plans")
    }


def test_gc_deletes_what_a_killed_mix_left(manifest: Path) -> None:
    kill_one(manifest)
    place = str(manifest.parent)
    assert clean(place, 3600).found == []
    clean(place, 0)
    assert [path.name for path in manifest.parent.iterdir()] == ["mix.yaml"]


def test_the_folder_of_a_living_mix_stays(manifest: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(manifest.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        held = Path(other.stdout.readline().strip())
        mix(str(manifest))
        assert held.exists()
        other.communicate()
    assert not held.exists()


def test_best_fit_on_a_full_disk_says_so_at_any_operation(manifest: Path) -> None:
    with faults(-1, kill) as count:
        lock = mix(str(manifest)).lock.digest
    operations = len(count.log)
    assert any("starts" in name for name in count.log)
    for at in range(operations):
        shutil.rmtree(manifest.parent / "row-plans", ignore_errors=True)
        (manifest.parent / "mix.lock.json").unlink(missing_ok=True)
        with (
            pytest.raises(ResourceError, match="no space left") as caught,
            faults(at, fail(errno.ENOSPC)),
        ):
            mix(str(manifest))
        assert caught.value.exit_code == 5
    assert mix(str(manifest)).lock.digest == lock


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


TWO = """\
version: 1
sequence_length: 16
sources:
  web: {data: tokens/web, exclude_ids: ids.txt}
  code: {data: ./tokens/code}
  books: {data: ./tokens/code, where: position == 3}
stages: [{name: main, tokens: 8K, weights: {web: 1}}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, sizes in (("web", [100, 50]), ("code", [20])):
        shards = random_shards(np.random.default_rng(0), [sizes])
        write_dataset(tmp_path / "tokens" / name, shards)
    (tmp_path / "ids.txt").write_text("doc-0\n")
    return tmp_path


def test_each_source_is_opened_from_the_folder_of_the_manifest(folder: Path) -> None:
    mixture = parse_mixture(TWO, folder=str(folder))
    tokens = {name: dataset.tokens for name, dataset in open_sources(mixture).items()}
    assert tokens == {"books": 20, "code": 20, "web": 150}
    views = {name: str(view) for name, view in open_views(mixture).items()}
    assert views == {"books": "where position == 3", "web": "without 1 ids"}


def test_what_is_not_there_is_refused_with_the_line_that_names_it(folder: Path) -> None:
    mixture = parse_mixture(TWO.replace("tokens/web", "tokens/wep"), folder=str(folder))
    with pytest.raises(InputError) as error:
        open_sources(mixture)
    assert str(error.value.where).endswith("(from manifest.yaml:4)")
    (folder / "ids.txt").unlink()
    with pytest.raises(InputError, match="exclude_ids:") as error:
        open_views(mixture)
    assert str(error.value.where).endswith("(from manifest.yaml:4)")
