"""What a lock's summary warns of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from support.forged import flip
from support.small_datasets import random_shards, write_dataset
from support.stand_in import (
    MANIFEST,
    THREE_SOURCES,
    compiled,
    parse_mixture,
    stand_in_dataset,
    three_sources,
)

from olm_data.cli import cli
from olm_data.errors import InputError, OlmError, UsageError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import MixPlan, mix
from olm_data.mixture.summary import explain, summarise, tree, warnings
from olm_data.packing.packings import PACKINGS
from olm_data.rows.reader import RowReader


def test_rounded_shares_are_recorded_beside_the_wanted_ones_and_reported() -> None:
    text = MANIFEST.replace("web: 85, code: 15", "web: 1000003, code: 770.7")
    lock = compiled(text)
    assert lock.stages[0].wanted == ("7707/10007737", "10000030/10007737")
    assert lock.stages[0].block <= 2**20
    assert any("largest relative error" in warning for warning in warnings(lock))
    assert not any("largest relative error" in text for text in warnings(compiled(MANIFEST)))


def test_above_four_epochs_a_warning_says_how_many() -> None:
    lock = compiled(MANIFEST.replace("max_epochs: 4", "max_epochs: 9"), tokens=15_000_000)
    assert any("'web' is repeated 5.5" in warning for warning in warnings(lock))


def test_a_weighted_source_that_is_never_drawn_and_an_unused_source_are_warned_about() -> None:
    lock = compiled(MANIFEST.replace("web: 85, code: 15", "web: 1000000000, code: 1"))
    assert any("'code' is never drawn in stage 'main'" in w for w in warnings(lock))
    text = MANIFEST.replace("web: 85, code: 15", "web: 1").replace("web: 2M, code: 3M", "web: 5M")
    lock = compiled(text)
    assert any("'code' has a weight in no stage" in w for w in warnings(lock))


# What `mix` shows beside the plan: each integer, and the tree of groups.
def test_every_integer_of_a_lock_stands_in_its_explanation() -> None:
    lock = three_sources(
        [
            {"tokens": 1_234, "weights": {"a": 1, "b": 2}},
            {"tokens": 1_000, "weights": {"a": 1_000_003, "b": 770_707}},
            {"epochs": {"b": 1.5, "c": 1}},
        ]
    )
    said = "\n".join(explain(lock))
    for stage in lock.stages:
        numbers = (stage.rows, stage.tokens, stage.block, *stage.counts, *stage.rows_by_source)
        assert all(f"{number:,}" in said for number in numbers if number)
    assert re.search(r"\n  b .* 3/2 x 300 .* 450\n", said)
    assert "the common denominator 3 is at most 2^20: B = 3" in said


def test_the_tree_has_each_group_with_the_sum_of_its_members() -> None:
    text = THREE_SOURCES.replace("stages:", "groups: {g: {a: 3, h: 1}, h: {b: 1}}\nstages:")
    mixture = parse_mixture(text + "  - {name: s, tokens: 1K, weights: {g: 4, c: 1}}\n")
    lock = MixPlan(mixture, {n: stand_in_dataset(n, 4_001) for n in "abc"}).compile()
    (stage,) = tree(lock)
    group, source = msgspec.to_builtins(stage)["members"]
    assert (group["name"], group["share_wanted"], group["rows"]) == ("g", 0.8, 80)
    assert [m["name"] for m in group["members"]] == ["a", "h"]
    assert group["members"][1]["members"][0] == {
        "name": "b",
        "share_wanted": 0.2,
        "share_compiled": 0.2,
        "share_got": 0.2,
        "rows": 20,
        "epochs": 0.05,
    }
    assert (source["name"], source["rows"]) == ("c", 20)


# Promises of views: training sees exactly the chosen documents, as if no others were there.
S = 16
SHARDS = [[5, 3, 40, 24, 1, 1, 6], [16, 17, 2], [9] * 20, [64, 1, 30, 33]]
COUNT = sum(map(len, SHARDS))
SCORES = [n % 5 for n in range(COUNT)]
LANGUAGES = ["en" if n % 3 else "de" for n in range(COUNT)]
WHERE = "score >= 2 and language == 'en'"
EXCLUDED = ["doc-2", "doc-3", "doc-8", "doc-13", "nobody", "nothing"]
KEPT = [n for n in range(COUNT) if SCORES[n] >= 2 and LANGUAGES[n] == "en"]
CHOSEN = [n for n in KEPT if f"doc-{n}" not in EXCLUDED]


def documents() -> list[list[np.ndarray]]:
    """Random documents whose ids are above 0, so that 0 is padding."""
    shards = random_shards(3, SHARDS, vocab_size=49_000)
    return [[ids + 1 for ids in shard] for shard in shards]


def write_whole(path: Path, **other: Any) -> None:
    columns = {"score": pa.array(SCORES), "language": pa.array(LANGUAGES)} | other
    write_dataset(path, documents(), columns=columns)


def write_manifest(folder: Path, *views: str, packing: str = "concat") -> Path:
    """A manifest with a source `web` over `folder/whole`, with lines for its view."""
    path = folder / "manifest.yaml"
    keys = "".join(f"    {line}\n" for line in views)
    path.write_text(
        f"version: 1\nseed: 5\nsequence_length: {S}\npacking: {packing}\n"
        f"sources:\n  web:\n    data: whole\n    max_epochs: 1000\n{keys}"
        "stages:\n  - {name: main, tokens: 1K, weights: {web: 1}}\n"
    )
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_whole(tmp_path / "whole")
    (tmp_path / "ids.txt").write_text("\n".join(EXCLUDED) + "\n\n")
    return tmp_path


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_view_trains_on_what_a_dataset_of_the_chosen_documents_would(
    project: Path, tmp_path_factory: pytest.TempPathFactory, packing: str
) -> None:
    lock = mix(
        str(write_manifest(project, f"where: {WHERE}", "exclude_ids: ids.txt", packing=packing))
    )
    other = tmp_path_factory.mktemp("copied")
    flat = [ids for shard in documents() for ids in shard]
    write_dataset(other / "whole", [[flat[n] for n in CHOSEN]])
    copied = mix(str(write_manifest(other, packing=packing)))
    seen, wanted = RowReader(Lock.read(lock.path)), RowReader(Lock.read(copied.path))
    assert seen.total_rows == wanted.total_rows
    assert seen.lock.sources[0].rows == wanted.lock.sources[0].rows > 3
    rows = np.arange(seen.total_rows)
    ours, theirs = seen.read(rows), wanted.read(rows)
    if packing == "best_fit":  # which documents of equal length meet depends on the dataset
        once = np.flatnonzero(seen.schedule.locate(rows).epoch == 0)
        for batch in (ours, theirs):
            tokens = np.sort(batch.input_ids[once][batch.input_ids[once] > 0])
            assert tokens.tolist() == sorted(t for n in CHOSEN for t in flat[n].tolist())
        return
    for field in ("tokens", "input_ids", "labels", "doc_start", "positions"):
        assert np.array_equal(getattr(ours, field), getattr(theirs, field)), field
    cuts = [np.unique(batch.cu_seqlens).tolist() for batch in (ours, theirs)]
    assert cuts[0] == cuts[1]


def test_the_lock_and_the_plan_say_what_was_kept_and_why_the_rest_was_not(project: Path) -> None:
    manifest = write_manifest(project, f"where: {WHERE}", "exclude_ids: ids.txt")
    lock = Lock.read(mix(str(manifest)).path)
    source = lock.sources[0]
    flat = [size for shard in SHARDS for size in shard]
    assert (source.documents, source.tokens) == (COUNT, sum(flat))
    view = source.view
    assert (view.documents, view.tokens) == (len(CHOSEN), sum(flat[n] for n in CHOSEN))
    assert (view.left_by_where, view.left_by_ids) == (COUNT - len(KEPT), len(KEPT) - len(CHOSEN))
    assert (view.ids, view.ids_unmatched, view.ids_shared) == (6, 2, 0)
    shown = summarise(lock).sources[0]
    assert shown.tokens_available == view.tokens
    assert (shown.view.left_by_where, shown.view.of_documents) == (view.left_by_where, COUNT)
    assert any("2 of the 6 ids" in warning for warning in warnings(lock))
    printed = CliRunner().invoke(cli, ["mix", str(manifest)], standalone_mode=False)
    assert f"documents {len(CHOSEN)}, " in printed.stdout


def test_the_order_of_the_ids_changes_nothing_and_another_id_another_lock(project: Path) -> None:
    manifest = write_manifest(project, "exclude_ids: ids.txt")
    first = mix(str(manifest)).lock.digest
    (project / "ids.txt").write_text("\r\n".join(reversed(EXCLUDED)))
    assert mix(str(manifest)).status == "unchanged"
    (project / "ids.txt").write_text("\n".join(EXCLUDED[1:]))
    assert mix(str(manifest), dry_run=True).lock.digest != first


def test_spelling_a_condition_otherwise_gives_the_same_lock(project: Path) -> None:
    first = mix(str(write_manifest(project, f"where: {WHERE}")))
    other = "where: \"((2 <= score)) and (language in ['en'] or language == 'en')\""
    again = mix(str(write_manifest(project, 'where: "score>=2 and language==\\"en\\""')))
    assert (again.status, again.lock.digest) == ("unchanged", first.lock.digest)
    changed = mix(str(write_manifest(project, other)), dry_run=True).lock
    assert changed.sources[0].plan == first.lock.sources[0].plan  # the same rows
    assert changed.digest != first.lock.digest


def test_the_input_and_the_size_of_the_text_can_be_asked_for(project: Path) -> None:
    flat = [size for shard in SHARDS for size in shard]
    lock = mix(str(write_manifest(project, "where: input == 'input.jsonl' and text_bytes > 40")))
    view = lock.lock.sources[0].view
    assert view.documents == sum(4 * size > 40 for size in flat)


def test_an_id_of_several_documents_leaves_out_all_of_them_and_says_so(tmp_path: Path) -> None:
    ids = pa.array([f"doc-{n // 2}" for n in range(COUNT)])
    write_whole(tmp_path / "whole", id=ids)
    (tmp_path / "ids.txt").write_text("doc-1\ndoc-4\n")
    lock = mix(str(write_manifest(tmp_path, "exclude_ids: ids.txt"))).lock
    view = lock.sources[0].view
    assert (view.left_by_ids, view.ids_shared) == (4, 2)
    assert any("not unique" in warning for warning in warnings(lock))


def test_verify_tells_the_view_and_finds_a_damaged_plan_that_mix_then_mends(project: Path) -> None:
    path = mix(str(write_manifest(project, f"where: {WHERE}", "exclude_ids: ids.txt"))).path
    report = verify(path)
    notes = [line for line in report.notes if "draws on" in line]
    assert notes == [
        f"source web draws on {len(CHOSEN)} of {COUNT} documents: "
        "where (score >= 2) and (language == 'en') and without 6 ids"
    ]
    source = Lock.read(path).sources[0]
    place = project / source.plan.folder / "starts.npy"
    flip(place)
    found = [finding for finding in verify(path).findings if finding.file == str(place)]
    assert [finding.field for finding in found] == ["sha256"]
    mix(str(project / "manifest.yaml"))  # as the message of a damaged plan says
    assert not [finding for finding in verify(path).findings if finding.file == str(place)]


def test_the_last_label_of_a_view_is_not_dropped_and_older_locks_that_count_it_verify(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = str(write_manifest(project, f"where: {WHERE}", "exclude_ids: ids.txt"))
    lock = mix(manifest).lock
    plan = lock.sources[0].plan
    monkeypatch.setattr("olm_data.packing.row_plan.WINDOW", 1)
    assert mix(manifest).status == "unchanged"
    before = verify(str(project / "manifest.lock.json")).findings
    older = msgspec.structs.replace(plan, dropped=plan.dropped + 1)
    (project / plan.folder).rename(project / older.folder)
    source = msgspec.structs.replace(lock.sources[0], plan=older)
    lock = msgspec.structs.replace(lock, sources=(source,))
    lock = msgspec.structs.replace(lock, digest=lock.compute_digest())
    path = project / "older.lock.json"
    lock.write(path)
    assert verify(str(path)).findings == before
    assert Lock.read(path).open_plan(0) is not None


def test_packings_of_the_view_are_compared(project: Path) -> None:
    manifest = str(write_manifest(project, f"where: {WHERE}", "exclude_ids: ids.txt"))
    arguments = ["mix", manifest, "--compare-packing", "--documents", "all"]
    said = CliRunner().invoke(cli, [*arguments, "--json"], standalone_mode=False)
    concat, best, document = json.loads(said.stdout)
    assert {one["documents"] for one in (concat, best, document)} == {len(CHOSEN)}
    flat = [size for shard in SHARDS for size in shard]
    assert best["tokens"] == sum(flat[n] for n in CHOSEN)
    assert concat["rows"] == Lock.read(mix(manifest).path).sources[0].rows
    said = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert "without 6 ids" in said.stdout


def spoil_rows(folder: Path) -> None:
    path = folder / "whole/shard-00001.docs.parquet"
    flip(path, 20)


def lose_ids(folder: Path) -> None:
    for path in (folder / "whole").iterdir():
        path.unlink()
    write_whole(folder / "whole", id=pa.array([None, *"x" * (COUNT - 1)]))


def nothing(_: Path) -> None:
    """Leave the dataset as it is."""


@pytest.mark.parametrize(
    ("view", "spoil", "kind", "says"),
    [
        ("where: scroe > 1", nothing, UsageError, r"no column 'scroe'.*\n.*\n.*'score'"),
        ("where: score == 'one'", nothing, InputError, "the column holds int64"),
        ("where: score >", nothing, UsageError, "not a condition over columns"),
        ("where: 3", nothing, UsageError, "3 is not a condition"),
        ("where: score > 9", nothing, InputError, r"no document of source 'web' is left: of 34"),
        ("where: score > 3 and language == 'de' and text_bytes == 4", nothing, InputError, "left"),
        ("where: text_bytes < 9", nothing, InputError, "5 tokens in its view; one row takes 17"),
        ("where: score > 1", spoil_rows, ValidationError, "do not match their digest"),
        ("exclude_ids: gone.txt", nothing, InputError, "exclude_ids: .*\n.*manifest.yaml:9"),
        (
            "exclude_ids: manifest.yaml",
            nothing,
            InputError,
            "exclude_ids: this is a mixture manifest, not a file of text",
        ),
        ("exclude_ids: [a]", nothing, UsageError, "not a path or URL of a file of ids"),
        ("exclude_ids: ids.txt", lose_ids, InputError, "1 documents have no id"),
    ],
)
def test_a_view_that_cannot_be_is_refused_with_its_line_and_writes_nothing(
    project: Path, view: str, spoil: Callable[[Path], None], kind: type[OlmError], says: str
) -> None:
    spoil(project)
    with pytest.raises(kind) as error:
        mix(str(write_manifest(project, view)))
    assert error.match(rf"(?s){says}")
    if spoil is not spoil_rows:
        assert "manifest.yaml:" in str(error.value)
    assert sorted(path.name for path in project.iterdir()) == ["ids.txt", "manifest.yaml", "whole"]


def test_a_url_of_ids_with_a_secret_is_refused() -> None:
    text = (
        "version: 1\nsequence_length: 8\nsources:\n  web: {data: a, exclude_ids: "
        "'s3://key:secret@bucket/ids.txt'}\nstages:\n  - {name: a, tokens: 1K, weights: {web: 1}}\n"
    )
    with pytest.raises(UsageError, match="user, password or query"):
        parse_mixture(text)
