"""A run that begins with a model of transformers: its loss, its shards, its own checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import run_ranks
from support.hf_models import hf_model
from support.hub_stub import HubStub
from support.runs import build_trainer, group_world, metrics, same_bits, tensors

from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.storage.store import Store
from olm_train.checkpoint.load import open_checkpoint
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


def check_ranks(lock: Path, foreign: Path, place: str, folder: Path) -> None:
    """Each of two ranks reads its shards alone; the weights are those of the folder."""
    arguments = (str(lock), str(folder / "run"), place)
    (one, size, weights), (two, _, _) = run_ranks(load_on_ranks, 2, *arguments)
    assert one + two == size
    assert max(one, two) < 0.6 * size
    alone = begin(lock, folder / "alone", foreign)
    alone.restore()
    whole = alone.train_module.state_dict()["model"]
    assert weights.keys() == whole.keys()
    for name, value in whole.items():
        assert (weights[name] == value.numpy()).all(), name


def test_each_rank_reads_its_shards_alone(
    tiny_mixture: Path, foreign: Path, tmp_path: Path
) -> None:
    check_ranks(tiny_mixture, foreign, str(foreign), tmp_path)


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
    check_ranks(tiny_mixture, foreign, url, tmp_path)
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


def test_the_tokenizer_is_that_of_the_data_by_the_ids_that_it_gives(
    tiny_mixture: Path, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shutil.copytree(foreign, tmp_path / "llama") / "tokenizer.json"

    def restore() -> None:
        begin(tiny_mixture, tmp_path / "run", file.parent).restore()

    data = json.loads(file.read_text())
    file.write_text(json.dumps(data, indent=3))
    restore()
    assert "to all probe texts; the files differ" in capsys.readouterr().err
    words = data["model"]["vocab"]
    a, b = sorted(words, key=words.get)[60:62]
    words[a], words[b] = words[b], words[a]
    file.write_text(json.dumps(data))
    with pytest.raises(ValidationError, match=r"to the model, .* in the data"):
        restore()
    file.unlink()
    with pytest.raises(InputError, match=r"without a tokenizer\.json"):
        restore()


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


def begin_on_ranks(lock: Path, folder: Path, place: str) -> None:
    stop = "--trainer.hard_stop={value: 2, unit: steps}"
    begin(lock, folder, place, FSDP, stop, world=group_world()).fit()


@pytest.mark.slow
def test_from_the_hub_each_file_once_pinned_to_a_commit(
    tiny_mixture: Path, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hub/models/lab").mkdir(parents=True)
    shutil.copytree(foreign, tmp_path / "hub/models/lab/llama")
    (tmp_path / "hub/models/lab/llama/modeling.py").write_text("raise SystemExit(9)")
    run = tmp_path / "run"
    with HubStub(tmp_path / "hub").running() as stub:
        for name, value in stub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        run_ranks(begin_on_ranks, 2, tiny_mixture, run, "hf://lab/llama")
        got = [asked for asked in stub.requests if asked.startswith("GET") and "/resolve/" in asked]
    assert len(got) == len(set(got)) > 2, got
    assert not [asked for asked in got if "modeling" in asked]
    saved = json.loads((run / "config.json").read_text())
    assert saved["trainer"]["load_path"].startswith("hf://lab/llama@0123456789abcdef")
    shutil.rmtree(tmp_path / "home")
    begin(tiny_mixture, run, "hf://lab/llama").fit()  # the hub is gone, and what was fetched
    state = json.loads((run / "step00000004" / "train.json").read_text())
    assert state["origin"]["path"] == saved["trainer"]["load_path"]
