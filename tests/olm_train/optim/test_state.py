"""The state of any optimiser comes back bit for bit, and what does not fit is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.any_optimizer import Closed, Make, Odd, of, trainer_with
from support.distributed import run_ranks
from support.runs import group_world, metrics
from support.training import ROWS, build, digest, full, load, save, train
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from olm_data.errors import UsageError, ValidationError
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import Kind
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.distributed.world import World
from olm_train.train_module import TransformerTrainModule
from olm_train.trainer import Trainer

CANNOT = {"LBFGS", "SparseAdam"}
"""One needs a closure, one sparse gradients: neither can take a step of the trainer."""
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True, "fused": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {"lr_decay": 0.1},
    "ASGD": {"t0": 2.0},
}
KINDS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
)
FIRST, LAST = 2, 4


def fit(make: Make, lock: Path, folder: Path, stop: int, *more: str, world: Any = None) -> Trainer:
    at = f"--trainer.hard_stop={{value: {stop}, unit: steps}}"
    trainer = trainer_with(make, lock, folder, at, *more, world=world)
    trainer.fit()
    return trainer


def state(trainer: Trainer) -> dict[str, Any]:
    """All that a checkpoint says of model and optimiser."""
    leaves = {
        f"{part}.{name}": leaf
        for part, found in trainer.train_module.state_dict().items()
        for name, leaf in found.items()
    }
    tensors = {
        name: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        for name, leaf in leaves.items()
        if isinstance(leaf, torch.Tensor)
    }
    values = {name: leaf for name, leaf in leaves.items() if name not in tensors}
    return {
        "tensors": digest(tensors),
        "values": values,
        "record": trainer.optimizer_state.record(trainer.world),
    }


def test_the_table_knows_every_optimiser_of_torch() -> None:
    assert set(KINDS) > CANNOT | OPTIONS.keys()


@pytest.mark.parametrize("name", ["Odd", "NAdam", "SGD"])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(
    name: str, tiny_mixture: Path, tmp_path: Path
) -> None:
    make = Odd if name == "Odd" else of(getattr(torch.optim, name), **OPTIONS.get(name, {}))
    whole = fit(make, tiny_mixture, tmp_path / "whole", LAST)
    first = fit(make, tiny_mixture, tmp_path / "stopped", FIRST)
    resumed = fit(make, tiny_mixture, tmp_path / "stopped", LAST)
    assert state(resumed) == state(whole) != state(first)
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")


def module_with(name: str) -> TransformerTrainModule:
    module = build()
    groups = [{"params": [*module.model.parameters()], "lr": 1e-3, "peak_lr": 1e-3}]
    module.optimizer = of(getattr(torch.optim, name), **OPTIONS.get(name, {}))(groups)
    return module


@pytest.mark.parametrize("name", sorted({*KINDS} - CANNOT))
def test_every_optimiser_of_torch_goes_on_from_a_checkpoint_to_the_bit(
    name: str, tmp_path: Path
) -> None:
    straight, again = module_with(name), module_with(name)
    train(straight, [ROWS], (1, 2))
    save(straight, tmp_path)
    load(again, tmp_path)
    assert again.optimizer.state_dict()["state"].keys()
    runs = [train(module, [ROWS], (3, 4)) for module in (straight, again)]
    assert runs[0].bits == runs[1].bits
    one, other = (digest(full(module)["optim"]) for module in (straight, again))
    assert one == other


MAKERS: tuple[Make, ...] = (of(torch.optim.NAdam), of(torch.optim.SGD, momentum=0.9), Odd)


def on_ranks(lock: Path, folder: Path) -> dict[str, list[Any]]:
    world, found = group_world(), {}
    for strategy, make in ((each, make) for each in ("fsdp", "ddp") for make in MAKERS):
        dp = f"--train_module.dp_config.name={strategy}"
        place = f"{strategy} {len(found)}"
        found[place] = [
            state(fit(make, lock, folder / place / where, stop, dp, world=world))
            for where, stop in (("whole", LAST), ("stopped", FIRST), ("stopped", LAST))
        ]
    apart = trainer_with(
        lambda groups: Odd(groups, local=True), lock, folder / "apart", world=world
    )
    with pytest.raises(UsageError, match="differ between rank 0 and rank 1"):
        apart.fit()
    return found


@pytest.mark.slow
def test_on_two_ranks_too(tiny_mixture: Path, tmp_path: Path) -> None:
    for rank in run_ranks(on_ranks, 2, tiny_mixture, tmp_path):
        for way, (whole, first, resumed) in rank.items():
            assert resumed == whole != first, way


def test_a_state_in_memory_finds_its_room_as_well() -> None:
    one, other = build(), build()
    for module in (one, other):
        module.optimizer = torch.optim.NAdam(module.model.parameters())
    for parameter in one.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    one.optimizer.step()
    other.load_state_dict(full(one))
    assert full(other)["optim"].keys() == full(one)["optim"].keys()
    assert digest(full(other)["optim"]) == digest(full(one)["optim"])


def saved(tensors: dict[str, dict[str, torch.Tensor]], folder: Path) -> Path:
    contents = Contents(step=1, kind=Kind.permanent, state=tensors, documents={}, lock_digest="")
    return Path(save_checkpoint(folder, contents, World(), work_dir=folder))


@pytest.mark.parametrize(
    ("extra", "left_out", "message"),
    [
        ({"optim": "x.new"}, None, "unexpected optim.x.new"),
        ({"model": "blocks.9.w"}, None, "unexpected model.blocks.9.w"),
        ({}, "optim", "missing"),
        ({}, "model", "missing"),
    ],
)
def test_a_tensor_too_many_or_too_few_is_named(
    extra: dict[str, str], left_out: str | None, message: str, tmp_path: Path
) -> None:
    module = build()
    tensors = {part: dict(found) for part, found in module.state_dict().items()}
    for part, name in extra.items():
        tensors[part][name] = torch.ones(2)
    if left_out is not None:
        gone = sorted(tensors[left_out])[0]
        del tensors[left_out][gone]
        message = f"{message} {left_out}.{gone}"
    checkpoint = open_checkpoint(saved(tensors, tmp_path), World())
    before = {part: digest(found) for part, found in full(module).items()}
    with pytest.raises(ValidationError, match="does not fit this model") as refused:
        checkpoint.load_tensors(module.state_dict(), World())  # type: ignore[arg-type]
    assert message in str(refused.value)
    assert {part: digest(found) for part, found in full(module).items()} == before


def test_of_what_is_taken_over_in_part_only_the_part_counts(tmp_path: Path) -> None:
    module = build()
    checkpoint = open_checkpoint(saved(module.state_dict(), tmp_path), World())
    other = build()
    weights = {"model": other.state_dict()["model"]}
    checkpoint.load_tensors(weights, World())  # type: ignore[arg-type]
    assert digest(weights["model"]) == digest(full(module)["model"])


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("parameter", r"history.set \(set\)"),
        ("nowhere", r"state\['shared'\]"),
        ("group", r"object \(object\)"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_at_the_first_step(
    where: str, message: str, tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = trainer_with(lambda groups: Closed(groups, where), tiny_mixture, tmp_path)
    with pytest.raises(UsageError, match=message):
        trainer.fit()
    assert trainer.step == 1
