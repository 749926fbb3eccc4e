"""FAULTS rows 60, 62, 65, 66: a resume with another log, environment, place or optimiser."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.distributed import run_ranks
from support.runs import build_trainer, group_world, make_mixture, metrics, stop

from olm_data.errors import UsageError, ValidationError
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.manifest import CONFIG, LOCK, STATE, TOKENIZER
from olm_train.extensions.downstream.command import main as evaluate
from olm_train.extensions.generate.command import main as generate
from olm_train.extensions.hf_export.command import main as export
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


STOP = "--trainer.hard_stop={value: 6, unit: steps}"


STRICT = "--trainer.callbacks.environment.strict=true"


CODE = "--trainer.callbacks.environment.snapshot=a1"


def test_62_a_difference_is_said_and_strict_refuses(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(tiny_mixture, tmp_path, STOP, CODE).fit()
    path = tmp_path / "environment.json"
    ours = json.loads(path.read_text())
    assert {"python", "device", "package torch", "package numpy"} <= ours.keys()
    path.write_text(json.dumps({**ours, "package torch": "1.0"}))
    before = (tmp_path / "starts.jsonl").read_bytes(), (tmp_path / "metrics.jsonl").read_bytes()
    change = f"package torch: '1.0' -> {ours['package torch']!r}"
    with pytest.raises(ValidationError, match="environment is not that of the run") as refused:
        build_trainer(tiny_mixture, tmp_path, STRICT, CODE).fit()
    assert change in str(refused.value)
    assert before == (
        (tmp_path / "starts.jsonl").read_bytes(),
        (tmp_path / "metrics.jsonl").read_bytes(),
    )
    capsys.readouterr()
    goes_on = "--trainer.hard_stop={value: 7, unit: steps}"
    build_trainer(tiny_mixture, tmp_path, goes_on, CODE).fit()
    assert f"note: changed since the last start: {change}\n" in capsys.readouterr().err
    goes_on = goes_on.replace("7", "8")
    build_trainer(tiny_mixture, tmp_path, STRICT, CODE, goes_on).fit()  # the same now
    with pytest.raises(ValidationError, match="code: 'a1' -> 'b2'"):
        build_trainer(tiny_mixture, tmp_path, STRICT, CODE.replace("a1", "b2")).fit()


@pytest.fixture(scope="module")
def moved(tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copied run and a held-out set; all that was used to train is deleted."""
    there, here = tmp_path_factory.mktemp("there"), tmp_path_factory.mktemp("here")
    (there / "data").mkdir()
    lock = make_mixture(there / "data", tiny_tokenizer)
    build_trainer(
        lock, there / "run", "--trainer.hard_stop={value: 3, unit: steps}",
        "--trainer.callbacks.lm_evaluator.eval_interval=100",
    ).fit()  # fmt: skip
    shutil.copytree(there / "run", here / "run")
    shutil.copytree(there / "data" / "held", here / "held")
    shutil.rmtree(there)
    (here / "there").write_text(str(there))
    return here


def use(command: object, *arguments: object) -> str:
    result = CliRunner().invoke(command, [str(item) for item in arguments])  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    return result.stdout


def test_65_u4_a_checkpoint_holds_its_tokenizer_lock_and_configuration(moved: Path) -> None:
    names = {path.name for path in (moved / "run" / "step00000003").iterdir()}
    assert {TOKENIZER, LOCK, CONFIG, STATE} <= names


def test_65_u4_text_is_made_from_a_copied_run_and_from_an_export_of_it(
    moved: Path, tmp_path: Path
) -> None:
    use(export, moved / "run", "--output", tmp_path / "out")
    exported = shutil.copytree(tmp_path / "out", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "out")
    options = ("--prompt", "the quick", "--max-new-tokens", 8, "--temperature", 0)
    texts = {
        use(generate, place, *options)
        for place in (moved / "run", moved / "run" / "step00000003", exported)
    }
    assert len(texts) == 1
    assert texts.pop().startswith("the quick")


