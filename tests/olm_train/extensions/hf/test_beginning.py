"""A run that begins with a model of transformers: its loss, its shards, its own checkpoints."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.distributed import run_ranks
from support.hf_models import hf_model
from support.hub_stub import HubStub
from support.runs import (
    build_trainer,
    config_values,
    group_world,
    metrics,
    run,
    run_until,
    same_bits,
    tensors,
)

from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.storage.store import Store
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import candidates
from olm_train.checkpoint.portable import evaluation_model
from olm_train.distributed.world import World
from olm_train.extensions.hf_export.export import export
from olm_train.extensions.hf_export.job import ExportOptions
from olm_train.trainer import Trainer

BEGIN = ("--trainer.load_trainer_state=false", "--trainer.load_optim_state=false")
SHORT = (
    "--model=null",
    "--trainer.callbacks.lm_evaluator.enabled=false",
    "--trainer.callbacks.checkpointer={save_interval: 2}",
    "--trainer.hard_stop={value: 4, unit: steps}",
)
END = "--trainer.hard_stop={value: 8, unit: steps}"
FSDP = "--train_module.dp_config={name: fsdp}"


@pytest.fixture(scope="session")
def foreign(
    tiny_mixture: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder that transformers wrote: a Llama in two files, with the tokenizer of the data."""
    folder = tmp_path_factory.mktemp("foreign") / "llama"
    ids = Lock.read(str(tiny_mixture)).tokenizer.vocab_size
    model = hf_model("llama", vocab_size=ids)
    model.save_pretrained(folder, max_shard_size="40KB")
    shutil.copy(tiny_tokenizer, folder / "tokenizer.json")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def begin(lock: Path, folder: Path, place: Path | str, *more: str, **options: Any) -> Trainer:
    path = f"--trainer.load_path={place}"
    return build_trainer(lock, folder, *SHORT, path, *BEGIN, *more, **options)


