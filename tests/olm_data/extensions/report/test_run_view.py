"""What a page shows of a run: curves, evaluations, events, documents."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ledgers import Piece, write_ledger

import olm_data
from olm_data.errors import InputError, ValidationError, printable
from olm_data.extensions.ledger.files import keep_until, ledger_files
from olm_data.extensions.report.curves import (
    MOST_POINTS,
    MOST_SOURCES,
    POINTS,
    Curves,
    LedgerCurve,
    LedgerTail,
    Points,
)
from olm_data.extensions.report.evaluations import EvaluationTable, TaskScore, plus_minus, point
from olm_data.extensions.report.run_view import (
    MOST_EVENTS,
    RunView,
    encoded,
    events,
    open_views,
    shares,
    status,
)
from olm_data.extensions.report.step_documents import step_documents
from olm_data.extensions.report.write import MOST_STEPS, frozen, write_report
from olm_data.extensions.watching.follow import StepColumns
from olm_data.extensions.watching.watched import EVAL, Measured, WatchedEvaluation
from olm_data.mixture.lock import Lock
from olm_data.order.steps import order_digest
from olm_data.rows.views import LockRows
from olm_data.run_log.log import End, Evaluation, MetricsWriter, Start, Step, append_start
from olm_data.run_log.run_folder import (
    BadDocument,
    BadRow,
    BadStep,
    StepSamples,
    WrittenText,
    write_samples,
)
from olm_data.storage.store import Store


def test_a_page_gets_what_it_has_not_and_nothing_else(
    lock: Path, run: Path, grow: Callable[[int, int], None]
) -> None:
    view = RunView(run, "run", str(lock))
    all_ = view.update()
    assert all_.reset
    assert all_.points.steps == [1, 2, 3, 4, 5]
    assert all_.points.values["train/CE loss"] == [5.9, 5.8, 5.7, 5.6, 5.5]
    assert [(e.step, e.losses) for e in all_.evaluations] == [(5, {"a": 5.25})]
    assert all_.words is not None
    same = view.update(all_.token)
    assert (same.reset, same.points.steps, same.evaluations, same.words) == (False, [5], [], None)
    grow(6, 8)
    more = view.update(all_.token)
    assert (more.points.first, more.points.steps) == (4, [5, 6, 7])
    assert more.words.step == 7
    part = view.update("", 2, 3)
    assert part.points.steps == [2, 3]
    assert view.update("nonsense").points.steps == [1, 2, 3, 4, 5, 6, 7]


def test_texts_of_steps_are_sent_harmless_once_there_are_new_ones(lock: Path, run: Path) -> None:
    view = RunView(run, "run", str(lock))
    token = view.update().token
    for step in range(1, 40):
        texts = (WrittenText("p\x1b[2J", "t\u202e", "length"),)
        write_samples(run, StepSamples(step=step, texts=texts, temperature=0.8, top_k=50, seed=0))
    words = view.update(token).words
    assert len(words.samples) == 12
    assert (words.samples[0].step, words.samples[-1].step) == (1, 39)
    shown = words.samples[0].texts[0]
    assert not {"\x1b", "\u202e"} & set(shown.prompt + shown.text)
    assert view.update(view.update(token).token).words is None


def test_the_mixture_drawn_so_far_is_that_of_the_rows_passed(lock: Path, run: Path) -> None:
    words = RunView(run, "run", str(lock)).update().words
    drawn = {share.source: share for share in words.mixture}
    schedule = Lock.read(lock).schedule()
    for number, name in enumerate(schedule.names):
        count = int((schedule.locate(range(20)).source == number).sum())
        assert (drawn[name].tokens, drawn[name].drawn) == (16 * count, count / 20)
    assert drawn["a"].asked == 0.75  # of the stage `main`, which all 20 rows are of
    assert words.total == 0  # not known: the run has no line of its start


def test_the_documents_of_a_step_are_those_of_its_rows(lock: Path, run: Path) -> None:
    view = RunView(run, "run", str(lock))
    view.read_all()
    found, rows = view.documents(2), LockRows(Lock.read(lock))
    assert (found.step, found.rows_of_step, [r.row for r in found.rows]) == (2, 4, [4, 5, 6, 7])
    for row in found.rows:
        pieces = rows.view(row.row).pieces
        assert [piece.text for piece in row.pieces] == [
            "\n".join(map(printable, piece.text[:600].split("\n"))) for piece in pieces
        ]
    assert view.documents(4, most_rows=1, most_text=3).rows[0].pieces[0].cut
    assert view.documents(99).step == 5  # the last there is


def test_a_step_made_of_other_rows_is_not_shown(lock: Path, run: Path) -> None:
    wrong = order_digest("0" * 64, Lock.read(lock).schedule().source_rows)
    writer = MetricsWriter(run)
    writer.write(Step(step=6, tokens=400, rows=(20, 24), order=wrong))
    writer.write(Step(step=7, tokens=464, rows=(10**9, 10**9 + 4)))
    writer.close()
    view = RunView(run, "run", str(lock))
    view.read_all()
    with pytest.raises(ValidationError, match="not made of these rows"):
        view.documents(6)
    with pytest.raises(InputError, match="the lock has"):
        view.documents(7)


def test_without_its_lock_a_run_is_shown_without_documents(lock: Path, run: Path) -> None:
    start = Start(
        step=0, rewound=0, lock="f" * 64, global_batch_size=64, world_size=1, skip=(), time=1.0
    )
    append_start(run, start)
    words = RunView(run, "run", str(lock)).update().words
    assert words.mixture == []
    assert any("another lock" in note for note in words.notes)
    append_start(run, msgspec.structs.replace(start, lock=Lock.read(lock).digest, time=2.0))
    words = RunView(run, "run", str(lock)).update().words
    assert words.total == Lock.read(lock).total_rows // 4


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        open_views([tmp_path])


def test_runs_of_one_name_are_named_by_their_paths(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "x" / "run"
    other.mkdir(parents=True)
    (other / "metrics.jsonl").touch()
    assert [view.name for view in open_views([run, other])] == [str(run), str(other)]


def test_a_frozen_page_has_documents_of_a_bounded_number_of_steps(
    lock: Path, run: Path, grow: Callable[[int, int], None]
) -> None:
    grow(6, 100)
    page = json.loads(encoded(frozen(open_views([run], str(lock)))))
    steps = [int(step) for step in page["documents"][0]]
    assert len(steps) <= MOST_STEPS
    assert {1, 5, 99} <= set(steps)  # the first, that of an evaluation, the last
    assert page["runs"][0]["points"]["steps"] == list(range(1, 100))


def test_no_character_of_the_data_of_a_page_begins_a_tag() -> None:
    hostile = "</script><!--&\u2028"
    assert not set(encoded([hostile])) & set("<>&\u2028")
    assert json.loads(encoded([hostile])) == [hostile]


def test_a_folder_that_is_moved_away_is_said_and_what_was_read_stays(lock: Path, run: Path) -> None:
    view = RunView(run, "run", str(lock))
    there = view.update()
    assert there.words is not None
    run.rename(run.parent / "elsewhere")
    gone = view.update(there.token)
    assert not gone.reset
    assert gone.words.notes[0] == f"{printable(str(run))} is gone: this is what was read of it"
    (run.parent / "elsewhere").rename(run)
    back = view.update(gone.token)
    assert back.words == there.words
    assert (back.reset, back.points.steps) == (False, there.points.steps[-1:])


@pytest.mark.parametrize(
    "place", ["http://{0}/m.lock.json", "s3://b/m.lock.json", "hf://datasets/a/b/m.lock.json"]
)
def test_no_address_in_a_run_folder_is_asked(
    place: str,
    lock: Path,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    grow: Callable[[int, int], None],
) -> None:
    grow(1, 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for name in ("AWS_ENDPOINT_URL", "HF_ENDPOINT"):
            monkeypatch.setenv(name, f"http://{address}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        config: dict[str, object] = {"data_loader": {"mixture": place.format(address)}}
        (run / "config.json").write_text(json.dumps(config))
        view = RunView(run, "run")
        words = view.update().words
        assert any("which only you may open" in note for note in words.notes)
        with pytest.raises(InputError, match="give the lock yourself"):
            view.documents(1)
        # a lock that is here, with sources that are not
        other = json.loads(lock.read_text())
        other["locations"] = dict.fromkeys(other["locations"], "s3://b/data")
        (run / "m.lock.json").write_text(json.dumps(other))
        (run / "config.json").write_text('{"data_loader": {"mixture": "m.lock.json"}}')
        view = RunView(run, "run")
        words = view.update().words
        assert words.mixture
        with pytest.raises(InputError, match="source 'a' of its lock"):
            view.documents(1)
        with pytest.raises(BlockingIOError):
            server.accept()


# What happened to a run is told in its order, and how it is now.
def start(step: int, time: float, **more: object) -> Start:
    plain = Start(
        step=step,
        rewound=0,
        lock="f" * 64,
        global_batch_size=64,
        world_size=2,
        skip=(),
        time=time,
        device="cpu",
    )
    return msgspec.structs.replace(plain, **more)


def test_a_run_is_what_its_last_start_came_to() -> None:
    starts, end = [start(0, 100.0)], End(step=9, time=200.0, reason="failed", by="OSError", why="x")
    assert status(starts, [], 150.0, 160.0).word == "running"
    assert status(starts, [], 150.0, 900.0).word == "silent"
    failed = status(starts, [end], 150.0, 900.0)
    assert (failed.word, failed.text) == ("failed", "failed by OSError at step 9: x")
    assert status([*starts, start(9, 300.0)], [end], 310.0, 320.0).word == "running"


def test_starts_ends_spikes_and_checkpoints_are_in_the_order_of_steps(tmp_path: Path) -> None:
    (tmp_path / "step00000004").mkdir()
    (tmp_path / "step00000004/manifest.json").write_text("{}")
    (tmp_path / "step00000006").mkdir()  # no checkpoint without its manifest
    piece = BadDocument(None, "<b>\x1b.txt", 1, "line", "s", 0, 0, 9)
    bad = BadStep(step=5, loss="9.5", grad_norm="7.0", rows=[BadRow(1, "m", "web", [piece])])
    bad.write(tmp_path / "spike-step00000005.json")
    (tmp_path / "bad-step00000007.json").write_text("{")
    notes: list[str] = []
    changed = start(4, 300.0, rewound=3, changes=("lr: 1 -> 2",))
    end = End(step=8, time=400.0, reason="finished")
    found, earlier = events(tmp_path, [start(0, 100.0), changed], [end], notes)
    assert [(e.kind, e.step) for e in found] == [
        ("start", 0), ("start", 4), ("checkpoint", 4), ("spike", 5), ("bad", 7), ("end", 8),
    ]  # fmt: skip
    texts = [e.text for e in found]
    assert texts[1] == "start on 2 x cpu, from step 4, 3 steps lost, lr: 1 -> 2"
    assert texts[3] == "loss 9.5, gradient norm 7.0; web <b>\\x1b.txt line 1"
    assert "bad-step00000007.json cannot be read" in notes[0]
    assert earlier == 0


def test_many_events_are_the_latest_and_a_count(tmp_path: Path) -> None:
    found, earlier = events(tmp_path, [start(n, float(n)) for n in range(MOST_EVENTS + 7)], [], [])
    assert (len(found), earlier, found[0].step) == (MOST_EVENTS, 7, 7)


# The mixture so far is counted over the stages, without the rows left out.
def test_what_was_asked_for_follows_the_stages(lock: Path) -> None:
    mixture = Lock.read(lock)
    schedule = mixture.schedule()
    found = {share.source: share for share in shares(mixture, schedule, 25, [(2, 5), (30, 40)])}
    kept = np.r_[0:2, 5:25]
    count = np.bincount(schedule.locate(kept).source, minlength=2)
    assert found["a"].drawn == pytest.approx(count[0] / 22)
    assert found["b"].tokens == 16 * count[1]
    # 20 rows of `main` at 3:1, then 5 of `anneal`, which is all b
    assert found["a"].asked == pytest.approx(15 / 25)
    assert found["b"].asked == pytest.approx(10 / 25)


def test_a_run_without_a_row_has_drawn_nothing(lock: Path) -> None:
    mixture = Lock.read(lock)
    assert all(share.drawn == 0 for share in shares(mixture, mixture.schedule(), 0, []))


def columns(
    steps: Sequence[int], values: Sequence[float] | np.ndarray, place: int = 1
) -> StepColumns:
    """Steps with one metric, whose lines stand at `place` times their number."""
    step = np.array(steps, np.int64)
    nothing = np.zeros(len(step))
    rows = np.zeros((len(step), 2), np.int64)
    return StepColumns(place * step, step, step, nothing, rows, {"a": np.array(values)})


def joined(old: Points | None, new: Points) -> Points:
    """What a page makes of what it has and what comes."""
    if old is None or new.first == 0 or old.size != new.size:
        return new
    return Points(
        first=0,
        size=new.size,
        steps=old.steps[: new.first] + new.steps,
        tokens=old.tokens[: new.first] + new.tokens,
        time=old.time[: new.first] + new.time,
        values={n: old.values[n][: new.first] + v for n, v in new.values.items()},
        low={n: old.low[n][: new.first] + v for n, v in new.low.items()},
        high={n: old.high[n][: new.first] + v for n, v in new.high.items()},
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 1500), min_size=1, max_size=8))
def test_pieces_together_are_the_whole(growth: list[int]) -> None:
    curves, page, step = Curves(["a"]), None, 0
    for more in growth:
        new = range(step + 1, step + more + 1)
        curves.extend(columns(new, [math.sin(n) if n % 3 else math.nan for n in new]))
        step += more
        size, have = (page.size, len(page.steps)) if page else (0, 0)
        page = joined(page, curves.points(range(len(curves)), size, have))
        assert page == curves.points(range(len(curves)))


def test_a_million_steps_are_few_points_and_no_spike_is_lost() -> None:
    curves = Curves(["a"])
    values = np.full(1_000_000, 2.0)
    values[777_776] = 99.0
    curves.extend(columns(range(1, 1_000_001), values))
    points = curves.points(range(len(curves)))
    assert points.size == 512
    assert len(points.steps) == -(-1_000_000 // 512) <= MOST_POINTS
    assert max(v for v in points.high["a"] if v is not None) == 99.0
    close = curves.points(curves.between(777_000, 778_000))
    assert (close.size, close.values["a"][777]) == (1, 99.0)
    again = curves.points(range(len(curves)), points.size, len(points.steps))
    assert len(again.steps) == 1


def test_a_step_is_found_by_its_number_or_the_one_before() -> None:
    curves = Curves(["a"])
    assert curves.place(1) is None
    curves.extend(columns([1, 2, 5], [1.0, 2.0, 5.0], place=100))
    assert [curves.place(step) for step in (0, 1, 4, 5, 9)] == [100, 100, 200, 500, 500]
    assert curves.last("a", 2) == 3.5


# The curves of a ledger are the sums of its pieces, however they were read.
FOREVER = float("inf")


def step_pieces(step: int) -> list[Piece]:
    return [("web", step, 0, 0, 10, 2.0 + step), ("books", step, 300, 0, 30, 1.0)]


def test_each_source_and_place_has_a_curve(tmp_path: Path) -> None:
    tail = LedgerTail(tmp_path)
    tail.read(FOREVER)
    assert tail.curves() is None
    write_ledger(tmp_path, {step: step_pieces(step) for step in (1, 2, 3)})
    write_ledger(tmp_path, {3: [("web", 9, 5, 0, 10, 9.0)]}, rank=1)
    tail.read(FOREVER)
    curves = tail.curves()
    assert curves.until == [1, 2, 3]
    assert curves.sources == [
        LedgerCurve("books", [1.0, 1.0, 1.0]),
        LedgerCurve("web", [3.0, 4.0, 7.0]),  # of both ranks
    ]
    assert curves.positions == [
        LedgerCurve("0", [3.0, 4.0, 5.0]),
        LedgerCurve("1 to 127", [None, None, 9.0]),
        LedgerCurve("256 to 511", [1.0, 1.0, 1.0]),
    ]


def test_read_bit_by_bit_it_is_what_it_is_as_a_whole(tmp_path: Path) -> None:
    slow, seen = LedgerTail(tmp_path), 0
    for first in range(1, 2 * POINTS + 40, 100):
        write_ledger(tmp_path, {step: step_pieces(step) for step in range(first, first + 100)})
        slow.read(-1.0)  # one that has no time
        assert slow.more
        slow.read(FOREVER)
        assert slow.changes > seen
        seen = slow.changes
    whole = LedgerTail(tmp_path)
    whole.read(FOREVER)
    assert slow.curves() == whole.curves()
    curves = whole.curves()
    assert len(curves.until) <= POINTS
    assert curves.until[:2] == [4, 8]
    assert curves.sources[1].losses[0] == 2.0 + (1 + 2 + 3 + 4) / 4
    whole.read(FOREVER)
    assert whole.changes == len(ledger_files(tmp_path))  # nothing is read twice


def test_what_a_resume_cut_off_is_gone(tmp_path: Path) -> None:
    write_ledger(tmp_path, {step: step_pieces(step) for step in range(1, 9)})
    tail = LedgerTail(tmp_path)
    tail.read(FOREVER)
    keep_until(tmp_path, 3)
    tail.read(FOREVER)
    curves = tail.curves()
    assert curves.until == [1, 2, 3]


def test_many_sources_are_some_curves_and_a_rest(tmp_path: Path) -> None:
    pieces: list[Piece] = [(f"s{n}", n, 0, 0, 40 - n, 1.0 + n) for n in range(MOST_SOURCES + 2)]
    write_ledger(tmp_path, {1: pieces})
    tail = LedgerTail(tmp_path)
    tail.read(FOREVER)
    curves = tail.curves()
    assert [curve.name for curve in curves.sources][-2:] == ["s7", "2 other sources"]
    assert curves.sources[-1].losses == [pytest.approx((32 * 9.0 + 31 * 10.0) / 63, rel=1e-5)]


def test_a_file_that_is_no_ledger_is_said_and_left_out(tmp_path: Path) -> None:
    write_ledger(tmp_path, {1: step_pieces(1)})
    (tmp_path / "ledger/step00000003-rank0000.parquet").write_bytes(b"PAR1")
    tail = LedgerTail(tmp_path)
    tail.read(FOREVER)
    assert "step00000003-rank0000.parquet cannot be read" in tail.wrong
    curves = tail.curves()
    assert curves.until == [1]


TASK = {
    "acc": 0.25, "len_norm": 0.5, "BPB": 1.125, "len_norm stderr": 0.0625,
    "len_norm change": 0.03125, "len_norm change stderr": 0.015625, "questions": 64.0,
}  # fmt: skip
SET = {"CE loss": 2.0, "PPL": 7.4, "BPB": 1.25, "CE loss/language=de": 2.5, "BPB/language=de": 1.5}


def entry(step: int, **results: dict[str, float | None]) -> Evaluation:
    named = {name.replace("_", "/"): values for name, values in results.items()}
    return Evaluation(step=step, results=named)


def test_a_point_has_losses_bits_and_scores_apart() -> None:
    found = point(entry(5, web=dict(SET), downstream_arc=dict(TASK), empty={"CE loss": None}))
    assert (found.losses, found.bits) == ({"web": 2.0}, {"web": 1.25})
    assert found.scores == {"downstream/arc": TaskScore("len_norm", 0.5, 0.0625)}


def test_what_stands_is_the_latest_by_step_and_not_by_time() -> None:
    standing = EvaluationTable([entry(10, web=dict(SET)), entry(5, web={"CE loss": 9.0})])
    assert [(row.group, row.step, row.bits) for row in standing.sets()] == [
        ("", 10, 1.25), ("language de", 10, 1.5),
    ]  # fmt: skip
    standing.take(entry(15, web={"CE loss": 1.0}, t={**TASK, "len_norm stderr": None}))
    assert [(row.name, row.step, row.loss) for row in standing.sets()] == [("web", 15, 1.0)]
    (task,) = standing.tasks()
    assert (task.score.error, plus_minus(task.score)) == (None, "0.5000")
    assert task.change is not None
    assert plus_minus(task.change, "+") == "+0.0312 ± 0.0156"


def write(run: Path, *lines: dict[str, object]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def watched(run: Path, step: int, **results: dict[str, float | None]) -> None:
    logged = entry(step, **results)
    found = WatchedEvaluation(
        checkpoint=f"step{step:08d}",
        digest="a" * 64,
        step=step,
        time=float(step),
        data={name: Measured(digest="d", sequence_length=8) for name in logged.results},
        results=logged.results,
    )
    found.write(Store(str(run)).child(EVAL))


def test_a_page_gets_what_watchers_found_at_its_step_once_the_log_is_there(tmp_path: Path) -> None:
    steps = [{"step": n, "tokens": 8 * n, "rows": [n - 1, n], "train/CE loss": 5.0} for n in (1, 2)]
    write(tmp_path, *steps, {"step": 2, "eval": {"web": SET}})
    view = RunView(tmp_path, "run")
    first = view.update()
    watched(tmp_path, 1, downstream_arc=dict(TASK))
    watched(tmp_path, 9, web={"CE loss": 1.0})  # of a step that the log has lost
    more = view.update(first.token)
    assert [each.step for each in more.evaluations] == [1]
    assert [(row.name, row.step) for row in more.words.tasks] == [("downstream/arc", 1)]
    assert [row.step for row in more.words.sets] == [2, 2]
    assert ("bits/byte on web", "1.250") in more.words.facts
    assert ("downstream/arc: len_norm", "0.5000 ± 0.0625") in more.words.facts
    (tmp_path / EVAL / "step00000002.json").write_text("{")
    words = view.update(more.token).words
    assert any("eval/step00000002.json" in text for text in words.notes)
    again = RunView(tmp_path, "run").update()
    assert sorted(each.step for each in again.evaluations) == [1, 2]


def test_names_in_evaluations_are_sent_harmless(tmp_path: Path) -> None:
    step = {"step": 1, "tokens": 8, "rows": [0, 1], "train/CE loss": 5.0}
    write(tmp_path, step, {"step": 1, "eval": {"w\x1b[2Jeb": {"CE loss": 2.0}}})
    watched(tmp_path, 1, **{"o\x1b[2Jther": {"CE loss": 1.0}})
    found = RunView(tmp_path, "run").update()
    assert sorted(name for each in found.evaluations for name in each.losses) == [
        "o\\x1b[2Jther", "w\\x1b[2Jeb",
    ]  # fmt: skip
    assert "\\u001b" not in encoded(found)


def test_rows_that_were_skipped_are_not_those_of_the_step(lock: Path) -> None:
    step = Step(
        step=2, tokens=96, rows=(4, 9), skipped=((5, 7),), metrics={"optim/step skipped": 1.0}
    )
    found = step_documents(LockRows(Lock.read(lock)), step, most_rows=2, most_text=5)
    assert ([row.row for row in found.rows], found.rows_of_step) == ([4, 7], 3)
    assert found.state == "not taken"
    assert sum(rows for *_, rows in found.sources) == 3
    for row in found.rows:
        pieces = LockRows(Lock.read(lock)).view(row.row).pieces
        assert [piece.text for piece in row.pieces] == [
            "\n".join(map(printable, piece.text[:5].split("\n"))) for piece in pieces
        ]


def test_trained_tokens_of_chats_are_marked_counted_and_harmless(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    asked, answer = "<b> \x1b é 🌍", "<i>no</i>\n\u202e 世界"
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    rows = [json.dumps({"messages": turns * (n % 3 + 1)}) + "\n" for n in range(9)]
    (tmp_path / "chats.jsonl").write_text("".join(rows))
    olm_data.tokenize(
        tmp_path / "chats.jsonl",
        tokenizer=tiny_tokenizer,
        output=tmp_path / "chats",
        format="chat",
        chat_template="tulu",
    )
    stage = {"name": "main", "epochs": {"chats": 1}}
    keys = {"version": 1, "sequence_length": 64, "packing": "best_fit", "stages": [stage]}
    manifest = tmp_path / "mix.json.yaml"
    manifest.write_text(json.dumps(keys | {"sources": {"chats": {"data": "./chats"}}}))
    mixture = olm_data.mix(manifest, tmp_path / "mix.lock.json")
    step = Step(step=1, tokens=0, rows=(0, mixture.total_rows), metrics={})
    shown = step_documents(LockRows(mixture), step, most_rows=99, most_text=999)
    pieces = [piece for row in shown.rows for piece in row.pieces]
    dataset = mixture.open_dataset(0)
    assert sum(piece.trained or 0 for piece in pieces) == dataset.manifest.trained
    for piece in pieces:
        assert "".join(text for text, _ in piece.runs) == piece.text
    marked = {text for piece in pieces for text, on in piece.runs if on}
    end = "<|endoftext|>"
    assert "<i>no</i>\n\\u202e 世界" + end in marked
    assert not any("<b>" in text or "user" in text for text in marked)
    page = write_report(str(tmp_path / "mix.lock.json"), [], str(tmp_path / "r.html"), say=print)
    text = page.read_text()
    assert "<mark>&lt;i&gt;no&lt;/i&gt;\n" in text
    share = 100 * dataset.manifest.trained / dataset.tokens
    assert f"{share:.1f} % of tokens" in text
    assert "<mark>Underlined</mark>" in text
