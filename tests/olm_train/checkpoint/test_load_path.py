"""A run that begins with another run's checkpoint, or with exported weights; and the export."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.runs import build_trainer, metrics, same_bits, tensors

from olm_data.errors import InputError, OlmError, UsageError, ValidationError
from olm_train.checkpoint.exported import load_exported
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.run_state import Origin
from olm_train.checkpoint.weights import load_model
from olm_train.distributed.world import World
from olm_train.export import main
from olm_train.trainer import Trainer

MODEL = "--model={d_model: 16, n_layers: 2, n_heads: 2, hidden_size: 32, vocab_multiple: 100}"
NO_STATE = ("--trainer.load_trainer_state=false", "--trainer.load_optim_state=false")


def trainer(lock: Path, folder: Path, stop: int, *more: str) -> Trainer:
    return build_trainer(
        lock, folder, "--trainer.callbacks.lm_evaluator.enabled=false", MODEL,
        f"--trainer.hard_stop={{value: {stop}, unit: steps}}", *more,
    )  # fmt: skip


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
    assert "parameters of step 3" in result.output
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
    assert found.state().origin == Origin(
        path=os.path.relpath(first / "step00000003", tmp_path / "other"),
        step=3,
        digest=origin.manifest.digest,
    )
    again = trainer(tiny_mixture, tmp_path / "other", 7, f"--trainer.load_path={tmp_path}")
    again.fit()  # a checkpoint of its own goes before load_path
    assert again.origin == found.state().origin


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


def test_the_exported_file_holds_the_model_without_its_pads(first: Path, exported: Path) -> None:
    whole = load_file(exported)
    model = load_model(open_checkpoint(first / "step00000003", World()))
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
    path.write_text(path.read_text().replace('"version": 2', '"version": 9'))


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (flip, ValidationError, "sha256 differs"),
        (
            version,
            ValidationError,
            "version 9; this program reads olm-model versions 1 and 2",
        ),
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
        (["--trainer.load_path={first}/none"], InputError, "no checkpoint"),
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
