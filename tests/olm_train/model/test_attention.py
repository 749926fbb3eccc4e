"""Attention within documents, by every back-end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    varlen_loop,
)
from support.batches import make_batch
from support.model_options import drawn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from olm_data.errors import UsageError
from olm_train.model.attention import ATTENTION_BACKENDS, attention_backend
from olm_train.model.attention_backend import AttentionBackend, DocumentLayout, Queries, Scores, Use
from olm_train.model.attention_dense import DenseDocuments, block_causal_mask
from olm_train.model.attention_varlen import (
    Offsets,
    flash_kernel,
    flash_module,
    kernel_backend,
    varlen_kernel,
)
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder

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
    qkv = [torch.randn(3, 256, heads, 16, generator=generator) for heads in (4, *[kv_heads] * 2)]
    ours, theirs = (forward_backward(each, layout, qkv, window, scores) for each in (sdpa, masked))
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
        given_ = [torch.randn(3, 256, 2, 16) for _ in range(3)]
        expected = sdpa.attend(*given_, context, Scores())
        torch.testing.assert_close(compiled(*given_, context, Scores()), expected)
    assert counter.frame_count == 1


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


@pytest.mark.parametrize(
    ("name", "use", "why"),
    [
        ("varlen", Use(CPU, torch.bfloat16, 64, False), "need a CUDA device"),
        ("varlen", Use(CUDA, torch.float32, 64, True), "16 bits, not in float32"),
        ("varlen", Use(CUDA, torch.bfloat16, 320, True), "up to 256"),
        ("varlen", Use(CUDA, torch.bfloat16, 20, True), "multiples of 8"),
        ("varlen", Use(CUDA, torch.bfloat16, 64, True, True), "no soft cap"),
        ("flex", Use(CPU, torch.float32, 64, True), "no backward pass on cpu"),
        pytest.param(
            *("flash", Use(CUDA, torch.bfloat16, 64, True), "installed"),
            marks=pytest.mark.skipif(flash_module() is not None, reason="flash-attn is installed"),
        ),
    ],
)
def test_a_backend_that_cannot_run_says_why(name: str, use: Use, why: str) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot run here") as refusal:
        attention_backend(name).require(name, use)
    assert why in str(refusal.value.why)
    assert refusal.value.fix


def test_a_decoder_refuses_before_it_computes_and_takes_no_other_backend() -> None:
    config = DecoderConfig(
        vocab_size=64, d_model=32, n_layers=1, n_heads=4, attention={"backend": "varlen"}
    )
    model = Decoder(config)
    with pytest.raises(UsageError, match="varlen cannot run here"):
        model(make_batch(ROWS, vocab_size=64).input_ids)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("window", "scores"),
    [(None, Scores()), (7, Scores(0.4)), (None, Scores(None, 0.7)), (7, Scores(0.4, 0.7))],
)
@pytest.mark.parametrize("name", cpu_backends(training=False))
def test_backend_agrees_with_a_loop_over_queries(
    name: str, window: int | None, scores: Scores
) -> None:
    batch, backend = make_batch(ROWS, vocab_size=2), attention_backend(name)
    left = -1 if window is None else window - 1
    whole = DocumentLayout.whole_rows(3, 64, CPU)
    if window is not None:
        whole = whole._replace(doc_start=torch.zeros(3, 64, dtype=torch.int32))
    for layout in (layout_of(batch), whole):
        q, k, v = inputs(2)
        out = backend.attend(q, k, v, backend.prepare(layout._replace(window=window)), scores)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        expected = varlen_loop(*flat, *layout.offsets(), left, scores).view(out.shape)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


# The signatures of torch's varlen_attn and of flash-attn, with the contract each documents.


def varlen_attn(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
    *, return_aux: Any = None, scale: Any = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Any = None, block_table: Any = None,
    num_splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    assert enable_gqa is (query.shape[1] != key.shape[1])
    assert window_size[1] == 0
    assert cu_seq_q is cu_seq_k
    assert max_q == max_k
    return varlen_loop(query, key, value, cu_seq_q, max_q, window_size[0], Scores(scale))


def flash_attn(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    assert causal
    assert window_size[1] == 0
    assert cu_seqlens_q is cu_seqlens_k
    assert max_seqlen_q == max_seqlen_k
    scores = Scores(softmax_scale, softcap or None)
    return varlen_loop(q, k, v, cu_seqlens_q, max_seqlen_q, window_size[0], scores)


def flash_attn_3(*args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    return flash_attn(*args, **options), None


def on_cpu(adapter: Callable[..., Any], function: Callable[..., Any]) -> AttentionBackend:
    """The back-end around a kernel that runs here."""
    kernel = adapter(function)
    return replace(kernel_backend(lambda: kernel, lambda: None), refusal=lambda use: None)


KERNELS = {
    function.__name__: on_cpu(adapter, function)
    for adapter, function in [
        (varlen_kernel, varlen_attn),
        (flash_kernel, flash_attn),
        (flash_kernel, flash_attn_3),
    ]
}


@pytest.mark.parametrize(
    ("kv_heads", "window", "scores"),
    [(4, None, Scores()), (2, 7, Scores()), (2, None, Scores(0.4)), (4, 7, Scores(None, 0.7))],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_are_given_what_makes_them_agree_with_sdpa(
    kernel: str, window: int | None, kv_heads: int, scores: Scores
) -> None:
    if scores.softcap and not kernel.startswith("flash"):
        return  # refused: torch's has none
    layout = layout_of(make_batch(ROWS, vocab_size=2))
    ours, sdpa = (
        forward_backward(backend, layout, inputs(kv_heads), window, scores)
        for backend in (KERNELS[kernel], attention_backend("sdpa"))
    )
    torch.testing.assert_close(ours, sdpa, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_installed_varlen_attn_takes_what_it_is_given_forward_and_backward(
    kv_heads: int, window: int | None
) -> None:
    """On tensors without data: torch's own operator checks arguments, shapes and gradients."""
    from torch.nn.attention.varlen import varlen_attn

    with FakeTensorMode():
        q, k, v = (
            torch.empty(64, heads, 16, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, kv_heads, kv_heads)
        )
        offsets = torch.empty(9, dtype=torch.int32)
        at = Offsets(offsets, 32, offsets, 32, window, kernel=None)
        out = varlen_kernel(varlen_attn)(q, k, v, at, Scores(0.3))
        assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
        out.sum().backward()
    for leaf in (q, k, v):
        assert leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_decoder_on_a_kernel_gives_the_logits_of_sdpa(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, kernel, KERNELS[kernel])
    batch, logits = make_batch(ROWS, vocab_size=64), []
    for name in ("sdpa", kernel):
        config = DecoderConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2)
        model = drawn(config.changed(attention={"backend": name}), 3)
        for layout in ({"doc_start": batch.doc_start, "cu_seqlens": batch.cu_seqlens}, {}):
            logits.append(model(batch.input_ids, **layout).detach())
    torch.testing.assert_close(logits[2:], logits[:2], rtol=1e-4, atol=1e-5)


