"""Attention back-ends: the mask says what the definition says, and each back-end agrees with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention_loop import loop_backend
from support.batches import make_batch

from olm_data.errors import UsageError
from olm_train.model.attention import (
    ATTENTION_BACKENDS,
    DocumentLayout,
    attention_backend,
    block_causal_mask,
)

ROWS = [[40, 1, 23], [64], [1, 1, 62]]


@pytest.fixture
def reference() -> Iterator[str]:
    with loop_backend() as name:
        yield name


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_mask_allows_exactly_own_document_at_or_before(lengths: list[int]) -> None:
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    mask = block_causal_mask(make_batch([lengths], vocab_size=2).doc_start)
    assert mask.dtype == torch.bool
    assert mask.shape == (1, 1, len(document), len(document))
    expected = [
        [k <= q and document[k] == document[q] for k in range(len(document))]
        for q in range(len(document))
    ]
    assert mask[0, 0].tolist() == expected


@pytest.mark.parametrize("name", sorted(ATTENTION_BACKENDS))
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_backend_agrees_with_documents_attended_one_by_one(
    name: str, kv_heads: int, reference: str
) -> None:
    batch = make_batch(ROWS, vocab_size=2)
    layout = DocumentLayout(batch.doc_start, batch.cu_seqlens, batch.max_seqlen)
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 64, heads, 16) for heads in (4, kv_heads, kv_heads)]
    given_, out, grads = torch.randn(3, 64, 4, 16, generator=generator), {}, {}
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    for backend_name in (name, reference):
        backend = attention_backend(backend_name)
        leaves = [x.clone().requires_grad_() for x in inputs]
        out[backend_name] = backend.attend(*leaves, backend.prepare(layout))
        grads[backend_name] = torch.autograd.grad(out[backend_name], leaves, given_)
    torch.testing.assert_close(out[name], out[reference], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(grads[name], grads[reference], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_unknown_backend_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError) as refusal:
        attention_backend("spda")
    assert "sdpa" in str(refusal.value)
