"""Where a run begins: its own checkpoint, another run's, exported weights; what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.runs import build_trainer, metrics, same_bits, tensors
from support.seal import seal

from olm_data.errors import ConflictError, InputError, OlmError, UsageError, ValidationError
from olm_data.run_log.log import read_starts
from olm_train.checkpoint.documents import RunOrigin
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.distributed.world import World
from olm_train.extensions.hf_export.command import main
from olm_train.model.weights_folder import load_exported
from olm_train.trainer import Trainer

MODEL = (
    "--model={d_model: 16, n_layers: 2, n_heads: 2, vocab_multiple: 100, "
    "feed_forward: {hidden_size: 32}}"
)
NO_STATE = ("--trainer.load_trainer_state=false", "--trainer.load_optim_state=false")


def trainer(lock: Path, folder: Path, stop: int, *more: str) -> Trainer:
    return build_trainer(lock, folder, MODEL, *more, quiet=True, stop=stop)


@pytest.fixture(scope="module")
def first(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 steps, its vocabulary padded from 512 to 600."""
    folder = tmp_path_factory.mktemp("first") / "run"
    trainer(tiny_mixture, folder, 3).fit()
    return folder


@pytest.fixture(scope="module")
def exported(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("exported") / "weights" / "model.safetensors"
    result = CliRunner().invoke(main, [str(first), "--output", str(file)])
    assert result.exit_code == 0, result.output
    assert "step         3\n" in result.output
    return file


def began(lock: Path, folder: Path, source: Path, *more: str) -> Trainer:
    """A trainer before its first step, with what `load_path` gave it."""
    found = trainer(lock, folder, 5, f"--trainer.load_path={source}", *more)
    found.restore()
    return found


def test_all_state_goes_on_in_another_folder_as_the_run_itself_would(
    first: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    same = shutil.copytree(first, tmp_path / "same")
    trainer(tiny_mixture, same, 6).fit()
    trainer(tiny_mixture, tmp_path / "other", 6, f"--trainer.load_path={first}").fit()
    assert metrics(tmp_path / "other") == metrics(same)[3:]
    found = open_checkpoint(tmp_path / "other" / "step00000006", World())
    origin = open_checkpoint(first / "step00000003", World())
    assert found.state.origin == RunOrigin(
        path=os.path.relpath(first / "step00000003", tmp_path / "other"),
        step=3,
        digest=origin.manifest.digest,
    )
    again = trainer(tiny_mixture, tmp_path / "other", 7, f"--trainer.load_path={tmp_path}")
    again.fit()  # a checkpoint of its own goes before load_path
    assert again.origin == found.state.origin


def test_weights_alone_or_with_the_optimiser_begin_at_step_0_with_other_rows(
    first: Path, exported: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    saved = tensors(lambda: trainer(tiny_mixture, tmp_path, 9), first / "step00000003")
    fresh = trainer(tiny_mixture, tmp_path / "x", 9).train_module.state_dict()
    weights = {name: value for name, value in saved.items() if name.startswith("model.")}
    moments = {name: value for name, value in saved.items() if name.startswith("optim.")}
    for n, (source, more) in enumerate(
        [
            (first, NO_STATE),
            (first / "step00000003", NO_STATE[:1]),
            (exported, NO_STATE),
            (exported.parent, NO_STATE),
        ]
    ):
        found = began(tiny_mixture, tmp_path / str(n), source, *more)
        assert (found.step, found.resumed) == (0, False)
        assert found.origin is not None
        state = found.train_module.state_dict()
        assert same_bits({f"model.{k}": v for k, v in state["model"].items()}, weights)
        expected = {f"optim.{k}": v for k, v in fresh["optim"].items()}
        if len(more) == 1:
            expected = moments
        assert same_bits({f"optim.{k}": v for k, v in state["optim"].items()}, expected)


def test_a_new_run_on_data_that_its_weights_have_seen_says_so(
    first: Path, tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began(tiny_mixture, tmp_path / "same", first, *NO_STATE)
    said = capsys.readouterr().err
    assert "the first 24 rows of this very mixture; this run begins with the first row" in said


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (["--trainer.load_path={exported}"], UsageError, "without the state of a trainer"),
        (["--trainer.load_path={first}", "--trainer.load_strategy=never"], UsageError, "no effect"),
        (
            ["--trainer.load_strict=true", "--trainer.load_strategy=never"],
            UsageError,
            "load_strict",
        ),
        ([NO_STATE[0]], UsageError, "no effect without load_path"),
        (["--trainer.load_path={first}/none"], InputError, "no such folder"),
        (["--trainer.load_path={first}", "--model.n_layers=1"], ValidationError, "n_layers"),
        (
            ["--trainer.load_path={first}", "--model.d_model=32", *NO_STATE],
            ValidationError,
            "does not fit this model",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    first: Path,
    exported: Path,
    tiny_mixture: Path,
    tmp_path: Path,
    options: list[str],
    error: type[OlmError],
    says: str,
) -> None:
    given = [option.format(first=first, exported=exported) for option in options]
    with pytest.raises(error, match=says):
        trainer(tiny_mixture, tmp_path, 5, *given).fit()
    assert not list(tmp_path.glob("step*"))


def changed_lines(text: str) -> list[str]:
    prefix = "  changed: "
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


def test_each_changed_field_has_its_line_and_the_log_has_the_configuration(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = build_trainer(tiny_mixture, tmp_path, stop=2)
    first.fit()
    assert changed_lines(capsys.readouterr().err) == []
    second = build_trainer(
        tiny_mixture,
        tmp_path,
        "--train_module.optim.lr=2e-3",
        "--train_module.optim.weight_decay=0.0",
        "--train_module.scheduler.warmup=3",
        "--train_module.loss.z_loss_multiplier=1e-4",
        "--train_module.max_grad_norm=null",
        stop=4,
    )
    second.fit()
    expected = {
        "train_module.optim.lr: 0.01 -> 0.002",
        "train_module.optim.weight_decay: 0.1 -> 0.0",
        "train_module.scheduler.warmup: 4 -> 3",
        "train_module.loss.z_loss_multiplier: None -> 0.0001",
        "train_module.max_grad_norm: 1.0 -> None",
        "trainer.hard_stop.value: 2 -> 4",
    }
    assert set(changed_lines(capsys.readouterr().err)) == expected
    one, two = read_starts(tmp_path)
    assert (one.config, two.config) == (first.config, second.config)
    assert (set(one.changes), set(two.changes)) == (set(), expected)
    build_trainer(tiny_mixture, tmp_path, "--train_module.optim.lr=1.0", stop=4).fit()
    assert changed_lines(capsys.readouterr().err) == []  # nothing goes on from there


def test_state_of_a_callback_that_is_gone_is_named(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(tiny_mixture, tmp_path, stop=1).fit()
    without = "--trainer.callbacks.lm_evaluator=null"
    build_trainer(tiny_mixture, tmp_path, without, stop=2).fit()
    said = capsys.readouterr().err
    assert "note: no callback lm_evaluator here takes the state it has there" in said
    assert any(line.startswith("trainer.callbacks.lm_evaluator: ") for line in changed_lines(said))


def test_a_fallback_names_the_checkpoint_it_passes_over(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interval = "--trainer.callbacks.checkpointer.save_interval=1"
    build_trainer(tiny_mixture, tmp_path, interval, stop=2).fit()
    (tmp_path / "step00000002" / "manifest.json").write_text("{}")
    build_trainer(tiny_mixture, tmp_path, interval, stop=3).fit()
    [line] = [line for line in capsys.readouterr().err.splitlines() if "manifest" in line]
    assert line.startswith("warning: ")
    assert "step00000002" in line


EVERY_2 = "--trainer.callbacks.checkpointer.save_interval=2"


def go_on(lock: Path, folder: Path, stop: int) -> None:
    build_trainer(lock, folder, EVERY_2, stop=stop, quiet=True).fit()


@pytest.fixture(scope="module")
def saved(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("s1") / "run"
    go_on(tiny_mixture, folder, 4)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


@pytest.mark.parametrize("name", ["step00000004", "step00000006"])
def test_a_checkpoint_under_another_steps_name_is_not_gone_on_from_and_not_removed(
    name: str, run: Path, tiny_mixture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "step00000004")
    shutil.copytree(run / "step00000002", run / name)
    with pytest.raises(ConflictError, match="of another step lies where") as error:
        go_on(tiny_mixture, run, 8)
    assert "name it step00000002" in str(error.value)
    assert f"warning: the folder {name} holds the checkpoint of step 2" in capsys.readouterr().err
    assert metrics(run)[-1]["step"] == int(name[-1])
    shutil.move(run / name, run.parent / "elsewhere")
    go_on(tiny_mixture, run, 8)
    assert open_checkpoint(run / "step00000008", World()).step == 8
    assert open_checkpoint(run.parent / "elsewhere", World()).step == 2


def change_state(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "train.json"
    value = json.loads(path.read_bytes())
    for name, change in changes.items():
        (value if name in value else value["data_loader"])[name] = change
    path.write_text(json.dumps(value))
    seal(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 3}, "is of step 3, its checkpoint of step 4"),
        ({"step": -1}, "is of step -1"),
        ({"rows_consumed": 16}, "the position in its data of step 2"),
        ({"rows_consumed": 40}, "the position in its data of step 5"),
    ],
)
def test_step_and_position_in_the_data_must_be_those_of_the_checkpoint(
    changes: dict[str, Any], message: str, run: Path, tiny_mixture: Path
) -> None:
    change_state(run / "step00000004", **changes)
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ValidationError, match=message):
        go_on(tiny_mixture, run, 8)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_bytes_of_another_kind_of_number_are_not_taken_for_weights(
    dtype: str, run: Path, tiny_mixture: Path
) -> None:
    path = run / "step00000004/model_and_optim/index.json"
    index = json.loads(path.read_bytes())
    index["tensors"]["model.norm.weight"]["dtype"] = dtype
    path.write_bytes(msgspec.json.encode(index, order="sorted") + b"\n")
    seal(run / "step00000004")
    with pytest.raises(ValidationError) as error:
        go_on(tiny_mixture, run, 8)
    assert f"model.norm.weight is of {dtype}, here of float32" in str(error.value)


def test_the_exported_file_holds_the_model_without_its_pads(first: Path, exported: Path) -> None:
    whole = load_file(exported)
    model = evaluation_model(open_checkpoint(first / "step00000003", World()))
    about = json.loads((exported.parent / "config.json").read_text())
    assert about["model"]["vocab_size"] == 512
    assert about["parameters"] == sum(value.numel() for value in whole.values())
    for name, value in model.named_parameters():
        rows = 512 if value.shape[0] == 600 else value.shape[0]
        assert torch.equal(whole[name], value[:rows])
        assert not value[rows:].any()  # nothing is lost


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def version(file: Path) -> None:
    path = file.parent / "config.json"
    path.write_text(path.read_text().replace('"version": 3', '"version": 9'))


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (flip, ValidationError, "sha256 differs"),
        (version, ValidationError, "version 9; this program reads olm-model versions 1, 2, 3"),
        (Path.unlink, InputError, "no exported weights"),
    ],
)
def test_damaged_exports_are_refused(
    exported: Path, tmp_path: Path, damage: object, error: type[OlmError], says: str
) -> None:
    file = shutil.copytree(exported.parent, tmp_path / "copy") / exported.name
    damage(file)  # type: ignore[operator]
    with pytest.raises(error, match=says):
        load_exported(str(file))
