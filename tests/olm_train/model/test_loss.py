"""Losses: plain, in chunks, and which one a run takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import make_batch
from support.model_options import CONFIG, drawn
from support.training import MODEL, build, micro_batches, train
from torch.utils._python_dispatch import TorchDispatchMode

from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.head import Head
from olm_train.model.loss import (
    LossSums,
    count_valid,
    cross_entropy_by_label,
    loss_sums,
    sum_by_piece,
)
from olm_train.model.loss_chunked import by_label_chunked, chunked_loss
from olm_train.model.loss_config import LossChoice, LossConfig

V, D = 61, 16


def case(
    dtype: torch.dtype = torch.float32, rows: int = V, softcap: float | None = None
) -> tuple[Head, torch.Tensor, torch.Tensor]:
    """A head, states [3, 7, D] that want gradients, labels with ignored ones."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, D, generator=generator).to(dtype).requires_grad_()
    x = torch.randn(3, 7, D, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(V, (3, 7), generator=generator)
    labels[torch.rand(3, 7, generator=generator) < 0.3] = -100
    return Head(weight, V, softcap), x, labels


def results(choice: LossChoice, *inputs: Any) -> list[torch.Tensor | None]:
    """Sums and gradients, with 0.25 coming in from above."""
    return of_sums(choice.build()(*inputs), *inputs)


def of_sums(sums: LossSums, *inputs: Any) -> list[torch.Tensor | None]:
    head, x, _ = inputs
    gradients = torch.autograd.grad(sums.total * 0.25, (x, head.weight))
    return [*(value if value is None else value.detach() for value in sums), *gradients]


def choice(name: str, chunk_size: int | None = None, z: float | None = None) -> LossChoice:
    return LossChoice(name, "", chunk_size, z, compiled=False)


def test_sum_is_the_log_probability_of_the_valid_labels() -> None:
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, -100, 3, -100], [-100, 10, 0, 0, 4]])
    logp = logits.double().log_softmax(-1)
    expected = -sum(
        logp[i, j, labels[i, j]] for i in range(2) for j in range(5) if labels[i, j] >= 0
    )
    # fp32: 11 terms of each softmax, 3 roundings of its logarithm and the difference, 7 labels
    near = {"rtol": (11 + 3 + 7) * 2.0**-24, "atol": 0.0}
    torch.testing.assert_close(loss_sums(logits, labels, None).total.double(), expected, **near)
    torch.testing.assert_close(
        cross_entropy_by_label(logits, labels).sum(dtype=torch.float64), expected, **near
    )
    assert count_valid(labels) == 7
    squares = [
        float(logits[i, j].double().exp().sum().log() ** 2)
        for i in range(2)
        for j in range(5)
        if labels[i, j] >= 0
    ]
    z = loss_sums(logits, labels, 0.5).z
    assert float(z) == pytest.approx(0.5 * sum(squares), rel=1e-5)


@pytest.mark.parametrize("z", [None, 1e-2])
def test_no_valid_label_gives_zero_loss_and_zero_gradient(z: float | None) -> None:
    head, x, labels = case()
    for each in (choice("plain", z=z), choice("chunked", 4, z)):
        for value in results(each, head, x, torch.full_like(labels, -100)):
            assert value is None or (value == 0).all()


@settings(max_examples=20)
@given(
    st.integers(1, 30),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([V, 64]),
    st.sampled_from([None, 2.0]),
    st.sampled_from([None, 1e-2]),
)
def test_chunks_of_any_size_give_the_plain_loss_and_gradients(
    size: int, dtype: torch.dtype, rows: int, softcap: float | None, z: float | None
) -> None:
    inputs = case(dtype, rows, softcap)
    head, x, labels = inputs
    plain = of_sums(loss_sums(head.logits(x), labels, z), *inputs)
    chunked = results(choice("chunked", size, z), *inputs)
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    torch.testing.assert_close(chunked, plain, **tolerance)


def test_chunks_without_gradients_give_the_same_sums_and_labels() -> None:
    inputs = case()
    with torch.no_grad():
        chunked = choice("chunked", 4, 1e-2).build()(*inputs)
        plain = choice("plain", z=1e-2).build()(*inputs)
        assert not chunked.total.requires_grad
        torch.testing.assert_close(chunked, plain)
        torch.testing.assert_close(
            by_label_chunked(*inputs, chunk_size=4), by_label_chunked(*inputs, chunk_size=None)
        )


