"""A model goes round: trained, exported, pushed, pulled, and trained on from both places."""

from __future__ import annotations

import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from support.command import olm_data
from support.hub_stub import HubStub
from support.runs import (
    STEPS,
    build_trainer,
    config_values,
    metrics,
    run,
    run_until,
    same_bits,
    tensors,
)

from olm_data.errors import ValidationError
from olm_train import Decoder, load_model
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.distributed.world import World
from olm_train.extensions.hf_export.command import main as export
from olm_train.trainer import Trainer

pytestmark = pytest.mark.slow  # processes that push, pull and train
QUIET = ("--trainer.callbacks.lm_evaluator.enabled=false", "--trainer.metrics_collect_interval=1")
BEGIN = ("--trainer.load_trainer_state=false", "--trainer.load_optim_state=false")
SAVES = "--trainer.callbacks.checkpointer={save_interval: 2}"
FOUR = "--trainer.hard_stop={value: 4, unit: steps}"


def begun(lock: Path, folder: Path, place: Path | str, *more: str) -> Trainer:
    return build_trainer(lock, folder, f"--trainer.load_path={place}", *BEGIN, *QUIET, SAVES, *more)


def losses(folder: Path) -> list[Any]:
    return [line["train/CE loss"] for line in metrics(folder) if "train/CE loss" in line]


def test_there_and_back(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # trained and exported
    build_trainer(tiny_mixture, tmp_path / "first", *QUIET, FOUR).fit()
    step4 = tmp_path / "first/step00000004"
    hf, copy, address = tmp_path / "first-hf", tmp_path / "elsewhere/copy", "hf://lab/first"
    options = ["--to", "hf", "--dtype", "float32", "--shard-size", "20KB", "--verify", "files"]
    done = CliRunner().invoke(export, [str(tmp_path / "first"), "--output", str(hf), *options])
    assert done.exit_code == 0, done.output
    assert len(list(hf.glob("*.safetensors"))) > 1
    weights = evaluation_model(open_checkpoint(step4, World())).state_dict()
    # what its own checkpoint gives for these data, in one go
    begun(tiny_mixture, tmp_path / "own", step4).fit()
    wanted = losses(tmp_path / "own")
    assert len(wanted) == STEPS
    (tmp_path / "hub").mkdir()
    config, place = tmp_path / "train.yaml", f"--trainer.load_path={address}"
    values = config_values(tiny_mixture, tmp_path / "hub-run")
    del values["model"]  # it follows from the repository
    config.write_text(yaml.safe_dump(values))
    with HubStub(tmp_path / "hub").running() as stub:
        for name, value in stub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        pushed = olm_data("push", hf, address, "--json")
        assert pushed.returncode == 0, pushed.stderr
        commit = json.loads(pushed.stdout)["commit"]
        pulled = olm_data("pull", address, copy)
        assert pulled.returncode == 0, pulled.stderr
        killed = signal.SIGKILL
        code, said = run_until("step  3/", killed, config, place, *BEGIN, *QUIET, SAVES)
        assert code == -killed, said
        assert "its tokenizer is that of the data" in said
    # the hub is gone, and what was fetched
    shutil.rmtree(tmp_path / "home")
    again = run(config, place, *BEGIN, *QUIET, SAVES)
    assert again.returncode == 0, again.stderr
    assert "resuming from" in again.stderr
    # the pulled folder: stopped, and gone on with without its weights
    begun(tiny_mixture, tmp_path / "pulled", copy, "--model=null", FOUR).fit()
    shutil.copytree(copy, tmp_path / "kept")
    for path in copy.glob("*.safetensors"):
        path.unlink()
    begun(tiny_mixture, tmp_path / "pulled", copy, "--model=null").fit()
    # both began with the weights of the checkpoint, and went on as the run that began with that
    fresh = partial(begun, tiny_mixture, tmp_path / "own", step4)
    end = tensors(fresh, tmp_path / "own/step00000024")
    for name in ("hub-run", "pulled"):
        assert losses(tmp_path / name) == wanted, name
        assert same_bits(tensors(fresh, tmp_path / name / "step00000024"), end), name
    state = json.loads((tmp_path / "hub-run/step00000024/train.json").read_text())
    assert state["origin"]["path"] == f"{address}@{commit}"
    model = load_model(tmp_path / "kept")
    assert isinstance(model, tuple)
    assert isinstance(model[0], Decoder)
    for name, value in model[0].state_dict().items():
        assert torch.equal(value, weights[name]), name
    # data of another tokenizer are told
    tokens = tmp_path / "kept/tokenizer.json"
    data = json.loads(tokens.read_text())
    words = data["model"]["vocab"]
    a, b = sorted(words, key=words.get)[60:62]
    words[a], words[b] = words[b], words[a]
    tokens.write_text(json.dumps(data))
    with pytest.raises(ValidationError, match="tokenizer of the model is not that of the data"):
        begun(tiny_mixture, tmp_path / "no", tmp_path / "kept", "--model=null").restore()
