"""A loss of one's own, and the weight of a source: the loss of a step is sum(w * loss) / sum(w).

On several ranks: parallel/test_parity.py. In fp64: model/test_loss.py.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import make_batch
from support.distributed import run_ranks
from support.expert_ranks import of_experts
from support.runs import group_world
from support.small_datasets import random_shards, write_dataset
from support.training import LENGTHS, MODEL, ROWS, STEPS, build, cut, micro_batches, train
from torch import Tensor, nn

import olm_data
from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.mixture.revise import revise
from olm_data.run_log.metric_names import CE_LOSS, GRAD_NORM
from olm_train import (
    BasicTrainModule,
    Duration,
    Trainer,
    TransformerTrainModule,
    TransformerTrainModuleConfig,
    World,
)
from olm_train.data import DataLoader
from olm_train.data.batch import Batch
from olm_train.loss_context import LossContext
from olm_train.model.config import DecoderConfig
from olm_train.model.head import Head
from olm_train.model.loss import IGNORE_INDEX, LossSums, loss_sums
from olm_train.model.loss_config import LossConfig, OwnLoss
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


def batches_of(labels: list[list[int]]) -> Batches:
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
    batches, losses = batches_of(EMPTY), (own_mean, nn.CrossEntropyLoss())
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
    batches = batches_of([[NONE] * 3])
    metrics = trained.train_step(batches, 1, 1)
    assert (float(metrics[CE_LOSS]), float(metrics[GRAD_NORM])) == (0.0, 0.0)
    assert all(map(torch.equal, trained.model.parameters(), Two().parameters()))
    assert [float(each) for each in trained.eval_batch(batches[0])] == [0.0, 0.0]


def test_a_loss_sees_the_model_and_logs_terms_over_all_ranks() -> None:
    batches = batches_of([[0, 2, 1], [1, 2, 2], [1, 1, 0], [0, 0, 1]])
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
        stepped(loss, batches_of([[0, 1]]))
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


S = 16
WEIGHTS = st.lists(st.integers(1, 1000), min_size=ROWS, max_size=ROWS)


def weighed(weights: list[int]) -> Batch:
    by_row = torch.tensor(weights, dtype=torch.int32)[:, None]
    return replace(make_batch(LENGTHS, vocab_size=8), weights=by_row.expand(ROWS, 32))


def by_hand(module: TransformerTrainModule, batch: Batch, z: float = 0.0) -> torch.Tensor:
    """The loss label by label, in fp64."""
    model = module.model.double()
    logits = model(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
    logs, total, weights = logits.log_softmax(-1), torch.zeros((), dtype=torch.float64), 0
    for row, place in (batch.labels != IGNORE_INDEX).nonzero().tolist():
        weight = int(batch.weights[row, place])
        loss = -logs[row, place, batch.labels[row, place]]
        total = total + weight * (loss + z * logits[row, place].logsumexp(-1) ** 2)
        weights += weight
    return total / weights


@settings(max_examples=12)
@given(WEIGHTS, st.sets(st.integers(1, ROWS - 1)), st.booleans())
def test_loss_and_gradient_are_the_weighted_mean_under_any_cut(
    weights: list[int], cuts: set[int], chunked: bool
) -> None:
    """Also where a micro-batch has no label at all."""
    kind: Any = "chunked" if chunked else "plain"
    loss = LossConfig(name=kind, chunk_size=7 if chunked else None, z_loss_multiplier=0.01)
    module = build(max_grad_norm=None, loss=loss)
    batch, bounds = weighed(weights), [0, *sorted(cuts), ROWS]
    metrics = module.train_step([cut(batch, *each) for each in itertools.pairwise(bounds)], 1, 6)
    reference = build()
    expected = by_hand(reference, batch, z=0.01)
    expected.backward()
    found = float(metrics["train/CE loss"]) + float(metrics["train/Z loss"])
    assert found == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip(module.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("model", [MODEL, of_experts()], ids=["dense", "experts"])
def test_only_proportions_count(model: DecoderConfig) -> None:
    """And terms that are no losses of labels, such as the balance of experts, have no weight."""
    bare = make_batch(LENGTHS, vocab_size=8)
    runs = [
        build(model=model).train_step([batch], 1, STEPS)
        for batch in (bare, weighed([1] * ROWS), weighed([512] * ROWS))
    ]
    for name, value in runs[0].items():
        for other in runs[1:]:
            assert float(other[name]) == pytest.approx(float(value), rel=1e-5), name


def test_losses_that_are_watched_are_not_weighed() -> None:
    module, seen = build(), list[torch.Tensor]()
    module.watch_losses = lambda _, by_label: seen.append(by_label)
    metrics = module.train_step([weighed([1] * 4 + [9] * 4)], 1, STEPS)
    bare, plain = build(), list[torch.Tensor]()
    bare.watch_losses = lambda _, by_label: plain.append(by_label)
    unlike = bare.train_step([make_batch(LENGTHS, vocab_size=8)], 1, STEPS)
    assert torch.equal(seen[0], plain[0])
    assert float(metrics["train/CE loss"]) != float(unlike["train/CE loss"])


@pytest.mark.slow
def test_the_compiled_loss_weighs_as_the_plain_one() -> None:
    batches = [weighed([1, 3, 500, 7] * 2)]
    plain, compiled = (
        train(build(loss=LossConfig(name=name)), [ROWS], [1, 2], lambda *_: batches)  # type: ignore[arg-type]
        for name in ("plain", "compiled")
    )
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)


# ---- from the manifest to the batch --------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    rng = np.random.default_rng(0)
    for number, name in enumerate(("a", "b", "c")):
        lengths = rng.integers(1, 40, size=(2, 12)).tolist()
        write_dataset(folder / name, random_shards(number, lengths))
    return folder


def mixed(data: Path, name: str = "mix", **weights: str) -> Lock:
    keys = {source: f", loss_weight: {weight}" for source, weight in weights.items()}
    sources = "".join(f"  {s}: {{data: ./{s}{keys.get(s, '')}}}\n" for s in ("a", "b", "c"))
    (data / f"{name}.yaml").write_text(
        f"version: 1\nsequence_length: {S}\nsources:\n{sources}stages:\n"
        f"  - {{name: one, tokens: {20 * S}, weights: {{a: 2, b: 1, c: 1}}, sequence_length: 4}}\n"
        f"  - {{name: two, tokens: {20 * S}, weights: {{a: 1, b: 1, c: 2}}}}\n"
    )
    return olm_data.mix(str(data / f"{name}.yaml"), overwrite=True)


def test_a_lock_keeps_weights_and_without_them_its_bytes(data: Path) -> None:
    lock = mixed(data, a="0.3", b="2")
    assert [source.loss_weight for source in lock.sources] == ["3/10", "2/1", None]
    assert lock.loss_weights == (3, 20, 10)
    assert Lock.decode(lock.encode(), str(data / "mix.lock.json")) == lock
    bare = mixed(data)
    assert bare.loss_weights == ()
    assert mixed(data, a="1", b="1.000").encode() == bare.encode()
    assert b"loss_weight" not in bare.encode()
    assert mixed(data, a="0.5", b="0.5", c="0.5").loss_weights == ()


def test_each_label_has_the_weight_of_its_source(data: Path) -> None:
    lock = mixed(data, a="0.25", c="4")
    loader = DataLoader(lock, global_batch_size=4 * S, rank_microbatch_size=2 * S)
    weights = np.array(lock.loss_weights)
    for batch in itertools.chain.from_iterable(loader):
        assert batch.weights.shape == batch.labels.shape
        assert batch.weights.dtype == torch.int32
        sources = lock.schedule().locate(batch.rows.numpy()).source
        assert (batch.weights.numpy() == weights[sources][:, None]).all()
        joined = Batch.join([batch, batch]).weights
        assert len(joined) == 2 * len(batch.weights)
    bare = DataLoader(mixed(data), global_batch_size=4 * S, rank_microbatch_size=2 * S)
    assert all(batch.weights is None for batch in itertools.chain.from_iterable(bare))


@pytest.mark.parametrize("weight", ["0", "-1", "1000.001", "0.0001", "yes", "[1]"])
def test_other_weights_are_refused_with_their_line(data: Path, weight: str) -> None:
    with pytest.raises(UsageError, match="is no loss weight") as refused:
        mixed(data, "wrong", b=weight)
    assert "wrong.yaml:5" in str(refused.value)


def test_a_lock_with_another_weight_is_not_read(data: Path) -> None:
    lock = mixed(data, b="2")
    for weight in ("0/1", "1/7", "2000/1", "1/0", "two"):
        source = {"loss_weight": weight}
        sources = [msgspec.structs.replace(each, **source) for each in lock.sources]
        wrong = msgspec.structs.replace(lock, sources=tuple(sources), digest="")
        wrong = msgspec.structs.replace(wrong, digest=wrong.compute_digest())
        with pytest.raises(ValidationError, match="numbers do not fit"):
            Lock.decode(wrong.encode(), str(data / "mix.lock.json"))


def test_a_run_does_not_go_on_with_other_weights(data: Path) -> None:
    old = mixed(data, b="2")
    mixed(data, "other", b="3")
    with pytest.raises(UsageError, match="loss_weight 3/1, in the lock 2/1"):
        revise(str(data / "mix.lock.json"), str(20 * S), str(data / "other.yaml"))
    state = DataLoader(old, global_batch_size=4 * S, rank_microbatch_size=2 * S).state_dict()
    other = Lock.read(data / "other.lock.json")
    loader = DataLoader(other, global_batch_size=4 * S, rank_microbatch_size=2 * S)
    with pytest.raises(ValidationError, match=r"loss weight 2/1, this lock has .* weight 3/1"):
        loader.load_state_dict(state)


def test_what_cannot_weigh_labels_refuses_the_lock(data: Path, tmp_path: Path) -> None:
    loader = DataLoader(mixed(data, b="2"), global_batch_size=4 * S, rank_microbatch_size=2 * S)
    linear = torch.nn.Linear(2, 2)
    other = BasicTrainModule(linear, torch.optim.SGD(linear.parameters()), torch.nn.MSELoss())
    for module, name in (
        (build(loss=LossConfig(name="linear_cross_entropy")), "linear_cross_entropy"),
        (other, "BasicTrainModule"),
    ):
        with pytest.raises(UsageError, match=f"{name} does not weigh labels"):
            Trainer(
                train_module=module,
                data_loader=loader,
                save_folder=tmp_path / "run",
                max_duration=Duration.steps(1),
            )


def test_a_row_of_padding_has_no_part() -> None:
    """A step without a valid label has loss 0 whatever its weights."""
    batch = make_batch([[1] * 32] * 2, vocab_size=8)
    batch = replace(batch, weights=torch.full((2, 32), 7, dtype=torch.int32))
    assert build().train_step([batch], 1, STEPS)["train/CE loss"] == 0
    assert micro_batches(1, [ROWS], build().world)[0].weights is None
