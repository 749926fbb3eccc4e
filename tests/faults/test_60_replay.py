"""Row 60: a resume that does not compute what the log says is found before it goes on."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.distributed import run_ranks
from support.runs import build_trainer, group_world, metrics, stop

from olm_data.errors import UsageError, ValidationError
from olm_train.callbacks.base import Callback
from olm_train.extensions.monitors.replay_checker import (
    COMPARED,
    ReplayCheckerCallback,
    first_difference,
)
from olm_train.trainer import Trainer

CHECK = "--trainer.callbacks.replay_checker"
LOSS, NORM = COMPARED


@pytest.fixture(scope="module")
def begun(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped at step 9, with checkpoints of steps 6 and 9."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    build_trainer(tiny_mixture, folder, stop(9)).fit()
    return folder


@pytest.fixture
def stopped(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "run"))


def killed(stopped: Path) -> Path:
    """As if it had been killed after logging step 9, before that checkpoint was complete."""
    shutil.rmtree(stopped / "step00000009")
    return stopped


def change_log(folder: Path, step: int, name: str) -> float:
    """Change the last bit of a logged value; return what it is now."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    line = next(line for line in lines if line["step"] == step and "eval" not in line)
    line[name] = math.nextafter(line[name], math.inf)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return float(line[name])


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and not p.name.startswith("lease-")
    }


class ChangedWeight(Callback):
    """Changes one weight of the state that was loaded, before the steps are repeated."""

    priority = 99

    def pre_train(self) -> None:
        with torch.no_grad():
            self.trainer.train_module.model.norm.weight[0] += 0.01


def test_60_repeated_steps_agree_bit_for_bit_and_leave_no_trace(
    tiny_mixture: Path, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(tiny_mixture, stopped, stop(12), f"{CHECK}.steps=2").fit()
    assert "replay check: steps 7 to 8 repeated, the same bit for bit" in capsys.readouterr().err
    build_trainer(tiny_mixture, tmp_path / "straight", stop(12)).fit()
    assert metrics(stopped) == metrics(tmp_path / "straight")
    starts = [json.loads(line) for line in (stopped / "starts.jsonl").open()]
    assert [(start["step"], start["rewound"]) for start in starts] == [(0, 0), (9, 0)]


@pytest.mark.parametrize(("step", "name"), [(7, LOSS), (9, NORM)])
def test_60_one_changed_bit_of_the_log_is_found_and_nothing_changes(
    tiny_mixture: Path, stopped: Path, step: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = change_log(stopped, step, name)
    before = content(stopped)
    trainer = build_trainer(tiny_mixture, stopped, stop(12), f"{CHECK}.steps=3")
    with pytest.raises(ValidationError, match=f"step {step}: {name} is .* was {value!r}") as found:
        trainer.fit()
    assert found.value.exit_code == 3
    assert content(stopped) == {**before, **environment_of(stopped)}
    warned = build_trainer(
        tiny_mixture, stopped, stop(10), f"{CHECK}.steps=3", f"{CHECK}.strict=false"
    )
    warned.fit()
    assert f"warning: replay check: step {step}: {name} is" in capsys.readouterr().err
    assert warned.step == 10


def environment_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("environment.json", "config.json")}


def test_60_a_changed_weight_is_found_in_the_first_step_after_it(
    tiny_mixture: Path, stopped: Path
) -> None:
    trainer = build_trainer(
        tiny_mixture,
        killed(stopped),
        f"{CHECK}.steps=3",
        f"{CHECK}.tolerance=1e-5",
        callbacks={"changed": ChangedWeight()},
    )
    with pytest.raises(ValidationError, match="replay check: step 7: "):
        trainer.fit()


def other_ranks(lock: Path, folder: Path) -> int:
    def trainer(*options: str) -> Trainer:
        return build_trainer(lock, folder, stop(10), *options, world=world)

    world = group_world()
    with pytest.raises(ValidationError, match="replay check: step "):
        trainer(f"{CHECK}.steps=3", f"{CHECK}.tolerance=0").fit()
    again = trainer(f"{CHECK}.steps=3")
    again.fit()
    return again.step


@pytest.mark.slow
def test_60_other_ranks_are_held_to_a_tolerance_and_to_bits_on_request(
    tiny_mixture: Path, stopped: Path
) -> None:
    change_log(stopped, 8, LOSS)  # sums of two ranks may have the bits of one
    assert run_ranks(other_ranks, 2, tiny_mixture, stopped) == [10, 10]


def test_60_what_cannot_be_compared_is_said(
    tiny_mixture: Path, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(tiny_mixture, stopped, stop(10), f"{CHECK}.steps=100").fit()
    assert "replay check: steps 7 to 9 repeated" in capsys.readouterr().err  # all that there are
    shutil.rmtree(stopped / "step00000006")
    shutil.rmtree(stopped / "step00000009")
    build_trainer(tiny_mixture, stopped, stop(11), f"{CHECK}.steps=1").fit()
    assert "no logged step follows a checkpoint; none is compared" in capsys.readouterr().err


NUMBERS = st.floats(-1e6, 1e6).filter(lambda x: abs(x) > 1e-6)


@given(NUMBERS, st.floats(0, 0.1), st.floats(0, 0.2))
def test_60_a_difference_counts_from_the_tolerance_on(
    was: float, tolerance: float, off: float
) -> None:
    now = was * (1 + off)
    found = first_difference({3: {LOSS: 1.0, NORM: was}}, {3: {LOSS: 1.0, NORM: now}}, tolerance)
    assert (found is None) == (abs(now - was) <= tolerance * abs(was))


@pytest.mark.parametrize(("was", "now"), [(None, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_60_no_number_is_the_same_only_as_no_number(was: float | None, now: float) -> None:
    logged: dict[int, dict[str, Any]] = {1: {LOSS: was, NORM: None}}
    assert first_difference(logged, {1: {LOSS: now, NORM: math.nan}}, 0.1) is not None
    assert (
        first_difference({1: {LOSS: None, NORM: 2.0}}, {1: {LOSS: now + math.nan, NORM: 2}}, 0)
        is None
    )


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"tolerance": -0.1}, {"tolerance": math.nan}])
def test_60_options_without_meaning_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ReplayCheckerCallback(**wrong)
