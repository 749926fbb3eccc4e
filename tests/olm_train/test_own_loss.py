"""A loss of one's own sees the model and logs terms; a micro-batch may have no label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.batches import make_batch
from support.distributed import run_ranks
from support.runs import group_world
from support.training import MODEL
from torch import Tensor, nn

from olm_data.errors import UsageError
from olm_data.run_log.metric_names import CE_LOSS, GRAD_NORM
from olm_train import BasicTrainModule, TransformerTrainModule, TransformerTrainModuleConfig, World
from olm_train.loss_context import LossContext
from olm_train.model.head import Head
from olm_train.model.loss import IGNORE_INDEX, LossSums, loss_sums
from olm_train.model.loss_config import OwnLoss
from olm_train.parallel.config import DataParallelConfig, DataParallelType

Batches = list[tuple[Tensor, Tensor]]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.layers[:2](x)
        return self.layers[2](self.seen)  # type: ignore[no-any-return]


def with_penalty(output: Tensor, labels: Tensor, context: LossContext) -> Tensor:
    """Cross entropy, and a term of what the model left on itself."""
    penalty = context.model.seen.square().mean()  # type: ignore[union-attr, operator]
    context.log("penalty", penalty)
    return F.cross_entropy(output, labels) + penalty


def own_mean(output: Tensor, labels: Tensor) -> Tensor:
    """A mean over labels written by hand: 0 / 0 without one."""
    kept = labels != IGNORE_INDEX
    losses = F.cross_entropy(output, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return (losses * kept).sum() / kept.sum()


def data(labels: list[list[int]]) -> Batches:
    torch.manual_seed(5)
    return [(torch.randn(len(each), 4), torch.tensor(each)) for each in labels]


class Counting(BasicTrainModule):
    def count(self, batch: Any) -> Tensor:
        return (batch[1] != IGNORE_INDEX).sum()


def stepped(loss: Any, batches: Batches, world: World | None = None, **options: Any) -> Any:
    module = Counting(Two(), torch.optim.SGD, loss, optim={"lr": 0.1}, world=world, **options)
    metrics = module.train_step(batches, 1, 1)
    weights = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in module.model.named_parameters()
    }
    return {name: float(value) for name, value in metrics.items()}, weights


KINDS = [DataParallelType.ddp, DataParallelType.fsdp]


def of_rank(*cases: tuple[Any, Batches]) -> list[Any]:
    """What one of two ranks finds: each case under each way to share the weights."""
    world = group_world()
    return [
        stepped(loss, batches[world.rank :: 2], world, dp_config=DataParallelConfig(name=kind))
        for loss, batches in cases
        for kind in KINDS
    ]


def agree(found: Any, expected: Any) -> None:
    (metrics, here), (loss, weights) = found, expected
    assert metrics == pytest.approx(loss, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(here[name], weight)


NONE = IGNORE_INDEX
EMPTY = [[0, 2, NONE], [NONE, NONE, NONE], [1, 1, 0], [NONE, NONE, NONE]]


def test_micro_batches_without_a_label_add_nothing_on_one_rank_and_on_two() -> None:
    batches, losses = data(EMPTY), (own_mean, nn.CrossEntropyLoss())
    x, labels = (torch.cat(each) for each in zip(*batches, strict=True))
    expected = [stepped(loss, [(x, labels)]) for loss in losses]
    for loss, wanted in zip(losses, expected, strict=True):
        agree(stepped(loss, batches), wanted)
    for found in run_ranks(of_rank, 2, *((loss, batches) for loss in losses)):
        for number, each in enumerate(found):
            agree(each, expected[number // 2])


@pytest.mark.parametrize("module", [BasicTrainModule, Counting])
@pytest.mark.parametrize("loss", [own_mean, nn.CrossEntropyLoss()])
def test_a_step_without_any_label_changes_nothing(module: Any, loss: Any) -> None:
    if module is BasicTrainModule and loss is own_mean:
        pytest.skip("which labels count is known of torch's losses, else `count` says it")
    trained = module(Two(), torch.optim.SGD, loss, optim={"lr": 0.1})
    batches = data([[NONE] * 3])
    metrics = trained.train_step(batches, 1, 1)
    assert (float(metrics[CE_LOSS]), float(metrics[GRAD_NORM])) == (0.0, 0.0)
    assert all(map(torch.equal, trained.model.parameters(), Two().parameters()))
    assert [float(each) for each in trained.eval_batch(batches[0])] == [0.0, 0.0]


def test_a_loss_sees_the_model_and_logs_terms_over_all_ranks() -> None:
    batches = data([[0, 2, 1], [1, 2, 2], [1, 1, 0], [0, 0, 1]])
    expected, by_hand = stepped(with_penalty, batches), Two()
    seen = torch.stack([by_hand.layers[:2](x).detach().square().mean() for x, _ in batches])
    assert expected[0]["train/penalty"] == pytest.approx(float(seen.mean()), rel=1e-5)
    for found in run_ranks(of_rank, 2, (with_penalty, batches)):
        for each in found:
            agree(each, expected)


@pytest.mark.parametrize(("name", "value"), [("CE loss", 1.0), ("", 1.0), ("x", torch.ones(2))])
def test_a_term_is_refused_that_could_not_be_logged(name: str, value: Any) -> None:
    def loss(output: Tensor, labels: Tensor, context: LossContext) -> Tensor:
        context.log(name, value)
        return F.cross_entropy(output, labels)

    with pytest.raises(UsageError) as caught:
        stepped(loss, data([[0, 1]]))
    assert caught.value.where == "context.log"


@dataclass(frozen=True, kw_only=True)
class Entropy(OwnLoss):
    def sums(
        self, head: Head, x: Tensor, labels: Tensor, context: LossContext | None = None
    ) -> LossSums:
        assert len(list(context.model.parameters())) > 3
        plain = loss_sums(head.logits(x), labels, None)
        context.log("twice", 2 * plain.total)
        return plain


def of_decoder(world: World, kind: DataParallelType) -> dict[str, float]:
    config = TransformerTrainModuleConfig(
        rank_microbatch_size=32,
        loss=Entropy(),  # type: ignore[arg-type]
        dp_config=DataParallelConfig(name=kind),
    )
    module = TransformerTrainModule(config, MODEL, seed=1, world=world)
    rows = [make_batch([each], vocab_size=97) for each in ([32], [5, 27], [1, 31], [16, 16])]
    metrics = module.train_step(rows[world.rank :: world.size], 1, 1)
    return {name: float(value) for name, value in metrics.items()}


def of_decoder_rank() -> list[dict[str, float]]:
    world = group_world()
    return [of_decoder(world, kind) for kind in KINDS]


def test_the_loss_of_a_decoder_logs_terms_as_its_sums_are() -> None:
    expected = of_decoder(World(), DataParallelType.ddp)
    assert expected["train/twice"] == pytest.approx(2 * expected[CE_LOSS], rel=1e-6)
    for found in run_ranks(of_decoder_rank, 2):
        assert found == [pytest.approx(expected, rel=1e-4)] * 2
