"""The loss weight of a source: the loss of a step is sum(w * loss) / sum(w) over its labels.

On several ranks: parallel/test_parity.py. In fp64: model/test_loss.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import make_batch
from support.expert_ranks import of_experts
from support.small_datasets import random_shards, write_dataset
from support.training import LENGTHS, MODEL, ROWS, STEPS, build, cut, micro_batches, train

import olm_data
from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.mixture.revise import revise
from olm_train import BasicTrainModule, Duration, Trainer
from olm_train.data import DataLoader
from olm_train.data.batch import Batch
from olm_train.model.config import DecoderConfig
from olm_train.model.loss import IGNORE_INDEX
from olm_train.model.loss_config import LossConfig
from olm_train.train_module import TransformerTrainModule

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
