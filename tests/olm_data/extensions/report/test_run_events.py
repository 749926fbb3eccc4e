"""What happened to a run is told in its order, and how it is now."""

from __future__ import annotations

from pathlib import Path

import msgspec

from olm_data.extensions.report.run_view import MOST_EVENTS, events, status
from olm_data.run_log.log import End, Start
from olm_data.run_log.run_folder import BadDocument, BadRow, BadStep


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
