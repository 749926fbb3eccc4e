"""Units of FSDP2 in any model: by class or by size, inner ones first."""

from __future__ import annotations

import pytest
import torch
from support.distributed import run_ranks
from support.parallel_checks import Traffic
from support.runs import group_world
from torch import nn

from olm_data.errors import UsageError
from olm_train.extensions.any_model.wrapping import units
from olm_train.parallel.apply import spread
from olm_train.parallel.config import DataParallelConfig


def model() -> nn.Sequential:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
    return nn.Sequential(nn.Embedding(10, 4), blocks, nn.MultiheadAttention(4, 2), nn.Linear(4, 1))


def names(whole: nn.Module, found: list[nn.Module]) -> list[str]:
    name_of = {module: name for name, module in whole.named_modules()}
    return [name_of[module] for module in found]


def test_by_class_inner_modules_come_first() -> None:
    whole = model()
    assert names(whole, units(whole)) == []
    assert names(whole, units(whole, [nn.Embedding])) == ["0"]
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert names(nested, units(nested, [nn.Sequential, nn.Linear])) == ["0.0", "0"]


def test_by_size_containers_and_parts_of_an_attention_are_no_units() -> None:
    whole = model()
    assert names(whole, units(whole, min_num_params=20)) == ["0", "1.0.0", "1.1.0", "2"]
    assert names(whole, units(whole, min_num_params=41)) == ["2"]
    assert names(whole, units(whole, min_num_params=10_000)) == []


def test_mistakes_are_refused_with_what_there_is() -> None:
    with pytest.raises(UsageError, match="no Conv1d inside it") as error:
        units(model(), [nn.Conv1d])
    assert "Embedding, Linear" in str(error.value)
    with pytest.raises(UsageError, match="wrap_classes and min_num_params"):
        units(model(), [nn.Linear], 3)


def _trained(factor: int) -> tuple[list[float], list[int]]:
    """On each rank: losses of three steps, and the gathers asked for before each block computes."""
    events: list[str] = []
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(8, 1))
    config = DataParallelConfig(param_dtype="float32", prefetch_factor=factor)
    module = spread(model, config, group_world(), units(model, [nn.Sequential]))
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: events.append("block"))
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for step in range(3):
        events.clear()
        with Traffic(events):
            loss = (module(torch.full((2, 8), 1.0 + step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    computes = [n for n, event in enumerate(events) if event == "block"]
    return losses, [n - i for i, n in enumerate(computes)]


def _both() -> tuple[tuple[list[float], list[int]], tuple[list[float], list[int]]]:
    return _trained(0), _trained(2)


@pytest.mark.slow
def test_weights_of_ones_own_modules_are_asked_for_ahead_and_no_bit_changes() -> None:
    """A gather for the root, then for each of four blocks and for the part inside it."""
    for (losses, asked), (same, ahead) in run_ranks(_both, 2):
        assert losses == same
        assert losses[-1] < losses[0]
        assert asked == [2, 4, 6, 8]
        assert ahead == [4, 6, 7, 8]


def test_a_module_whose_weights_are_tied_to_others_is_no_unit() -> None:
    whole = model()
    whole[3] = nn.Linear(4, 10)
    whole[3].weight = whole[0].weight
    assert names(whole, units(whole, min_num_params=20)) == ["1.0.0", "1.1.0", "2"]
    assert names(whole, units(whole, [nn.Linear, nn.Embedding])) == [
        "2.out_proj",
        "1.1.0",
        "1.0.0",
    ]
    inside = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    inside[1][1].weight = inside[1][0].weight
    assert names(inside, units(inside, min_num_params=10)) == ["1"]
