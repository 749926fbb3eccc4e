"""A view of a run says what a page has not yet, and no more."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest

from olm_data.errors import InputError, ValidationError, printable
from olm_data.extensions.report.run_view import (
    MOST_EVENTS,
    RunView,
    encoded,
    events,
    open_views,
    shares,
    status,
)
from olm_data.extensions.report.write import MOST_STEPS, frozen
from olm_data.mixture.lock import Lock
from olm_data.order.steps import order_digest
from olm_data.rows.views import LockRows
from olm_data.run_log.log import End, MetricsWriter, Start, Step, append_start
from olm_data.run_log.run_folder import (
    BadDocument,
    BadRow,
    BadStep,
    StepSamples,
    WrittenText,
    write_samples,
)


def add(run: Path, *steps: int) -> None:
    writer = MetricsWriter(run)
    for step in steps:
        row = 4 * ((step - 1) % 7)  # the lock has 30
        writer.write(
            Step(step=step, tokens=64 * step, rows=(row, row + 4), metrics={"train/CE loss": 5.0})
        )
    writer.close()


def test_a_page_gets_what_it_has_not_and_nothing_else(lock: Path, run: Path) -> None:
    view = RunView(run, "run", str(lock))
    all_ = view.update()
    assert all_.reset
    assert all_.points.steps == [1, 2, 3, 4, 5]
    assert all_.points.values["train/CE loss"] == [5.9, 5.8, 5.7, 5.6, 5.5]
    assert [(e.step, e.losses) for e in all_.evaluations] == [(5, {"a": 5.25})]
    assert all_.words is not None
    same = view.update(all_.token)
    assert (same.reset, same.points.steps, same.evaluations, same.words) == (False, [5], [], None)
    add(run, 6, 7)
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


def test_a_frozen_page_has_documents_of_a_bounded_number_of_steps(lock: Path, run: Path) -> None:
    add(run, *range(6, 100))
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
    place: str, lock: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(run, 1)
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
