"""The kernels of variable-length attention: what they are given, and which ones are known.

They run on no CPU: here their arguments are checked against a loop with their contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_loop import ROWS, forward_backward, inputs, layout_of, varlen_loop
from support.batches import make_batch
from torch._subclasses.fake_tensor import FakeTensorMode

from olm_data.errors import UsageError
from olm_train.model.attention import ATTENTION_BACKENDS, attention_backend
from olm_train.model.attention_backend import AttentionBackend, DocumentLayout, Queries, Scores, Use
from olm_train.model.attention_varlen import (
    Offsets,
    flash_kernel,
    flash_module,
    kernel_backend,
    varlen_kernel,
)
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters

CUDA = torch.device("cuda")


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
        out = varlen_kernel(varlen_attn)(q, k, v, Offsets(offsets, 32, window), Scores(0.3))
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
        model = Decoder(config.changed(attention={"backend": name}))
        init_parameters(model, seed=3)
        for layout in ({"doc_start": batch.doc_start, "cu_seqlens": batch.cu_seqlens}, {}):
            logits.append(model(batch.input_ids, **layout).detach())
    torch.testing.assert_close(logits[2:], logits[:2], rtol=1e-4, atol=1e-5)


def test_flash_is_refused_where_it_is_not_installed() -> None:
    if flash_module() is not None:
        pytest.skip("a flash-attn package is installed")
    use = Use(CUDA, torch.bfloat16, 64, True)
    with pytest.raises(UsageError, match="flash cannot run here") as refusal:
        attention_backend("flash").require("flash", use)
    assert "installed" in str(refusal.value.why)


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
