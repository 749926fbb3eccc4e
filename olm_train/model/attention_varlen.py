"""Attention by kernels that take the offsets of the documents and no mask: `varlen` and `flash`.

    q, k, v [b,S,heads,D] -> flatten to [b*S,heads,D] -> kernel(cu_seqlens, max_seqlen) -> unflatten

`varlen` is `torch.nn.attention.varlen.varlen_attn`, FlashAttention 2 inside torch. `flash` is the
separate flash-attn package: version 3 (`flash_attn_interface`) if it is installed, else version 2
(`flash_attn`). All of them are FlashAttention (Dao, 2023): CUDA, 16-bit types, heads up to 256.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from olm_data.errors import UsageError
from olm_train.model.attention_backend import (
    MAX_DOCUMENTS,
    AttentionBackend,
    BackendRefusal,
    DocumentLayout,
    Queries,
    Scores,
    Use,
)

Kernel = Callable[[Tensor, Tensor, Tensor, "Offsets", Scores], Tensor]
"""(q [T,H,D], k, v [T,K,D], cu_seqlens int32 [n], max_seqlen, window, scores) -> [T,H,D]."""

MAX_HEAD_DIM = 256


class Offsets(NamedTuple):
    """The context of a layer: the documents' offsets, the layer's window in tokens, the kernel.

    The kernel is looked up here, outside the blocks: compiled, they could not look at signatures.
    `cu_keys` are the offsets of the keys, with at most `max_keys` for a document: its last query
    sees its last key.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    cu_keys: Tensor
    max_keys: int
    window: int | None
    kernel: Kernel

    @property
    def reach(self) -> tuple[int, int]:
        """Tokens before and after a query that its keys may lie at; -1: any number before it."""
        return (-1 if self.window is None else self.window - 1, 0)


def varlen_kernel(varlen_attn: Callable[..., Any]) -> Kernel:
    """Give torch's `varlen_attn` the common signature."""

    def attend(q: Tensor, k: Tensor, v: Tensor, at: Offsets, scores: Scores) -> Tensor:
        assert scores.softcap is None, "refused before"
        options = {"scale": scores.scale, "enable_gqa": q.shape[1] != k.shape[1]}
        ends = (at.cu_seqlens, at.cu_keys, at.max_seqlen, at.max_keys)
        return varlen_attn(q, k, v, *ends, window_size=at.reach, **options)

    return attend


def flash_kernel(flash_attn_varlen_func: Callable[..., Any]) -> Kernel:
    """Give flash-attn's function the common signature.

    Versions 2 and 3 name these arguments alike; early ones of version 3 return (out, lse).
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, at: Offsets, scores: Scores) -> Tensor:
        capped = {} if scores.softcap is None else {"softcap": scores.softcap}
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=at.cu_seqlens,
            cu_seqlens_k=at.cu_keys,
            max_seqlen_q=at.max_seqlen,
            max_seqlen_k=at.max_keys,
            softmax_scale=scores.scale,
            causal=True,
            window_size=at.reach,
            **capped,
        )
        return out[0] if isinstance(out, tuple) else out

    return attend


class Chunks(NamedTuple):
    """The context of a rank that has some chunks of a micro-batch, and all its keys.

    Attributes:
        of_chunks: the offsets of each chunk of c queries.
        spans: int [k, 2], first and one past the last of the keys that each chunk sees.
    """

    of_chunks: list[Offsets]
    spans: Tensor

    @classmethod
    def of(cls, queries: Queries, whole: Offsets) -> Chunks:
        """Cut the offsets of a micro-batch at the ends of each chunk.

        Keys count from where the document of its first token begins: of a document of which a chunk
        has a part in the middle, the keys end with the last of the queries.
        """
        ends, size = whole.cu_seqlens, queries.places.shape[1]
        starts = queries.places[:, 0].to(ends.dtype)
        spans = torch.stack([queries.begins[:, 0].to(ends.dtype), starts + size], dim=1)
        chunks = [
            whole._replace(
                cu_seqlens=(ends - start).clamp(0, size),
                max_seqlen=min(size, whole.max_seqlen),
                cu_keys=torch.clamp(ends, min=span[0], max=span[1]),
            )
            for start, span in zip(starts, spans, strict=True)
        ]
        return cls(chunks, spans)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """q [k c, H, D], k and v [T, K, D] -> [k c, H, D], a call of the kernel for each chunk."""
        parts = q.chunk(len(self.of_chunks))
        out = []
        for part, at, span in zip(parts, self.of_chunks, self.spans, strict=True):
            keys, values = (_Within.apply(x, span) for x in (k, v))  # type: ignore[no-untyped-call]
            out.append(at.kernel(part, keys, values, at, scores))
        return torch.cat(out)


class _Within(torch.autograd.Function):
    """Rows [T, ...] of which a kernel reads some: the gradient of the others, which it does not
    write, is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, span: Tensor) -> Tensor:
        ctx.save_for_backward(span)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (span,), (gradient,) = ctx.saved_tensors, upstream
        place = torch.arange(gradient.shape[0], device=gradient.device)
        read = (place >= span[0]) & (place < span[1])
        return torch.where(read.view(-1, *[1] * (gradient.dim() - 1)), gradient, 0), None


