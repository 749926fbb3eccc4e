"""The decoder: documents are isolated, options have their effect; and what looks into it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import make_batch
from support.model_options import CONFIG, OPTIONS, PADDED, drawn, stirred
from support.plain_decoder import plain_logits
from support.training import MODEL
from torch import nn

from olm_train.model.decoder import Decoder
from olm_train.model.loss import count_valid, loss_sums
from olm_train.model.tap import NO_TAP, ROW, Watcher, names_within, row_of


@settings(max_examples=20)
@given(st.lists(st.integers(2, 20), min_size=1, max_size=5), st.integers(0, 100))
def test_packed_loss_is_the_token_weighted_loss_of_the_documents_alone(
    lengths: list[int], seed: int
) -> None:
    model = drawn(CONFIG)
    batch = make_batch([lengths], vocab_size=50, seed=seed)
    with torch.no_grad():
        logits = model(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
        packed = loss_sums(logits, batch.labels, None).total / count_valid(batch.labels)
        alone = torch.zeros((), dtype=torch.float64)
        for start, length in zip(
            [sum(lengths[:i]) for i in range(len(lengths))], lengths, strict=True
        ):
            ids, labels = (x[:, start : start + length] for x in (batch.input_ids, batch.labels))
            alone += loss_sums(model(ids), labels, None).total
    assert abs(packed - alone / count_valid(batch.labels)) < 1e-6


@pytest.mark.parametrize("shift_keys", [False, True])
def test_no_gradient_flows_from_one_document_to_another(shift_keys: bool) -> None:
    model = drawn(CONFIG.changed(attention={"shift_keys": shift_keys}))
    batch = make_batch([[20, 12, 16]], vocab_size=50)
    embedded: list[torch.Tensor] = []
    model.embeddings.register_forward_hook(
        lambda _module, _args, output: (output.retain_grad(), embedded.append(output))[1]
    )
    logits = model(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
    loss_sums(logits[:, 20:32], batch.labels[:, 20:32], None).total.backward()
    gradient = embedded[0].grad
    assert gradient[:, 20:31].abs().sum(-1).min() > 0  # position 31 has no label after it
    assert (gradient[:, :20] == 0).all()
    assert (gradient[:, 32:] == 0).all()


CENTRED = {"norm": {"zero_centred": True}}


@pytest.mark.parametrize("change", [{}, CENTRED, *OPTIONS, *PADDED], ids=str)
def test_logits_are_those_of_the_formulas_for_each_document_alone(change: dict[str, Any]) -> None:
    """And no option is without effect."""
    config = CONFIG.changed(**change)
    model = stirred(config)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    batch = make_batch([[21, 1, 10], [2, 30]], vocab_size=50)
    with torch.no_grad():
        packed = model(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
        assert packed.shape == (2, 32, 50)
        for row, start, end in [(0, 0, 21), (0, 21, 22), (0, 22, 32), (1, 0, 2), (1, 2, 32)]:
            ids = batch.input_ids[row, start:end]
            expected = plain_logits(config, weights, ids.tolist()).float()
            torch.testing.assert_close(packed[row, start:end], expected, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(model(ids[None])[0], expected, rtol=1e-4, atol=2e-6)
        if change in OPTIONS:
            assert not torch.equal(model(ids[None]), stirred(CONFIG)(ids[None]))


@pytest.mark.parametrize("change", PADDED, ids=str)
def test_rows_that_pad_the_vocabulary_change_nothing_and_stay_zeros(change: dict[str, Any]) -> None:
    config = CONFIG.changed(**change)
    model, plain = drawn(config), drawn(replace(config, vocab_multiple=1))
    batch = make_batch([[20, 12]], vocab_size=50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for one in (model, plain):
        logits = one(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
        loss_sums(logits, batch.labels, None).total.backward()
    others = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        real = len(others[name])
        assert torch.equal(parameter[:real], others[name])
        torch.testing.assert_close(parameter.grad[:real], others[name].grad, rtol=1e-5, atol=1e-5)
        assert not parameter.grad[real:].any()
    optimizer.step()
    for table in {model.embeddings.weight, getattr(model.lm_head, "weight", None)} - {None}:
        assert len(table) == config.padded_vocab_size > 50
        assert not table[50:].any()


def test_rotary_positions_are_relative() -> None:
    model = drawn(CONFIG)
    ids = make_batch([[16]], vocab_size=50).input_ids
    positions = torch.arange(16)[None]
    with torch.no_grad():
        shifted = model(ids, positions=positions + 100)
        torch.testing.assert_close(shifted, model(ids, positions=positions), rtol=1e-4, atol=1e-5)
        stretched = model(ids, positions=positions * 3)
    assert not torch.allclose(shifted, stretched, atol=1e-4)


def test_compute_dtype_reaches_the_logits_and_leaves_the_weights() -> None:
    model = drawn(CONFIG)
    batch = make_batch([[20, 12]], vocab_size=50)
    full = model(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
    model.compute_dtype = torch.bfloat16
    logits = model(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
    assert logits.dtype == torch.bfloat16
    loss_sums(logits, batch.labels, None).total.backward()
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad.dtype == torch.float32
    torch.testing.assert_close(logits.float(), full, rtol=0.05, atol=0.02)


def test_a_row_counts_means_and_variances_within_rows_of_the_batch() -> None:
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1))
    each = x.flatten(1)
    wanted = torch.stack([torch.tensor(3.0), each.mean(1).sum(), each.var(1).sum(), x.abs().max()])
    torch.testing.assert_close(row_of(x), wanted)


def test_a_watcher_passes_all_on_and_keeps_rows_and_gradients_of_its_names() -> None:
    slots = torch.zeros(2, ROW, requires_grad=True)
    watcher = Watcher(("", "inner.w"), slots)
    x = torch.randn(2, 3, requires_grad=True)
    y = watcher.within("inner")("w", x * 2)
    assert watcher("other", y) is y
    z = watcher("", y * 3)
    assert torch.equal(z, x * 6)
    z.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 6))
    assert torch.equal(slots.grad[:, 3], torch.tensor([1.0, 3.0]))
    assert torch.equal(torch.stack(watcher.rows)[1], row_of(x.detach() * 2))


def test_no_tap_does_nothing() -> None:
    x = torch.ones(1)
    assert NO_TAP.within("a")("b", x) is x


def test_names_are_those_of_modules_that_compute_something() -> None:
    block = Decoder(MODEL, device="meta").blocks[0]
    names = names_within(block)
    assert names[0] == ""
    assert "attention.w_qkv" in names
    gone = {n for n, each in block.named_modules() if isinstance(each, nn.Identity)}
    assert gone
    assert not gone & set(names)
