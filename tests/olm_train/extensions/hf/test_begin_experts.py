"""A run that begins with a mixture of experts of transformers, and files that are none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.distributed import run_ranks
from support.hf_models import hf_model
from support.runs import build_trainer, group_world, metrics

from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.distributed.world import World
from olm_train.extensions.hf.model_format import load_model
from olm_train.trainer import Trainer

pytestmark = pytest.mark.xdist_group("transformers")

BIASED = "--model={feed_forward: {balance: {name: bias, rate: 1e-2}}}"


@pytest.fixture(scope="module")
def foreign(
    tiny_mixture: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("foreign") / "experts"
    ids = Lock.read(str(tiny_mixture)).tokenizer.vocab_size
    model = hf_model("qwen3_moe", vocab_size=ids - 9)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="30KB")
    shutil.copy(tiny_tokenizer, folder / "tokenizer.json")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def begin(lock: Path, folder: Path, place: Path, *more: str, **given: Any) -> Trainer:
    return build_trainer(
        lock, folder, f"--trainer.load_path={place}", "--trainer.load_trainer_state=false",
        "--trainer.load_optim_state=false", "--trainer.load_vocabulary=extend",
        "--trainer.callbacks.lm_evaluator.enabled=false",
        "--trainer.callbacks.checkpointer={pre_train_checkpoint: true, save_interval: 1}",
        *more, **given,
    )  # fmt: skip


def stop(steps: int) -> str:
    return f"--trainer.hard_stop={{value: {steps}, unit: steps}}"


def model_of(run: Path, step: int) -> Any:
    return evaluation_model(open_checkpoint(run / f"step0000000{step}", World()))


def test_it_begins_with_their_logits_and_a_balance_of_ones_own_and_goes_on(
    foreign: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    for steps in (1, 2):  # the second time it goes on
        begin(tiny_mixture, tmp_path / "run", foreign, BIASED, stop(steps)).fit()
    ours, found = model_of(tmp_path / "run", 0), load_model(foreign)
    assert isinstance(found, tuple)
    assert ours.config.feed_forward.first_dense == 1
    ids = torch.randint(found[0].config.vocab_size, (2, 30))
    with torch.no_grad():
        logits = ours(ids)[..., : found[0].config.vocab_size]
        torch.testing.assert_close(logits, found[0].float()(ids), rtol=1e-5, atol=1e-5)
    biases = {n: v for n, v in ours.named_buffers() if n.endswith("router.bias")}
    assert len(biases) == 2
    assert not any(each.any() for each in biases.values())
    after = dict(model_of(tmp_path / "run", 2).named_buffers())
    assert all(after[name].abs().max() > 0 for name in biases)
    assert metrics(tmp_path / "run")[-1]["experts/bias norm"] > 0


def test_without_one_there_is_no_balance(foreign: Path, tiny_mixture: Path, tmp_path: Path) -> None:
    begin(tiny_mixture, tmp_path / "run", foreign, "--model=null", stop(1)).fit()
    assert model_of(tmp_path / "run", 0).config.feed_forward.balance is None
    with pytest.raises(UsageError, match=r"model\.feed_forward\.top_k is 2 in the weights"):
        begin(tiny_mixture, tmp_path / "other", foreign, "--model={feed_forward: {top_k: 3}}")


def on_ranks(lock: str, folder: str, place: str, *more: str) -> None:
    options = (
        "--train_module.dp_config={name: fsdp}",
        "--train_module.rank_microbatch_size=64",
        *more,
    )
    world = group_world()
    begin(Path(lock), Path(folder), Path(place), BIASED, *options, stop(1), world=world).fit()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"), [(2, []), (4, ["--train_module.ep_config={degree: 2}"])]
)
def test_ranks_read_what_is_at_home_on_them(
    ranks: int, more: list[str], foreign: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    begin(tiny_mixture, tmp_path / "alone", foreign, BIASED, stop(1)).fit()
    run_ranks(on_ranks, ranks, str(tiny_mixture), str(tmp_path / "run"), str(foreign), *more)
    one, two = (model_of(tmp_path / name, 0).state_dict() for name in ("alone", "run"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("fields", "tensors", "said"),
    [
        ({"num_local_experts": 5}, {}, "of no parameter .*experts.5.down_proj"),
        ({"num_local_experts": 7}, {}, "missing .*experts.6.down_proj"),
        ({"moe_intermediate_size": 16}, {}, r"is \[\d+, \d+\], not"),
        (
            {},
            {"model.layers.1.mlp.gate.weight": torch.full((6, 32), float("nan"))},
            "192 weights of blocks.1.feed_forward.router.weight are not finite",
        ),
        (
            {},
            {"model.layers.1.mlp.experts.5.up_proj.weight": torch.full((24, 32), torch.inf)},
            "768 weights of blocks.1.feed_forward.experts.w_gate_up are not finite",
        ),
    ],
)
def test_files_that_do_not_belong_together_are_refused_by_name(
    fields: dict[str, Any], tensors: dict[str, torch.Tensor], said: str, tmp_path: Path
) -> None:
    hf_model("qwen3_moe").save_pretrained(tmp_path)
    (config, weights) = (tmp_path / name for name in ("config.json", "model.safetensors"))
    whole = json.loads(config.read_text())
    if "num_experts" in whole:  # as transformers 4 writes it
        fields = {name.replace("num_local_experts", "num_experts"): v for name, v in fields.items()}
    config.write_text(json.dumps(whole | fields))
    save_file({**load_file(weights), **tensors}, weights, metadata={"format": "pt"})
    with pytest.raises((InputError, ValidationError), match=said):
        load_model(tmp_path)
