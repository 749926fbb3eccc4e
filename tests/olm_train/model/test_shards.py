"""Initial weights of sharded models: the same bits, each rank draws its own part, none in vain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.distributed import run_ranks
from support.runs import build_trainer
from support.training import MODEL, build, digest, full
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from olm_train.checkpoint.load import open_checkpoint
from olm_train.distributed.world import World
from olm_train.extensions.hf_export.command import export
from olm_train.model.decoder import Decoder
from olm_train.model.init import Workspace, init_parameters

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp, three threads": {"threads": 3},
    "ddp": {"strategy": "ddp"},
    "hsdp": {"strategy": "hsdp", "sharing": {"num_replicas": 2}},
}


def counted(draw: Callable[[], Any]) -> int:
    """Return how many elements `draw` draws."""
    fill, drawn = Workspace.fill, 0

    def count(self: Workspace, out: Any, *arguments: Any) -> None:
        nonlocal drawn
        drawn += out.size
        fill(self, out, *arguments)

    Workspace.fill = count  # type: ignore[method-assign]
    try:
        draw()
    finally:
        Workspace.fill = fill  # type: ignore[method-assign]
    return drawn


def first_weights() -> dict[str, Any]:
    """On each rank: the digest of the whole model, elements drawn, elements of matrices here."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    results = {}
    for name, options in LAYOUTS.items():
        if name == "hsdp" and world.size % 2:
            continue
        threads = options.get("threads")
        module = build(options.get("strategy", "fsdp"), world=world, sharing=options.get("sharing"))
        drawn = counted(lambda: init_parameters(module.model, 5, threads=threads))  # noqa: B023
        here = sum(
            (p.to_local() if isinstance(p, DTensor) else p).numel()
            for p in module.model.parameters()
            if p.ndim == 2
        )
        results[name] = (digest(full(module)["model"]), drawn, here)
    return results | {"columns": _by_columns(world)}


def _by_columns(world: World) -> tuple[str, int, int]:
    """The same for matrices cut over their columns, and a model that is whole on some ranks."""
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("copies", "parts"))
    model = Decoder(MODEL)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(
                torch.full_like(parameter, torch.nan),
                mesh,
                [Replicate(), Shard(parameter.ndim - 1)],
            )
            setattr(module, name, torch.nn.Parameter(cut))
    drawn = counted(lambda: init_parameters(model, 5))
    whole = {name: p.data.full_tensor() for name, p in model.named_parameters()}
    here = sum(p.to_local().numel() for p in model.parameters() if p.ndim == 2)
    return digest(whole), drawn, here


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_t3_each_rank_draws_its_own_part_and_the_whole_is_the_same_bits(ranks: int) -> None:
    expected = digest(full(build())["model"])
    for results in run_ranks(first_weights, ranks):
        assert {"fsdp", "ddp", "columns"} < results.keys()
        for layout, (found, drawn, here) in results.items():
            assert found == expected, layout
            assert drawn == here, layout


def test_t3_nothing_is_drawn_before_a_load(tiny_mixture: Path, tmp_path: Path) -> None:
    def begin(folder: str, *more: str, stop: int = 2) -> int:
        def draw() -> None:
            nonlocal trainer
            trainer = build_trainer(tiny_mixture, tmp_path / folder, *more, quiet=True, stop=stop)
            trainer.restore()

        return counted(draw)

    trainer: Any = None
    matrices = begin("run")
    assert matrices == sum(p.numel() for p in trainer.train_module.model.parameters() if p.ndim > 1)
    trainer.fit()
    assert begin("run", stop=3) == 0
    assert trainer.step == 2
    weights = full(trainer.train_module)["model"]
    exported = tmp_path / "exported"
    export(open_checkpoint(tmp_path / "run" / "step00000002", World()), exported)
    no_state = ("--trainer.load_trainer_state=false", "--trainer.load_optim_state=false")
    for place, more in (("run", ()), ("run", no_state), ("exported", no_state)):
        path = f"--trainer.load_path={tmp_path / place}"
        assert begin(f"{place}{len(more)}", path, *more, stop=3) == 0
        assert digest(full(trainer.train_module)["model"]) == digest(weights)


def test_t3_weights_that_are_there_are_not_drawn_again_and_none_are_not_trained(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path)
    module = trainer.train_module
    batches = next(iter(trainer.data_loader))
    trainer.data_loader.close()
    with pytest.raises(AssertionError, match="neither ensure_weights nor load_state_dict"):
        module.train_step(batches, 1, 2)
    with pytest.raises(AssertionError, match="neither ensure_weights nor load_state_dict"):
        module.eval_batch(batches[0])
    mine = {"model": {name: torch.ones_like(p) for name, p in module.state_dict()["model"].items()}}
    module.load_state_dict(mine)
    assert counted(lambda: trainer.restore()) == 0
    assert all(bool((p == 1).all()) for p in module.model.parameters())