def their_loss(lock: Path, foreign: Path, trainer: Trainer) -> float:
    """The loss that transformers has for the first batch, each document by itself."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(foreign).eval()
    total, labels = 0.0, 0
    with torch.no_grad():
        for batch in first_step(trainer):
            for ids, starts, wanted in zip(
                batch.input_ids, batch.doc_start, batch.labels, strict=True
            ):
                for start in starts.unique().tolist():
                    here = starts == start
                    logits = model(ids[here][None]).logits[0].float()
                    target = wanted[here]
                    loss = torch.nn.functional.cross_entropy(
                        logits, target, ignore_index=-100, reduction="sum"
                    )
                    total += float(loss)
                    labels += int((target != -100).sum())
    return total / labels


def first_step(trainer: Trainer) -> Sequence[Any]:
    loader = trainer.data_loader
    step = next(iter(loader))
    return list(step) if isinstance(step, Sequence) else [step]


def test_the_first_loss_is_that_of_transformers_and_the_origin_is_recorded(
    tiny_mixture: Path, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = begin(tiny_mixture, tmp_path / "run", foreign)
    trainer.fit()
    said = capsys.readouterr().err
    assert "its tokenizer is that of the data" in said
    (first, *_) = [line for line in metrics(tmp_path / "run") if line["step"] == 1]
    wanted = their_loss(tiny_mixture, foreign, begin(tiny_mixture, tmp_path / "other", foreign))
    assert first["train/CE loss"] == pytest.approx(wanted, abs=2e-5)
    state = json.loads((tmp_path / "run" / "step00000004" / "train.json").read_text())
    assert state["origin"]["files"].keys() >= {"config.json", "tokenizer.json"}
    assert len(state["origin"]["digest"]) == 64


def load_on_ranks(lock: str, folder: str, foreign: str) -> tuple[int, int, dict[str, Any]]:
    """Return bytes read by this rank, bytes of the files, and the whole weights (of rank 0)."""
    from olm_train.extensions.hf.weights import SafeTensors

    files: list[SafeTensors] = []
    real = SafeTensors.__init__

    def init(self: SafeTensors, *arguments: Any) -> None:
        real(self, *arguments)
        files.append(self)

    SafeTensors.__init__ = init  # type: ignore[method-assign]
    trainer = begin(Path(lock), Path(folder), foreign, FSDP, world=group_world())
    trainer.restore()
    weights = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in trainer.train_module.state_dict()["model"].items()
    }
    plain = {name: value.numpy() for name, value in weights.items()}
    return files[-1].read_bytes, files[-1].bytes, plain


def test_each_rank_reads_its_shards_alone(
    tiny_mixture: Path, foreign: Path, tmp_path: Path
) -> None:
    arguments = (str(tiny_mixture), str(tmp_path / "run"), str(foreign))
    (one, size, weights), (two, _, _) = run_ranks(load_on_ranks, 2, *arguments)
    assert one + two == size
    assert max(one, two) < 0.6 * size
    alone = begin(tiny_mixture, tmp_path / "alone", foreign)
    alone.restore()
    whole = alone.train_module.state_dict()["model"]
    assert weights.keys() == whole.keys()
    for name, value in whole.items():
        assert (weights[name] == value.numpy()).all(), name


def test_the_checkpoint_needs_nothing_of_the_folder_and_resumes_exactly(
    tiny_mixture: Path, foreign: Path, tmp_path: Path
) -> None:
    place = tmp_path / "llama"
    shutil.copytree(foreign, place)
    begin(tiny_mixture, tmp_path / "whole", place).fit()
    begin(
        tiny_mixture, tmp_path / "cut", place, "--trainer.hard_stop={value: 2, unit: steps}"
    ).fit()
    for path in place.glob("*.safetensors"):
        path.unlink()
    begin(tiny_mixture, tmp_path / "cut", place).fit()
    fresh = partial(begin, tiny_mixture, tmp_path / "whole", place)
    one, two = (tensors(fresh, tmp_path / name / "step00000004") for name in ("whole", "cut"))
    assert same_bits(one, two)
    origins = [
        open_checkpoint(tmp_path / name / "step00000004", World()).state.origin
        for name in ("whole", "cut")
    ]
    assert origins[0] == origins[1] is not None


def test_from_a_bucket_the_rows_of_each_rank_and_no_copy(
    tiny_mixture: Path, foreign: Path, tmp_path: Path, s3: dict[str, str]
) -> None:
    """The same weights and loss as from the disk, on two ranks, and from an export there."""
    url = f"s3://{s3['bucket']}/{tmp_path.name}/llama"
    for path in foreign.iterdir():
        Store(url).put(path.name, path.read_bytes())
    arguments = (str(tiny_mixture), str(tmp_path / "run"), url)
    (one, size, weights), (two, _, _) = run_ranks(load_on_ranks, 2, *arguments)
    assert one + two == size
    assert max(one, two) < 0.6 * size
    near = begin(tiny_mixture, tmp_path / "near", foreign)
    near.restore()
    for name, value in near.train_module.state_dict()["model"].items():
        assert (weights[name] == value.numpy()).all(), name
    for name, place in (("near", str(foreign)), ("far", url)):
        begin(tiny_mixture, tmp_path / name, place).fit()
    assert metrics(tmp_path / "far") == metrics(tmp_path / "near")
    ends = [open_checkpoint(tmp_path / name / "step00000004", World()) for name in ("near", "far")]
    near_origin, far_origin = (end.state.origin for end in ends)
    assert near_origin is not None
    assert far_origin is not None
    assert far_origin.path == url
    assert far_origin.files == near_origin.files
    exported = f"{url}-exported"
    export(ends[1], exported, ExportOptions(dtype="float32", shard_bytes=40_000, check="files"))
    again = begin(tiny_mixture, tmp_path / "again", exported)
    again.restore()
    wanted = evaluation_model(ends[1]).state_dict()
    assert same_bits(again.train_module.state_dict()["model"], wanted)


def test_state_of_a_trainer_is_not_in_it(tiny_mixture: Path, foreign: Path, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, *SHORT, f"--trainer.load_path={foreign}")
    with pytest.raises(UsageError, match="without the state"):
        trainer.restore()


def test_another_tokenizer_is_refused_by_what_differs(
    tiny_mixture: Path, foreign: Path, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    place = tmp_path / "llama"
    shutil.copytree(foreign, place)
    data = json.loads((place / "tokenizer.json").read_text())
    words = data["model"]["vocab"]
    a, b = sorted(words, key=words.get)[60:62]
    words[a], words[b] = words[b], words[a]
    (place / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ValidationError, match=r"to the model, .* in the data"):
        begin(tiny_mixture, tmp_path / "run", place).restore()
    (place / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"without a tokenizer\.json"):
        begin(tiny_mixture, tmp_path / "run", place).restore()


def test_a_tokenizer_file_that_is_only_written_otherwise_is_the_same(
    tiny_mixture: Path, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "llama"
    shutil.copytree(foreign, place)
    data = json.loads((place / "tokenizer.json").read_text())
    (place / "tokenizer.json").write_text(json.dumps(data, indent=3))
    begin(tiny_mixture, tmp_path / "run", place).restore()
    assert "to all probe texts; the files differ" in capsys.readouterr().err


def test_a_smaller_vocabulary_is_refused_or_extended_by_the_mean(
    tiny_mixture: Path, tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = Lock.read(str(tiny_mixture)).tokenizer.vocab_size
    place = tmp_path / "llama"
    model = hf_model("llama", vocab_size=ids - 5)
    model.save_pretrained(place)
    shutil.copy(tiny_tokenizer, place / "tokenizer.json")
    with pytest.raises(UsageError, match=f"the data has {ids:,} ids"):
        begin(tiny_mixture, tmp_path / "run", place)
    trainer = begin(tiny_mixture, tmp_path / "run", place, "--trainer.load_vocabulary=extend")
    trainer.restore()
    assert f"5 new ids, {ids - 5:,} to {ids - 1:,}" in capsys.readouterr().err
    weights = trainer.train_module.state_dict()["model"]
    for ours, theirs in (("embeddings", model.model.embed_tokens), ("lm_head", model.lm_head)):
        rows, old = weights[f"{ours}.weight"], theirs.weight.detach()
        assert torch.equal(rows[: ids - 5], old)
        torch.testing.assert_close(rows[ids - 5 : ids], old.mean(0).expand(5, -1))


def test_weights_in_bfloat16_are_cast_and_it_is_said(
    tiny_mixture: Path, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(foreign).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    shutil.copy(foreign / "tokenizer.json", tmp_path / "half")
    trainer = begin(tiny_mixture, tmp_path / "run", tmp_path / "half")
    trainer.restore()
    assert "cast from bfloat16 to float32" in capsys.readouterr().err
    weights = trainer.train_module.state_dict()["model"]
    assert torch.equal(weights["lm_head.weight"], model.lm_head.weight.detach().float())


@pytest.mark.slow
def test_killed_on_two_ranks_and_resumed_on_one_is_bit_exact(
    tiny_mixture: Path, foreign: Path, tmp_path: Path
) -> None:
    place = tmp_path / "llama"
    shutil.copytree(foreign, place)
    options = (*SHORT[:-1], f"--trainer.load_path={place}", *BEGIN, FSDP)

    def config(name: str) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config_values(tiny_mixture, tmp_path / name)))
        return path

    each = "--trainer.metrics_collect_interval=1"
    code, told = run_until("step  3/", signal.SIGKILL, config("killed"), *options, each, ranks=2)
    assert code == -signal.SIGKILL, told
    (newest, *_) = candidates(tmp_path / "killed")
    stop = f"--trainer.hard_stop={{value: {int(newest[4:])}, unit: steps}}"
    straight = run(config("straight"), *options, stop, ranks=2)
    assert straight.returncode == 0, straight.stderr
    for path in place.glob("*.safetensors"):
        path.unlink()
    for name in ("straight", "killed"):
        again = run(config(name), *options, END)
        assert again.returncode == 0, again.stderr
        assert f"resuming from {tmp_path / name / newest}" in again.stderr
    fresh = partial(begin, tiny_mixture, tmp_path / "straight", place)
    one, two = (tensors(fresh, tmp_path / name / "step00000008") for name in ("straight", "killed"))
    assert same_bits(one, two)


@pytest.mark.slow
def test_from_the_hub_each_file_once_pinned_to_a_commit(
    tiny_mixture: Path, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hub/models/lab").mkdir(parents=True)
    shutil.copytree(foreign, tmp_path / "hub/models/lab/llama")
    (tmp_path / "hub/models/lab/llama/modeling.py").write_text("raise SystemExit(9)")
    config = tmp_path / "train.yaml"
    config.write_text(yaml.safe_dump(config_values(tiny_mixture, tmp_path / "run")))
    options = (*SHORT, "--trainer.load_path=hf://lab/llama", *BEGIN, FSDP)
    with HubStub(tmp_path / "hub").running() as stub:
        for name, value in stub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        done = run(config, *options, "--trainer.hard_stop={value: 2, unit: steps}", ranks=2)
        assert done.returncode == 0, done.stderr
        got = [asked for asked in stub.requests if asked.startswith("GET") and "/resolve/" in asked]
    assert len(got) == len(set(got)), got
    assert not [asked for asked in got if "modeling" in asked]
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["trainer"]["load_path"].startswith("hf://lab/llama@0123456789abcdef")
    shutil.rmtree(tmp_path / "home")
    again = run(config, *options)  # the hub is gone, and what was fetched
    assert again.returncode == 0, again.stderr
    state = json.loads((tmp_path / "run" / "step00000004" / "train.json").read_text())
    assert state["origin"]["path"] == saved["trainer"]["load_path"]
