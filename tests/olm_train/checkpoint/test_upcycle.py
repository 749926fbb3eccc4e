"""Runs of a mixture of experts that begin with a dense model: of ours, or of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import run_ranks
from support.hf_models import hf_model
from support.runs import build_trainer, group_world

from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import evaluation_model, export
from olm_train.distributed.world import World
from olm_train.extensions.hf.model_format import load_model
from olm_train.model.decoder import Decoder
from olm_train.trainer import Trainer

pytestmark = pytest.mark.xdist_group("transformers")

EXPERTS = "name: moe, n_experts: 6, top_k: 2, normalize_scores: true"
SHAPE = "d_model: 32, n_layers: 2, n_heads: 4, init_std: 0.2"
DENSE = f"--model={{{SHAPE}, feed_forward: {{hidden_size: 40}}}}"
MIXTURE = f"--model={{{SHAPE}, feed_forward: {{{EXPERTS}, hidden_size: 40}}}}"
TWO = "--trainer.hard_stop={value: 2, unit: steps}"
KINDS = ("checkpoint", "exported", "transformers", "bfloat16")


@pytest.fixture(scope="module")
def dense(
    tiny_mixture: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The places of dense models."""
    folder = tmp_path_factory.mktemp("dense")
    build_trainer(tiny_mixture, folder / "run", DENSE, quiet=True, stop=3).fit()
    checkpoint = folder / "run" / "step00000003"
    export(open_checkpoint(checkpoint, World()), folder / "exported")
    ids = Lock.read(str(tiny_mixture)).tokenizer.vocab_size
    model = hf_model("qwen3", vocab_size=ids - 9, tie_word_embeddings=False)
    model.save_pretrained(folder / "transformers", max_shard_size="40KB")
    model.to(torch.bfloat16).save_pretrained(folder / "bfloat16")
    for name in ("transformers", "bfloat16"):
        shutil.copy(tiny_tokenizer, folder / name / "tokenizer.json")
    return {"checkpoint": checkpoint} | {n: folder / n for n in KINDS if n != "checkpoint"}


def begun(lock: Path, folder: Path, kind: str, place: Path, *more: str, **given: Any) -> Trainer:
    shape = [MIXTURE]
    if kind in ("transformers", "bfloat16"):
        shape = [f"--model={{feed_forward: {{{EXPERTS}}}}}", "--trainer.load_vocabulary=extend"]
    fresh = (f"path={place}", "upcycle=true", "trainer_state=false", "optim_state=false")
    shape += [f"--trainer.load_{option}" for option in fresh]
    first = "--trainer.callbacks.checkpointer={pre_train_checkpoint: true}"
    return build_trainer(lock, folder, *shape, first, *more, quiet=True, stop=3, **given)


def model_at(kind: str, place: Path) -> Decoder:
    if kind == "checkpoint":
        return evaluation_model(open_checkpoint(place, World()))
    found = load_model(place)
    return (found[0] if isinstance(found, tuple) else found).float()


@pytest.mark.parametrize("kind", KINDS)
def test_it_begins_with_the_logits_of_the_dense_model_and_its_experts_part(
    kind: str, dense: dict[str, Path], tiny_mixture: Path, tmp_path: Path
) -> None:
    begun(tiny_mixture, tmp_path / "run", kind, dense[kind], TWO).fit()
    begun(tiny_mixture, tmp_path / "run", kind, dense[kind]).fit()  # goes on
    start, end = (
        evaluation_model(open_checkpoint(tmp_path / "run" / f"step0000000{step}", World()))
        for step in (0, 3)
    )
    source = model_at(kind, dense[kind])
    known = source.config.vocab_size
    ids = torch.randint(known, (2, 30))
    with torch.no_grad():
        found = start(ids)[..., :known]
        torch.testing.assert_close(found, source(ids), rtol=1e-5, atol=1e-5)
    for name, value in start.named_parameters():
        if ".experts." in name:
            assert torch.equal(value, value[:1].expand_as(value)), name
            after = end.get_parameter(name)
            assert all(not torch.equal(after[0], each) for each in after[1:]), name
        if ".router." in name:
            assert value.abs().max() > 0


def on_ranks(lock: str, folder: str, places: dict[str, Path], *more: str) -> None:
    world = group_world()
    options = (
        "--train_module.dp_config={name: fsdp}",
        "--train_module.rank_microbatch_size=64",
        *more,
    )
    for kind in ("checkpoint", "transformers"):
        place = Path(folder) / kind
        begun(Path(lock), place, kind, places[kind], *options, world=world).fit()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [[], ["--train_module.ep_config={degree: 2}"]],  # of four ranks one has no expert
)
def test_ranks_begin_with_the_same_weights(
    more: list[str], dense: dict[str, Path], tiny_mixture: Path, tmp_path: Path
) -> None:
    run_ranks(on_ranks, 4, str(tiny_mixture), str(tmp_path), dense, *more)
    for kind in ("checkpoint", "transformers"):
        begun(tiny_mixture, tmp_path / "alone" / kind, kind, dense[kind]).fit()
        one, two = (
            evaluation_model(open_checkpoint(place / "step00000000", World())).state_dict()
            for place in (tmp_path / "alone" / kind, tmp_path / kind)
        )
        assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_what_begins_otherwise_is_refused_by_name(
    dense: dict[str, Path], tiny_mixture: Path, tmp_path: Path
) -> None:
    for kind, change, said in (
        ("transformers", "--model.feed_forward.normalize_scores=false", "normalize_scores is fal"),
        ("transformers", "--model.feed_forward.hidden_size=48", "hidden_size is 48, not 40"),
        ("checkpoint", "--model.feed_forward.hidden_size=48", "hidden_size is 48, not 40"),
        ("exported", "--model.n_layers=3", "n_layers is 3, not 2"),
        ("exported", "--model.feed_forward={name: swiglu}", "is no mixture of experts"),
        ("checkpoint", "--trainer.load_optim_state=true", "without the state of a trainer"),
    ):
        with pytest.raises(UsageError, match=said):
            begun(tiny_mixture, tmp_path / "run", kind, dense[kind], change).fit()
