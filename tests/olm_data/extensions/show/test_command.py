"""olm-data show: what each option does, and which are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from olm_data.cli import cli
from olm_data.errors import OlmError, UsageError
from olm_data.extensions.show.documents import Query, show_sightings
from olm_data.mixture.lock import Lock
from olm_data.rows.views import LockRows


def show(*words: object) -> Result:
    return CliRunner().invoke(cli, ["show", *map(str, words)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["document", "a", "0", "--id", "x"], "a document is named twice"),
        (["document", "a", "b:0"], "there is no shard 'b'"),
        (["document", "a", "x"], "not the address of a document"),
        (["document", "a", "0", "--of", "b"], "--of is for a mixture"),
        (["search", "a", "fox", "--run", "r"], "--run is for a mixture"),
        (["search", "a", "fox", "--skip", "1:2"], "--skip is for a mixture"),
        (
            ["row", "mixture.lock.json", "--sequence-length", 8],
            "is for a dataset, and the lock has one",
        ),
    ],
)
def test_the_command_refuses_what_has_no_effect(
    two_sources: Path, words: list[object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(two_sources)
    error = show(*words).exception
    assert isinstance(error, UsageError)
    assert message in str(error)


def test_the_command_shows_as_many_as_are_asked_for(two_sources: Path) -> None:
    done = show("search", two_sources / "a", "fox", "--first", "2")
    assert done.output.count("-- document") == 2
    assert "there may be more: --first 4" in done.output
    assert "\x1b" not in done.output
    for words, heads in (
        (["document", two_sources / "a"], ["-- document 0", "-- document 1", "-- document 2"]),
        (["document", two_sources / "a", 7], ["-- document 7"]),
        (["document", two_sources / "a", 58, "--first", 5], ["-- document 58", "-- document 59"]),
        (["row", two_sources / "a", 3, "--sequence-length", 50], ["== row 3"]),
        (["row", two_sources / "mixture.lock.json", 8, "--first", 9], ["== row 8", "== row 9"]),
    ):
        lines = show(*words).output.splitlines()
        kind = heads[0].rpartition(" ")[0]
        assert [
            line[: len(heads[0])].rstrip(": ") for line in lines if line.startswith(kind)
        ] == heads


S = 64


def refused(command: str, *arguments: object) -> OlmError:
    error = show(command, *arguments).exception
    assert isinstance(error, OlmError), error
    return error


def shown(command: str, *arguments: object) -> Any:
    result = show(command, *arguments, "--json")
    assert result.exception is None, result.exception
    return json.loads(result.stdout)


def test_in_a_phase_of_shorter_rows_a_sighting_says_which_of_them(
    lock_of: Callable[[str], Path],
) -> None:
    lock = Lock.read(lock_of("phases"))
    rows, seen = LockRows(lock), set()
    late = lock.stages[0].rows
    for number in range(late, lock.total_rows):
        place = 0
        for piece in rows.view(number).pieces:
            if piece.document == 30 and rows.view(number).source == "b" and place < S:
                seen.add((number, place // 16))
            place += piece.stop - piece.start
    (found,) = show_sightings(rows, Query(address="b:30"))
    parts = {(s.row, part) for s in found.sightings if s.row >= late for part in range(*s.parts)}
    assert parts == seen
    assert {part for _, part in parts} == {0, 1, 2, 3}
    assert {s.parts for s in found.sightings if s.row < late} == {(0, 1)}
    text = show("document", lock_of("phases"), "b:30", "--full").stdout
    assert "  0 to 3\n" in text


def test_an_id_an_address_and_a_text_lead_to_the_same_document(
    lock_of: Callable[[str], Path],
) -> None:
    lock = lock_of("concat")
    (by_text,) = shown("search", lock, "a whale and", "--global-batch", 8 * S)
    number, shard = by_text["document"]["document"], by_text["document"]["shard"]
    (by_number,) = shown("document", lock, f"b:{number}", "--global-batch", 8 * S)
    assert by_number["sightings"] == [
        {name: value for name, value in s.items() if name != "holds_text"}
        for s in by_text["sightings"]
    ]
    by = ("--id", by_text["document"]["id"], "--of", "b", "--global-batch", 8 * S)
    (by_id,) = shown("document", lock, *by)
    assert by_id == by_number
    dataset = LockRows(Lock.read(lock)).source(1)[0]
    local = dataset.shard_of(number)[1]
    (in_shard,) = shown("document", lock, f"b:{shard}:{local}", "--global-batch", 8 * S)
    assert in_shard == by_number
    assert len(by_text["sightings"]) > 10
    holding = [s["row"] for s in by_text["sightings"] if s["holds_text"]]
    assert 0 < len(holding) < len(by_text["sightings"])


def test_the_steps_of_a_document_show_it_and_ranks_and_micro_batches_divide_a_step(
    lock_of: Callable[[str], Path],
) -> None:
    lock = lock_of("concat")
    sizes = ("--global-batch", 8 * S, "--skip", "16:21", "--world", 2, "--micro-batch-size", 2 * S)
    (found,) = shown("document", lock, "a:11", *sizes)
    steps = [s for s in found["sightings"] if s["step"]]
    assert steps
    for sighting in steps:
        part = shown("step", lock, sighting["step"], *sizes,
            "--rank", sighting["rank"], "--micro-batch", sighting["micro_batch"],
        )  # fmt: skip
        assert len(part["rows"]) == 2
        (row,) = (r for r in part["rows"] if r["row_of_step"] == sighting["row_of_step"])
        assert row["row"] == sighting["row"]
        assert not 16 <= row["row"] < 21
        assert (11, "a") in [(piece["document"], row["source"]) for piece in row["pieces"]]
    whole = shown("step", lock, 3, *sizes)
    assert [r["row"] for r in whole["rows"]] == list(range(21, 29))
    parts = [shown("step", lock, 3, *sizes, "--rank", rank)["rows"] for rank in (0, 1)]
    assert parts[0] + parts[1] == whole["rows"]
    assert whole["rows"][2]["micro_batch"] == 1


def test_what_is_printed_has_stage_source_shard_file_line_and_borders(
    lock_of: Callable[[str], Path],
) -> None:
    lock = lock_of("concat")
    text = show("step", lock, 1, "--global-batch", 8 * S, "--first", 2).stdout
    view = LockRows(Lock.read(lock)).view(0)
    piece = view.pieces[1]
    assert f"step 1 of {Lock.read(lock).total_rows // 8}: 8 rows, 512 tokens" in text
    assert f"== row 0: stage main, source {view.source}, epoch 0" in text
    assert f"-- document {piece.document}  id {piece.id}" in text
    assert f"{piece.position_kind} {piece.position:,}; {piece.shard};" in text
    assert "end of document" in text
    assert "6 more rows of this step" in text
    text = show("search", lock, "a whale and", "--global-batch", 8 * S, "--world", 4).stdout
    assert "source b, address b:30" in text
    assert "  rank  " in text
    assert "more (--full shows all)" in text
    whole = show("search", lock, "a whale and", "--global-batch", 8 * S, "--full").stdout
    assert "holds it\n" in whole
    sightings = whole.partition("holds it\n")[2].splitlines()
    assert {line.endswith("  yes") for line in sightings if " main " in line} == {True, False}
    everything = show("document", lock, "b:30", "--full").stdout
    assert "more (" not in everything
    assert len(everything) > len(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["step", 1], "the size of a step is not known"),
        (["document", "--id", "x", "--world", 2], "the size of a step is not known"),
        (["step", 0, "--global-batch", 512], "there is no step 0"),
        (["step", 99, "--global-batch", 512], "there is no step 99"),
        (["step", 1, "--global-batch", 500], "not a multiple of the sequence length 64"),
        (["step", 1, "--global-batch", 512, "--rank", 1], "--rank needs --world"),
        (["step", 1, "--global-batch", 512, "--world", 3], "does not divide into 3 ranks"),
        (["step", 1, "--global-batch", 512, "--world", 2, "--rank", 2], "there is no rank 2"),
        (
            ["step", 1, "--global-batch", 512, "--world", 2, "--rank", 1, "--micro-batch", 0],
            "--micro-batch needs the size of one",
        ),
        (["step", 1, "--global-batch", 512, "--skip", "4-8"], "'4-8' is not a range of rows"),
        (
            ["step", 1, "--global-batch", 512, "--run", "r"],
            "--global-batch is for steps without --run",
        ),
        (["document", "--id", "nowhere"], "no document has the id 'nowhere'"),
        (["search", "not in any of them"], "no document holds"),
        (["search", ""], "an argument is empty"),
        (["document", "a"], "not the address of a document"),
        (["document", "c:1"], "the lock has no source 'c'"),
        (["document", "a:shard-99999:1"], "there is no shard 'shard-99999'"),
        (["document", "a:shard-00000:9999"], "there is no document 9,999 in shard-00000"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    lock_of: Callable[[str], Path], options: list[object], message: str
) -> None:
    command, *rest = options
    error = refused(str(command), lock_of("concat"), *rest)
    assert isinstance(error, UsageError)
    assert message in str(error)