class Largest(TorchDispatchMode):
    """The most elements of a tensor an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_chunked_never_holds_more_logits_than_a_chunks() -> None:
    inputs = case(rows=V)
    sizes = {}
    for each in (choice("plain"), choice("chunked", 3)):
        with Largest() as largest:
            results(each, *inputs)
        sizes[each.name] = largest.numel
    assert sizes["plain"] == 21 * V
    assert sizes["chunked"] == max(3 * V, V * D, 21 * D)  # a chunk's logits, a gradient


def test_linear_cross_entropy_gives_the_plain_loss_and_gradients() -> None:
    inputs = case()
    ours, theirs = (results(choice(n), *inputs) for n in ("plain", "linear_cross_entropy"))
    by_label = ours.pop(3), theirs.pop(3)
    assert by_label[0] is not None
    assert by_label[1] is None
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["chunked", "linear_cross_entropy"])
def test_a_run_follows_the_plain_one(name: str, tied: bool) -> None:
    model = MODEL.changed(head={"tied": tied})
    config = LossConfig(name=name, chunk_size=50 if name == "chunked" else None)  # type: ignore[arg-type]
    plain, other = (
        train(build(model=model, loss=loss), [3, 5]) for loss in (LossConfig(name="plain"), config)
    )
    assert other.losses == pytest.approx(plain.losses, rel=1e-5)
    assert other.norms == pytest.approx(plain.norms, rel=1e-4)


def test_z_loss_is_logged_apart_and_changes_the_gradient() -> None:
    without, with_z = build(), build(loss=LossConfig(z_loss_multiplier=0.1))
    batches = micro_batches(1, [3, 5], without.world)
    one, other = (module.train_step(batches, 1, 6) for module in (without, with_z))
    assert "train/Z loss" not in one
    assert one["train/CE loss"] == other["train/CE loss"]
    assert one["optim/total grad norm"] != other["optim/total grad norm"]
    model = build().model
    with torch.no_grad():
        squares = sum(
            float(
                model(b.input_ids, doc_start=b.doc_start, positions=b.positions)[b.labels != -100]
                .logsumexp(-1)
                .square()
                .sum()
            )
            for b in batches
        )
    assert float(other["train/Z loss"]) == pytest.approx(0.1 * squares / int(one["train/labels"]))


@pytest.mark.parametrize("z", [None, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_is_the_one_that_torch_derives_in_fp64(
    dtype: torch.dtype, z: float | None
) -> None:
    head, x, labels = case(dtype)
    logits = head.logits(x).detach().requires_grad_()
    (found,) = torch.autograd.grad(loss_sums(logits, labels, z).total * 0.25, logits)
    exact = logits.detach().double().requires_grad_()
    total = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="sum")
    total = total + (z or 0) * exact[labels != -100].logsumexp(-1).square().sum()
    (expected,) = torch.autograd.grad(total * 0.25, exact)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-14
    assert torch.linalg.norm(found - expected) <= tolerance * torch.linalg.norm(expected)


def test_a_second_backward_pass_is_refused_and_never_wrong() -> None:
    head, x, labels = case()
    total = loss_sums(head.logits(x), labels, None).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("z", [None, 0.1])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(LossChoice("compiled", "", None, None, True), marks=pytest.mark.slow),
        choice("plain"),
        choice("chunked", 4),
    ],
)
def test_losses_of_labels_are_those_that_the_sum_is_made_of(
    name: LossChoice, z: float | None
) -> None:
    head, x, labels = case()
    sums = replace(name, z_loss_multiplier=z).build()(head, x, labels)
    assert not sums.by_label.requires_grad
    expected = cross_entropy_by_label(head.logits(x), labels).flatten()
    torch.testing.assert_close(sums.by_label, expected.detach(), rtol=1e-6, atol=1e-6)
    assert float(sums.by_label.double().sum()) == pytest.approx(float(sums.cross_entropy), rel=1e-6)


def test_sums_by_piece_are_those_of_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(9, (2, 20), generator=generator)
    labels[torch.rand(2, 20, generator=generator) < 0.3] = -100
    by_label = torch.where(labels == -100, 0.0, torch.rand(2, 20, generator=generator)).flatten()
    offsets = torch.tensor([0, 1, 7, 20, 33, 40, 40, 40], dtype=torch.int32)
    nats, counts = sum_by_piece(by_label, labels, offsets)
    for piece, (low, high) in enumerate(pairwise(offsets.tolist())):
        assert float(nats[piece]) == by_label[low:high].double().sum()
        assert int(counts[piece]) == (labels.flatten()[low:high] != -100).sum()


@pytest.mark.parametrize("weights", [None, torch.tensor([[3, 1, 1, 3, 1, 2, 2, 5]])])
@pytest.mark.parametrize("chunked", [False, True])
def test_gradients_in_fp64_equal_differences(chunked: bool, weights: torch.Tensor | None) -> None:
    model = drawn(CONFIG.changed(attention={"qk_norm": "head"}), dtype=torch.float64)
    batch = make_batch([[5, 3]], vocab_size=50)

    def sums(logits, labels, weights):  # type: ignore[no-untyped-def]
        return loss_sums(logits, labels, 1e-4, weights)

    chunks = chunked_loss(sums, 3)

    def loss() -> torch.Tensor:
        def reduce(head, x):  # type: ignore[no-untyped-def]
            if chunked:
                return chunks(head, x, batch.labels, weights)
            return sums(head.logits(x), batch.labels, weights)

        return model(
            batch.input_ids, doc_start=batch.doc_start, positions=batch.positions, reduce=reduce
        ).total

    total = loss()
    assert total.dtype == torch.float64
    total.backward()
    step = 1e-5
    for parameter in (model.norm.weight, next(model.blocks[0].parameters())):
        place = (0,) * parameter.ndim
        with torch.no_grad():
            found = []
            for sign in (1, -1):
                parameter[place] += sign * step
                found.append(loss())
                parameter[place] -= sign * step
        slope = (found[0] - found[1]) / (2 * step)
        # In fp32 the two losses differ by no more than their rounding.
        assert float(parameter.grad[place]) == pytest.approx(float(slope), rel=1e-6, abs=1e-9)


def test_auto_takes_chunks_where_the_logits_would_not_fit() -> None:
    model = DecoderConfig(vocab_size=100_000, d_model=64, n_layers=1, n_heads=1)

    def chosen(microbatch: int, compiling: bool = False, **options: Any) -> LossChoice:
        return LossConfig(**options).choose(model, microbatch=microbatch, compiling=compiling)

    assert chosen(8192).name == "plain"
    assert chosen(8192).chunk_size is None
    assert chosen(8192, compiling=True).name == "compiled"
    large = chosen(16384)  # 100,000 x 16,384 x 10 bytes = 16.4 GB
    assert (large.name, large.chunk_size) == ("chunked", 4096)
    assert large.why == "logits of a micro-batch need 16.4 GB > max_logits_gb 16"
    assert chosen(16384, chunk_size=1024).chunk_size == 1024
    assert chosen(16384, max_logits_gb=20.0).name == "plain"
    assert chosen(8192, max_logits_gb=1.0).name == "chunked"
    assert chosen(16384, name="plain").name == "plain"
    assert not chosen(16384, name="chunked").compiled
    assert chosen(16384, True, name="chunked").compiled


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"name": "chunky"}, "did you mean 'chunked'"),
        ({"name": "plain", "chunk_size": 8}, "has no chunks"),
        ({"name": "chunked", "max_logits_gb": 1.0}, "no effect without name: auto"),
        ({"z_loss_multiplier": 0.0}, "z_loss_multiplier is above 0, not 0.0"),
        ({"name": "linear_cross_entropy", "z_loss_multiplier": 1.0}, "linear_cross_entropy"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        LossConfig(**options)


def test_linear_cross_entropy_is_refused_for_a_soft_cap_and_for_pads() -> None:
    config = LossConfig(name="linear_cross_entropy")
    for model in (MODEL.changed(head={"softcap": 5.0}), replace(MODEL, vocab_multiple=128)):
        with pytest.raises(UsageError, match=r"head\.softcap and no padded"):
            config.choose(model, microbatch=8, compiling=False)
