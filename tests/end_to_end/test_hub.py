"""Texts, a dataset and a model go to a local hub and come back, through the hub's real client."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from support.command import olm_data
from support.hub_stub import HubStub, write_fineweb_edu
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

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_train import Decoder, load_model
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.distributed.world import World
from olm_train.extensions.hf_export.command import main as export
from olm_train.trainer import Trainer


@pytest.fixture
def hub(tmp_path: Path, tiny_tokenizer: Path) -> Iterator[HubStub]:
    """A hub with two files of FineWeb-Edu's schema and a tokenizer under GPT-2's name."""
    write_fineweb_edu(tmp_path / "hub", rows=50, row_group=20)
    model = tmp_path / "hub" / "models" / "openai-community" / "gpt2"
    model.mkdir(parents=True)
    shutil.copy(tiny_tokenizer, model / "tokenizer.json")
    with HubStub(tmp_path / "hub").running() as stub:
        yield stub


@pytest.mark.slow
def test_the_bare_command_works_on_stated_defaults_and_equals_a_local_mirror(
    hub: HubStub, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    extra = hub.environment(tmp_path / "home")
    done = olm_data("tokenize", "--source", "fineweb-edu", folder=tmp_path, extra=extra)
    assert done.returncode == 0, done.stderr
    output = tmp_path / "tokens" / "fineweb-edu-sample-10BT-gpt2"
    assert "tokenizer gpt2" in done.stderr
    assert "tokens/fineweb-edu-sample-10BT-gpt2" in done.stderr
    dataset = Dataset.open(str(output))
    assert dataset.documents == 100
    document = dataset.document(70)
    assert document.id == "<urn:uuid:00000001-0020>"
    assert document.input == "HuggingFaceFW/fineweb-edu/sample/10BT/001_00000.parquet"
    assert (document.position_kind, document.position) == ("row", 20)
    assert document.columns["url"] == "https://example.org/1/20"
    assert verify(str(output)).ok

    again = olm_data("tokenize", "--source", "fineweb-edu", "--json", folder=tmp_path, extra=extra)
    assert json.loads(again.stdout.splitlines()[-1])["already_complete"] is True

    mirror = tmp_path / "hub" / "datasets" / "HuggingFaceFW" / "fineweb-edu"
    (tmp_path / "gpt2").mkdir()
    shutil.copy(tiny_tokenizer, tmp_path / "gpt2" / "tokenizer.json")
    words = ("--source", "fineweb-edu", "--root", mirror, "--tokenizer", tmp_path / "gpt2")
    local = olm_data("tokenize", *words, "--output", tmp_path / "mirrored")
    assert local.returncode == 0, local.stderr
    assert Dataset.open(str(tmp_path / "mirrored")).digest == dataset.digest


@pytest.mark.slow
def test_from_the_hub_to_s3(hub: HubStub, s3: dict[str, str], tmp_path: Path) -> None:
    output = f"s3://{s3['bucket']}/{tmp_path.name}/fineweb-edu"
    words = ("--source", "fineweb-edu", "--subset", "sample-10BT", "--tokenizer", "gpt2")
    extra = hub.environment(tmp_path / "home")
    done = olm_data("tokenize", *words, "--output", output, folder=tmp_path, extra=extra)
    assert done.returncode == 0, done.stderr
    report = verify(output)
    assert report.findings == []
    assert report.documents == 100
    assert not (tmp_path / "tokens").exists()


def test_a_hub_that_cannot_be_reached_is_exit_6_and_nothing_is_left(tmp_path: Path) -> None:
    extra = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    done = olm_data("tokenize", "--source", "fineweb-edu", folder=tmp_path, extra=extra)
    assert done.returncode == 6, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "tokens").exists()


QUIET = ("--trainer.callbacks.lm_evaluator.enabled=false", "--trainer.metrics_collect_interval=1")


BEGIN = ("--trainer.load_trainer_state=false", "--trainer.load_optim_state=false")


SAVES = "--trainer.callbacks.checkpointer={save_interval: 2}"


FOUR = "--trainer.hard_stop={value: 4, unit: steps}"


def begun(lock: Path, folder: Path, place: Path | str, *more: str) -> Trainer:
    return build_trainer(lock, folder, f"--trainer.load_path={place}", *BEGIN, *QUIET, SAVES, *more)


def losses(folder: Path) -> list[Any]:
    return [line["train/CE loss"] for line in metrics(folder) if "train/CE loss" in line]


@pytest.mark.slow  # processes that push, pull and train
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


MIXTURE = """\
version: 1
seed: 5
sequence_length: 32
sources:
  prose: {{data: "{data}", max_epochs: 4}}
stages:
  - {{name: main, epochs: {{prose: 2}}}}
"""


SHORT = (
    "--trainer.callbacks.lm_evaluator.enabled=false",
    "--trainer.callbacks.checkpointer.enabled=false",
    "--trainer.hard_stop={value: 2, unit: steps}",
)


@pytest.mark.slow
def test_a_run_on_the_hub_is_that_on_the_disk(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_mixture.parent / "prose", tmp_path / "prose")
    (tmp_path / "hub").mkdir()
    with HubStub(tmp_path / "hub").running() as stub:
        for name, value in stub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        pushed = olm_data("push", tmp_path / "prose", "hf://datasets/lab/prose", "--json")
        assert pushed.returncode == 0, pushed.stderr
        commit = json.loads(pushed.stdout)["commit"]
        for name, data in (
            ("disk", str(tmp_path / "prose")),
            ("hub-run", f"hf://datasets/lab/prose@{commit}"),
        ):
            (tmp_path / f"{name}.yaml").write_text(MIXTURE.format(data=data))
            made = olm_data("mix", tmp_path / f"{name}.yaml")
            assert made.returncode == 0, made.stderr
            values = config_values(tmp_path / f"{name}.lock.json", tmp_path / name)
            values["data_loader"]["cache"] = {"folder": str(tmp_path / "cache")}
            (tmp_path / f"train-{name}.yaml").write_text(yaml.safe_dump(values))
            done = run(tmp_path / f"train-{name}.yaml", *SHORT)
            assert done.returncode == 0, done.stderr
    one, two = (
        [line["train/CE loss"] for line in metrics(tmp_path / name) if "train/CE loss" in line]
        for name in ("disk", "hub-run")
    )
    assert one
    assert one == two