def test_a_block_on_varlen_is_one_graph() -> None:
    """Traced without running: a block calls torch's operator, and nothing breaks the graph."""
    config = DecoderConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=4, n_kv_heads=2)
    model = Decoder(config.changed(attention={"backend": "varlen"}), dtype=torch.bfloat16)
    layout = layout_of(make_batch(ROWS, vocab_size=2))
    context = attention_backend("varlen").prepare(layout._replace(window=7))
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return lambda *_: (torch.zeros(3, 64, 32, dtype=torch.bfloat16),)

    block = torch.compile(model.blocks[0], fullgraph=True, backend=backend)
    with torch.no_grad():
        block(torch.zeros(3, 64, 32, dtype=torch.bfloat16), None, context)
    assert sum("_varlen_attn" in name for name in names) == 1


# ---- ranks that have some chunks of a micro-batch ------------------------------------------------


class _Unwritten(torch.autograd.Function):
    """What a kernel does to the gradient of rows that it does not read: any memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        ctx.span = first, last
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        first, last = ctx.span
        gradient = torch.full_like(upstream[0], torch.nan)
        gradient[first:last] = upstream[0][first:last]
        return gradient, None, None


def pieces(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
    *, scale: Any = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The contract with other keys than queries: the last query of a document sees its last key."""
    ends, key_ends, left = cu_seq_q.tolist(), cu_seq_k.tolist(), window_size[0]
    assert (ends[0], ends[-1]) == (0, query.shape[0])
    assert ends == sorted(ends)
    assert key_ends == sorted(key_ends)
    key, value = (_Unwritten.apply(x, key_ends[0], key_ends[-1]) for x in (key, value))
    group, out = query.shape[1] // key.shape[1], []
    for number in range(len(ends) - 1):
        (start, end), (first, last) = ends[number : number + 2], key_ends[number : number + 2]
        assert end - start <= min(max_q, last - first)
        assert last - first <= max_k
        for place in range(start, end):
            own = last - (end - place)  # right-aligned
            low = first if left < 0 else max(first, own - left)
            keys, values = (x[low : own + 1].repeat_interleave(group, dim=1) for x in (key, value))
            products = torch.einsum("hd,nhd->hn", query[place], keys)
            products = products * (scale or query.shape[-1] ** -0.5)
            out.append(torch.einsum("hn,nhd->hd", products.softmax(-1), values))
    return torch.stack(out)


