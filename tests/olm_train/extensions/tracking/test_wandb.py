"""The real W&B client against servers on loopback: what arrives, what ends the run, what fails."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.polling import wait_until
from support.service_stub import serving
from support.tracked import MODES, evaluated, logged, same, trained_beside, write_log
from support.wandb_stub import StubRun, WandBService

from olm_data.run_log.log import keep_until
from olm_train.extensions.tracking import wandb as client
from olm_train.extensions.tracking.feeder import Feeder
from olm_train.extensions.tracking.wandb import WandBCallback

KEY = "0123456789abcdef" * 3
PATIENT = 300.0
"""A slow machine is no server that hangs."""
pytestmark = pytest.mark.xdist_group("wandb")


@pytest.fixture(scope="module")
def server() -> Iterator[WandBService]:
    """One for all tests: the client keeps the address with which its process began."""
    import wandb

    service = WandBService()
    with serving(service) as url, pytest.MonkeyPatch.context() as environment:
        environment.setenv("WANDB_BASE_URL", url)
        environment.setenv("WANDB_API_KEY", KEY)
        environment.setenv("WANDB_MODE", "online")
        wandb.teardown()
        yield service
        wandb.teardown()


@pytest.fixture
def wandb(server: WandBService, monkeypatch: pytest.MonkeyPatch) -> WandBService:
    for name in ("INIT_SECONDS", "FINISH_SECONDS", "ASK_SECONDS"):
        monkeypatch.setattr(client, name, 300)
    server.runs.clear()
    server.operations.clear()
    server.mode, server.rewinds = "ok", True
    return server


def fed(run: Path, callback: WandBCallback, step: int = 0) -> tuple[Feeder, list[str]]:
    """Begin to feed a log as a start of the run at `step` does; the list takes what is said."""
    said: list[str] = []
    told = callback.tracked_run(run, {"seed": 3}, said.append)
    feeder = Feeder(
        callback.tracker(told), run, step=step, say=said.append, cancel=said.append,
        cancel_interval=callback.check_interval(), patience=PATIENT,
    )  # fmt: skip
    feeder.start()
    return feeder, said


def feed(run: Path, callback: WandBCallback, step: int = 0) -> list[str]:
    """Feed all of a log; return what was said."""
    feeder, said = fed(run, callback, step)
    feeder.close("finished")
    return said


def only(service: WandBService) -> StubRun:
    (run,) = service.runs.values()
    return run


def test_exactly_the_steps_arrive_and_a_start_further_back_rewinds_the_run(
    wandb: WandBService, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    write_log(run, range(1, 21))
    options = WandBCallback(name="n", project="lab", group="g", tags=("t1",), notes="why")
    assert feed(run, options) == []
    there = only(wandb)
    same(there.rows(), logged(run))
    assert (there.display, there.project, there.group) == ("n", "lab", "g")
    assert (there.tags, there.notes) == (["t1"], "why")
    assert json.loads(there.config)["seed"] == {"value": 3}
    keep_until(run, 12)
    write_log(run, range(13, 31))
    assert feed(run, options, 12) == []
    write_log(run, range(31, 36))
    assert feed(run, options, 30) == []  # it goes on where it was
    assert only(wandb).rewound == [12]
    same(only(wandb).rows(), logged(run))


def test_a_server_that_refuses_to_rewind_keeps_the_first_values_and_no_step_is_there_twice(
    wandb: WandBService, tmp_path: Path
) -> None:
    wandb.rewinds = False
    write_log(tmp_path, range(1, 21))
    feed(tmp_path, WandBCallback())
    keep_until(tmp_path, 12)
    write_log(tmp_path, range(13, 31))
    (note,) = feed(tmp_path, WandBCallback(), 12)
    assert "wandb keeps 8 steps after step 12" in note
    assert "RewindRun" in wandb.operations
    same(only(wandb).rows(), logged(tmp_path))


def test_a_late_evaluation_of_a_step_that_is_there_comes_into_the_summary(
    wandb: WandBService, tmp_path: Path
) -> None:
    write_log(tmp_path, range(1, 9))
    feed(tmp_path, WandBCallback())
    feeder, _ = fed(tmp_path, WandBCallback(), 8)
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 8, "eval": {"late": {"PPL": 3.5}}}\n')
    feeder.close("finished")
    assert [step for step, _ in only(wandb).rows()] == [*range(1, 9)]
    assert json.loads(only(wandb).summary)["eval/late/PPL"] == 3.5


def test_an_evaluation_that_is_made_after_a_restart_comes_with_the_next_row(
    wandb: WandBService, tmp_path: Path
) -> None:
    write_log(tmp_path, range(1, 9))
    feed(tmp_path, WandBCallback())
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 8, "eval": {"late": {"PPL": 3.5}}}\n')
    write_log(tmp_path, range(9, 13))
    feed(tmp_path, WandBCallback(), 8)
    rows = only(wandb).rows()
    assert [step for step, _ in rows] == [*range(1, 13)]
    assert [(step, row["eval/late/PPL"]) for step, row in rows if "eval/late/PPL" in row] == [
        (9, 3.5)
    ]


def test_evaluations_made_beside_the_run_come_behind_its_last_row(
    wandb: WandBService, tmp_path: Path
) -> None:
    write_log(tmp_path, range(1, 11))
    for step in (2, 3, 4):
        evaluated(tmp_path, step, 10.0 * step)
    assert feed(tmp_path, WandBCallback()) == []
    rows = only(wandb).rows()
    same(rows[:10], logged(tmp_path))
    behind = [(n, row["watched/step"], row["watched/held/PPL"]) for n, row in rows[10:]]
    assert behind == [(11, 2, 20.0), (12, 3, 30.0), (13, 4, 40.0)]
    assert feed(tmp_path, WandBCallback(), 10) == []  # they come again, and once
    assert only(wandb).rewound in ([], [10])
    again = [row["watched/step"] for _, row in only(wandb).rows() if "watched/step" in row]
    assert sorted(again) == [2, 3, 4]


def test_tags_given_there_end_the_run(wandb: WandBService, tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 6))
    callback = WandBCallback(tags=("Cancelled", "x"), cancel_check_interval=4)
    assert feed(tmp_path, callback) == ["tag Cancelled"]
    write_log(tmp_path, range(6, 11))
    own = WandBCallback(tags=("x",), cancel_tags=("X",), cancel_check_interval=4)
    assert feed(tmp_path, own, 5) == ["tag x"]
    write_log(tmp_path, range(11, 13))
    assert feed(tmp_path, own, 10) == []  # too few steps to ask again
    asked = wandb.operations.count("Run")
    write_log(tmp_path, range(13, 21))
    never = WandBCallback(tags=("x",), cancel_tags=(), cancel_check_interval=4)
    assert feed(tmp_path, never, 12) == []
    assert wandb.operations.count("Run") == asked


def test_how_it_ended_and_why_is_there(
    wandb: WandBService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_API_KEY", "abcdefgh12345678")
    write_log(tmp_path, range(1, 4))
    feeder, said = fed(tmp_path, WandBCallback())
    feeder.close("failed", ("run failed", "ValueError: abcdefgh12345678"))
    assert said == []
    assert only(wandb).ended == [1]
    assert only(wandb).alerts == [("ERROR", "run failed", "ValueError: ***")]


@pytest.mark.slow  # the client looks every 15 seconds
def test_the_stop_button_ends_the_run(wandb: WandBService, tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 4))
    feeder, said = fed(tmp_path, WandBCallback(cancel_tags=None))
    wait_until(lambda: bool(wandb.runs), "the run is there")
    only(wandb).stopped = True
    for step in range(4, 200):
        if said:
            break
        write_log(tmp_path, range(step, step + 1))
        feeder.wake()
        time.sleep(0.5)
    feeder.close("stopped")
    assert said == ["Stop button"]
    same(only(wandb).rows(), logged(tmp_path))


@pytest.mark.slow  # the client tries again for a while before it gives up
def test_a_server_that_comes_back_gets_everything(
    wandb: WandBService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path, range(1, 6))
    feed(tmp_path, WandBCallback())
    wandb.mode = "500"
    monkeypatch.setattr(client, "INIT_SECONDS", 25.0)  # as it is
    write_log(tmp_path, range(6, 11))
    feeder, said = fed(tmp_path, WandBCallback(), 5)
    wait_until(lambda: bool(said), "it is told")
    monkeypatch.setattr(client, "INIT_SECONDS", 300)
    wandb.mode = "ok"
    wait_until(lambda: len(only(wandb).history) >= 9, "it goes on")
    feeder.close("finished")
    assert len(said) == 1
    same(only(wandb).rows(), logged(tmp_path))


@pytest.mark.slow
def test_whatever_the_server_does_no_loss_changes_and_it_is_told(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    services = {mode: WandBService(mode) for mode in MODES}

    def variables(url: str) -> dict[str, str]:
        return {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}

    said = trained_beside(services, "wandb", variables, tiny_mixture, tmp_path)
    assert KEY not in "".join(said.values())
    same(only(services["ok"]).rows(), logged(tmp_path / "ok"))
    assert "wandb" not in said["ok"].replace("wandb.login()", "").replace("wandb: [", "")