def test_65_u4_evaluation_of_a_copy_and_of_an_export_gives_the_loss_that_the_run_logged(
    moved: Path, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in (moved / "run" / "metrics.jsonl").open()]
    (logged,) = [line["eval"]["held"] for line in lines if "eval" in line]
    use(export, moved / "run", "--output", tmp_path)
    for place in (moved / "run", tmp_path / "model.safetensors"):
        result = json.loads(use(evaluate, place, "--data", moved / "held", "--json"))
        (found,) = result["datasets"].values()
        assert result["step"] == 3
        assert found["tokens"] == logged["tokens"]
        assert found["CE loss"] == pytest.approx(logged["CE loss"], rel=1e-6)
    assert "nats a token" in use(evaluate, moved / "run", "--data", moved / "held")


def test_65_u4_no_file_of_a_checkpoint_or_an_export_names_the_place_where_it_was_written(
    moved: Path, tmp_path: Path
) -> None:
    use(export, moved / "run", "--output", tmp_path / "out")
    there = (moved / "there").read_bytes()
    for folder in (moved / "run" / "step00000003", tmp_path / "out"):
        assert not [path for path in folder.rglob("*.*") if there in path.read_bytes()]


def test_65_u4_an_export_has_no_other_checkpoint(moved: Path, tmp_path: Path) -> None:
    use(export, moved / "run", "--output", tmp_path)
    result = CliRunner().invoke(generate, [str(tmp_path), "--checkpoint", "2"])
    assert (result.exit_code, "no checkpoint 2" in result.output) == (2, True)


OPTIM = "--train_module.optim={{name: {}, lr: 1e-3}}"


@pytest.fixture(scope="module")
def adamw(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    build_trainer(tiny_mixture, folder, stop(2), OPTIM.format("adamw")).fit()
    return folder


@pytest.mark.parametrize(
    "name", ["adam", "dion", "lion", "muon", "skip_step_adamw", "skip_step_lion"]
)
def test_66_t2_another_optimiser_is_refused_with_the_two_ways_to_mean_it(
    name: str, adamw: Path, tiny_mixture: Path
) -> None:
    before = sorted(path.name for path in adamw.glob("step*"))
    trainer = build_trainer(tiny_mixture, adamw, stop(4), OPTIM.format(name))
    with pytest.raises(
        ValidationError, match=r"trained with the optimiser torch\.optim\.AdamW; "
    ) as e:
        trainer.fit()
    assert e.value.exit_code == 3
    assert "train_module.optim in its config.json" in str(e.value)
    assert "trainer.load_path" in str(e.value)
    assert [line["step"] for line in metrics(adamw) if "eval" not in line] == [1, 2]
    assert sorted(path.name for path in adamw.glob("step*")) == before


def test_66_t2_the_same_optimiser_without_its_skipped_steps_is_another_one(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    build_trainer(tiny_mixture, tmp_path, stop(2), OPTIM.format("skip_step_lion")).fit()
    trainer = build_trainer(tiny_mixture, tmp_path, stop(4), OPTIM.format("lion"))
    with pytest.raises(ValidationError, match="Lion with skipped steps; this configuration has"):
        trainer.fit()


def test_66_t2_weights_and_data_position_go_on_under_another_optimiser_where_asked(
    adamw: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(
        tiny_mixture,
        tmp_path,
        stop(4),
        OPTIM.format("lion"),
        f"--trainer.load_path={adamw}",
        "--trainer.load_optim_state=false",
    )
    trainer.fit()
    assert [line["step"] for line in metrics(tmp_path) if "eval" not in line] == [3, 4]


def test_66_t2_a_load_path_with_its_optimiser_is_refused_as_well(
    adamw: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(
        tiny_mixture, tmp_path, OPTIM.format("lion"), f"--trainer.load_path={adamw}"
    )
    with pytest.raises(ValidationError, match="another"):
        trainer.fit()