@pytest.mark.parametrize("backend", ["pieces", "math", "flex", "whole rows"])
@pytest.mark.parametrize(
    ("chunks", "window", "kv_heads"),
    [
        ([[0, 3, 4], [1, 2, 5]], None, 2),
        ([[0, 3, 4], [1, 2, 5]], 7, 2),
        ([[0, 1], [2, 3]], 7, 4),
        ([[1], [0]], 1, 2),
    ],
)
def test_a_part_of_the_queries_sees_the_keys_that_they_see_together(
    chunks: list[list[int]], backend: str, kv_heads: int, window: int | None
) -> None:
    rows = [[64]] * 3 if backend == "whole rows" else ROWS
    layout, whole = layout_of(make_batch(rows, vocab_size=2)), attention_backend("sdpa")
    ours = (
        on_cpu(varlen_kernel, pieces)
        if backend in ("pieces", "whole rows")
        else (attention_backend(backend))
    )
    leaves = [x.requires_grad_(backend != "flex") for x in inputs(kv_heads)]
    expected = whole.attend(*leaves, whole.prepare(layout._replace(window=window)), Scores())
    q, k, v = (x.flatten(0, 1) for x in leaves)
    begins = (layout.doc_start + 64 * torch.arange(3)[:, None]).flatten()
    found = torch.empty_like(q)
    size = 192 // sum(map(len, chunks))
    for own in chunks:
        places = torch.tensor(own)[:, None] * size + torch.arange(size)
        queries = Queries(places, begins[places.flatten()].view_as(places), 192)
        context = ours.prepare(
            DocumentLayout(None, layout.cu_seqlens, 64, window=window, queries=queries)
        )
        out = ours.attend(q[places.flatten()][None], k[None], v[None], context, Scores())
        found = found.index_copy(0, places.flatten(), out[0])
    torch.testing.assert_close(found, expected.flatten(0, 1), rtol=1e-5, atol=2e-6)
    if backend != "flex":
        upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
        ours_, theirs = (
            torch.autograd.grad(x, leaves, upstream.view_as(x)) for x in (found, expected)
        )
        torch.testing.assert_close(ours_, theirs, rtol=1e-5, atol=5e-6)


def test_the_installed_varlen_attn_takes_chunks_forward_and_backward() -> None:
    """On tensors without data: torch's own operator checks arguments, shapes and gradients."""
    from torch.nn.attention.varlen import varlen_attn

    own = kernel_backend(lambda: varlen_kernel(varlen_attn), lambda: None)
    with FakeTensorMode():
        q = torch.empty(1, 32, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        k, v = (
            torch.empty(1, 64, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
        )
        places = torch.empty(2, 16, dtype=torch.int64)
        queries = Queries(places, places, 64)
        offsets = torch.empty(9, dtype=torch.int32)
        context = own.prepare(DocumentLayout(None, offsets, 64, window=7, queries=queries))
        out = own.attend(q, k, v, context, Scores())
        assert out.shape == q.shape
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