def kernel_backend(
    load: Callable[[], Kernel],
    unavailable: Callable[[], BackendRefusal | None],
    uncapped: Callable[[], BackendRefusal | None] = lambda: None,
) -> AttentionBackend:
    """A back-end around a kernel that is loaded when it is first used.

    Args:
        load: the kernel; called for each micro-batch, so cached.
        unavailable: why this installation has no such kernel, None: it has one.
        uncapped: why this one has no soft cap, None: it has.
    """

    def prepare(layout: DocumentLayout) -> Offsets | Chunks:
        cu_seqlens, max_seqlen = layout.offsets()
        if len(cu_seqlens) - 1 > MAX_DOCUMENTS:
            raise UsageError(
                f"a micro-batch has more than {MAX_DOCUMENTS:,} documents, the most that attention "
                "kernels without a mask take at once",
                where="train_module.rank_microbatch_size",
                why="a launch with more blocks than a grid may have fails",
                fix="lower it: the global batch stays what it is; or set model.attention=flex",
            )
        ends = (cu_seqlens, max_seqlen)
        whole = Offsets(*ends, *ends, layout.window, load())
        return whole if layout.queries is None else Chunks.of(layout.queries, whole)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, context: Offsets | Chunks, scores: Scores
    ) -> Tensor:
        q_flat, k_flat, v_flat = (x.flatten(0, 1) for x in (q, k, v))  # [b * S, heads, D]
        if isinstance(context, Chunks):
            out = context.attend(q_flat, k_flat, v_flat, scores)
        else:
            out = context.kernel(q_flat, k_flat, v_flat, context, scores)
        return out.unflatten(0, q.shape[:2])  # [b, S, H, D]

    def refusal(use: Use) -> BackendRefusal | None:
        return unavailable() or (uncapped() if use.softcap else None) or kernel_refusal(use)

    return AttentionBackend(prepare, attend, refusal)


def kernel_refusal(use: Use) -> BackendRefusal | None:
    """Why FlashAttention kernels cannot do this, whichever package they come from."""
    if use.device.type != "cuda":
        return BackendRefusal(
            f"its kernels need a CUDA device, this is {use.device.type}", "use sdpa"
        )
    if use.dtype not in (torch.bfloat16, torch.float16):
        return BackendRefusal(
            f"its kernels compute in 16 bits, not in {str(use.dtype).removeprefix('torch.')}",
            "set train_module.dp_config.param_dtype=bfloat16, or use sdpa",
        )
    if use.head_dim > MAX_HEAD_DIM or use.head_dim % 8:
        return BackendRefusal(
            f"heads of {use.head_dim}: its kernels take multiples of 8 up to {MAX_HEAD_DIM}",
            "change model.head_dim, or use flex",
        )
    return None


@cache
def _torch_kernel() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_kernel(varlen_attn)


def flash_module() -> str | None:
    """The installed module of the flash-attn package, the newer one first; None: there is none."""
    for name in ("flash_attn_interface", "flash_attn"):
        if importlib.util.find_spec(name) is not None:
            return name
    return None


def _flash_function() -> Callable[..., Any]:
    name = flash_module()
    assert name is not None, "refused before"
    return importlib.import_module(name).flash_attn_varlen_func


@cache
def _flash_kernel() -> Kernel:
    return flash_kernel(_flash_function())


def _no_flash() -> BackendRefusal | None:
    if flash_module() is not None:
        return None
    return BackendRefusal(
        "neither flash_attn_interface (version 3) nor flash_attn (version 2) is installed",
        "use varlen, which is FlashAttention 2 inside torch, or install flash-attn",
    )


def _no_cap_in_torch() -> BackendRefusal:
    return BackendRefusal(
        "torch's varlen_attn has no soft cap of attention (model.attention.softcap)",
        "use flex, or flash with the package flash-attn",
    )


def _no_cap_in_flash() -> BackendRefusal | None:
    if "softcap" in inspect.signature(_flash_function()).parameters:
        return None
    return BackendRefusal(
        "this version of flash-attn has no soft cap of attention (model.attention.softcap)",
        "install flash-attn 2.6 or later, or use flex",
    )


VARLEN = kernel_backend(_torch_kernel, lambda: None, _no_cap_in_torch)
FLASH = kernel_backend(_flash_kernel, _no_flash, _no_cap_in_flash)
