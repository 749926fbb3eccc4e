"""Attention back-ends: the mask says what the definition says, and each back-end agrees with it.

`varlen` and `flash` have no kernel on a CPU: here their arguments are checked against a loop with
the kernels' contract, and on a CUDA device the kernels against `sdpa`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.attention_loop import (
    ROWS,
    cpu_backends,
    forward_backward,
    inputs,
    layout_of,
    loop_backend,
)
from support.batches import make_batch
from torch._dynamo.testing import CompileCounter

from olm_data.errors import UsageError
from olm_train.model.attention import ATTENTION_BACKENDS, attention_backend
from olm_train.model.attention_backend import DocumentLayout, Scores, Use
from olm_train.model.attention_dense import DenseDocuments, block_causal_mask

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def reference() -> Iterator[str]:
    with loop_backend() as name:
        yield name


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.none() | st.integers(1, 12))
def test_mask_allows_exactly_the_windows_keys_of_the_own_document(
    lengths: list[int], window: int | None
) -> None:
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    mask = block_causal_mask(make_batch([lengths], vocab_size=2).doc_start, window)
    assert mask.dtype == torch.bool
    assert mask.shape == (1, 1, len(document), len(document))
    reach = window or len(document)
    expected = [
        [q - reach < k <= q and document[k] == document[q] for k in range(len(document))]
        for q in range(len(document))
    ]
    assert mask[0, 0].tolist() == expected


@pytest.mark.parametrize("name", cpu_backends(training=True))
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_backend_agrees_with_documents_attended_one_by_one(
    name: str, kv_heads: int, reference: str
) -> None:
    layout = layout_of(make_batch(ROWS, vocab_size=2))
    ours, theirs = (
        forward_backward(attention_backend(each), layout, inputs(kv_heads), None)
        for each in (name, reference)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_math_in_bf16_is_as_near_to_fp32_as_sdpa(
    kv_heads: int, window: int | None, softcap: float | None
) -> None:
    layout = layout_of(make_batch(ROWS, vocab_size=2))
    scores = Scores(scale=0.3, softcap=softcap)

    def error(name: str) -> float:
        exact, rounded = (
            forward_backward(
                attention_backend(each), layout, inputs(kv_heads, dtype=dtype), window, scores
            )
            for each, dtype in (("sdpa", torch.float32), (name, torch.bfloat16))
        )
        return max(
            ((one.float() - other).norm() / other.norm()).item()
            for one, other in zip(rounded, exact, strict=True)
        )

    assert error("math") < 1e-2
    assert error("math") < 2 * error("sdpa")


LONG = [[200, 56], [20, 236], [100, 90, 66]]


@pytest.mark.parametrize("window", [None, 80])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_documents_one_by_one_are_the_rows_under_their_mask(
    kv_heads: int, window: int | None, softcap: float | None
) -> None:
    layout = layout_of(make_batch(LONG, vocab_size=2))
    sdpa, scores = ATTENTION_BACKENDS["sdpa"], Scores(scale=0.3, softcap=softcap)
    masked = replace(sdpa, prepare=lambda each: block_causal_mask(each.doc_start, each.window))
    assert isinstance(sdpa.prepare(layout), DenseDocuments)
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(3, 256, heads, 16, generator=generator) for heads in (4, *[kv_heads] * 2)]
    ours, theirs = (
        forward_backward(each, layout, drawn, window, scores) for each in (sdpa, masked)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=4e-6)


def test_many_short_documents_are_attended_at_once() -> None:
    prepare = ATTENTION_BACKENDS["sdpa"].prepare
    assert isinstance(prepare(layout_of(make_batch(ROWS, vocab_size=2))), torch.Tensor)
    assert isinstance(prepare(layout_of(make_batch([[8] * 32], vocab_size=2))), torch.Tensor)


def test_compiled_attention_is_not_compiled_anew_for_other_documents() -> None:
    sdpa, counter = ATTENTION_BACKENDS["sdpa"], CompileCounter()
    compiled = torch.compile(sdpa.attend, backend=counter, fullgraph=True, dynamic=False)
    for lengths in LONG:
        context = sdpa.prepare(layout_of(make_batch([lengths] * 3, vocab_size=2)))
        drawn = [torch.randn(3, 256, 2, 16) for _ in range(3)]
        expected = sdpa.attend(*drawn, context, Scores())
        torch.testing.assert_close(compiled(*drawn, context, Scores()), expected)
    assert counter.frame_count == 1


def test_math_of_whole_rows_is_causal() -> None:
    layout = DocumentLayout.whole_rows(2, 12, CPU)
    drawn = [each[:2, :12] for each in inputs(2)]
    ours, theirs = (
        forward_backward(attention_backend(name), layout, drawn, None) for name in ("math", "sdpa")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


# The signatures of torch's varlen_attn, with the contract each documents.


def test_unknown_backend_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="sdpa"):
        attention_backend("spda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", ["varlen", "flex", "flash"])
def test_gpu_backend_agrees_with_sdpa(name: str, kv_heads: int, window: int | None) -> None:
    backend = attention_backend(name)
    refusal = backend.refusal(Use(CUDA, torch.bfloat16, 16, True))
    if refusal is not None:
        pytest.skip(refusal.why)
    layout = layout_of(make_batch(ROWS, vocab_size=2).to(CUDA))
    ours = forward_backward(
        backend, layout, inputs(kv_heads, device=CUDA, dtype=torch.bfloat16), window
    )
    sdpa = forward_backward(
        attention_backend("sdpa"), layout, inputs(kv_heads, device=CUDA), window
    )
    for one, other in zip(ours, sdpa, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_no_call_has_a_mask_and_grouped_heads(
    kv_heads: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 12, heads, 8) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    mask = block_causal_mask(torch.tensor([[0] * 5 + [5] * 7] * 2)) if masked else None
    plain, calls = F.scaled_dot_product_attention, []

    def recorded(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        heads = [tensor.shape[1] for tensor in tensors]
        calls.append((len(set(heads)) > 1 or options["enable_gqa"], options["attn_mask"]))
        return plain(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    out = ATTENTION_BACKENDS["sdpa"].attend(q, k, v, mask, Scores())
    ((grouped, given),) = calls
    assert grouped == (kv_heads < 4 and not masked)
    assert given is mask
    expected = plain(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        attn_mask=mask, is_causal=mask is None, enable_gqa=True,
    ).transpose(1, 2)  # fmt: skip
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, generator=generator)
    found = torch.autograd.grad((out * weights).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
