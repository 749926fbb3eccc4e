"""A model and the texts it is writing: which ids go through it, and how often.

CachedRunner     prompts once, packed, a long one in parts; then one token of each text a call
WholeRunner      all texts, packed, at each call: what a cache has to agree with
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from olm_train.extensions.generate.cache import KVCache
from olm_train.model.attention import Attention
from olm_train.model.block import Block
from olm_train.model.decoder import Decoder
from olm_train.model.feed_forward import FeedForward, GatedFeedForward
from olm_train.model.head import Head
from olm_train.model.mixture import MixtureOfExperts

CHUNK = 1024
"""Tokens of a long prompt that go through the model at a time."""

Read = Callable[[Head, Tensor], Any]
"""What is made of the head and the normalised states [n, d_model] of one text."""


class TextRunner(ABC):
    """Texts in rows, and the logits of the token after each.

    Args:
        decoder: the model, whole or sharded; inside DDP the module that it wraps.
        device: where it computes.
    """

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self._decoder, self._device = decoder, device

    @abstractmethod
    def prefill(
        self, prompts: Sequence[Sequence[int]], reads: Sequence[Read | None] = ()
    ) -> tuple[Tensor, list[Any]]:
        """Add rows at the end.

        Args:
            prompts: ids of each, at least one.
            reads: what to make of the states of all tokens of a prompt; None: nothing.

        Returns:
            Logits [n, V] of the token after each prompt, and what was read.
        """

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Add a token to each row; return logits [R, V] of the next."""

    @abstractmethod
    def remove(self, row: int) -> None:
        """Forget a row; the last one takes its place."""

    def idle(self) -> None:
        """Call the model for nothing: ranks that hold parts of its weights call it together."""
        self._packed([[0]])

    def _packed(
        self,
        texts: Sequence[Sequence[int]],
        reads: Sequence[Read | None] = (),
        keep: KVCache | None = None,
    ) -> tuple[Tensor, list[Any]]:
        """Call the model on texts in one row, each a document of its own."""
        lengths = [len(text) for text in texts]
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        device = self._device
        ids = torch.tensor([[i for text in texts for i in text]], device=device)  # [1, T]
        layout: dict[str, Any] = {}
        if len(texts) > 1:
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            layout["doc_start"] = (torch.arange(offsets[-1])[None] - positions).to(device)
            layout["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32, device=device)
            layout["max_seqlen"] = max(lengths)
            contexts = self._decoder.contexts(ids, **layout)
            layout["positions"] = positions.to(device)
        else:
            contexts = self._decoder.contexts(ids)
        if keep is not None:
            layout["contexts"] = keep.prefill(lengths, contexts)
        ends = torch.tensor(offsets[1:], device=device) - 1

        def reduce(head: Head, x: Tensor) -> tuple[Tensor, list[Any]]:
            found = [
                None if read is None else read(head, x[0, begin : begin + length])
                for read, begin, length in zip(reads, offsets, lengths, strict=False)
            ]
            return head.logits(x[0, ends]), found  # [n, V]

        logits, found = self._decoder(ids, **layout, reduce=reduce)
        return logits, found


class CachedRunner(TextRunner):
    """Each token goes through the model once.

    Args:
        decoder, device: see `TextRunner`.
        chunk: tokens of a prompt that go through it at a time, where the prompt is alone: memory
            grows with a prompt's length and not with its square. None: each prompt in one call.
    """

    def __init__(self, decoder: Decoder, device: torch.device, chunk: int | None = CHUNK) -> None:
        super().__init__(decoder, device)
        self._cache, self._chunk = KVCache(decoder.config.windows, device), chunk

    def prefill(
        self, prompts: Sequence[Sequence[int]], reads: Sequence[Read | None] = ()
    ) -> tuple[Tensor, list[Any]]:
        if self._chunk is None or len(prompts) > 1 or len(prompts[0]) <= self._chunk:
            return self._packed(prompts, reads, self._cache)
        return self._in_chunks(prompts[0], reads[0] if reads else None, self._chunk)

    def _in_chunks(
        self, prompt: Sequence[int], read: Read | None, chunk: int
    ) -> tuple[Tensor, list[Any]]:
        states: list[Tensor] = []  # of all tokens, where they are read: [n, d_model] each

        def keep(head: Head, x: Tensor) -> None:
            states.append(x)

        self._packed([prompt[:chunk]], [keep if read else None], self._cache)
        for begin in range(chunk, len(prompt), chunk):
            part = prompt[begin : begin + chunk]
            last = begin + chunk >= len(prompt)

            def reduce(head: Head, x: Tensor, last: bool = last) -> tuple[Tensor, list[Any]]:
                if read:
                    states.append(x[0])
                found = read(head, torch.cat(states)) if read and last else None
                return head.logits(x[0, -1:]), [found]  # [1, V]

            logits, found = self._decoder(
                torch.tensor([part], device=self._device),  # [1, n]
                positions=torch.arange(begin, begin + len(part), device=self._device)[None],
                contexts=self._cache.extend(len(part)),
                reduce=reduce,
            )
        return logits, found

    def decode(self, tokens: Sequence[int]) -> Tensor:
        positions = torch.tensor(self._cache.lengths, device=self._device)[:, None]
        logits: Tensor = self._decoder(
            torch.tensor(tokens, device=self._device)[:, None],  # [R, 1]
            positions=positions,
            contexts=self._cache.decode(),
            reduce=lambda head, x: head.logits(x[:, 0]),
        )
        return logits

    def remove(self, row: int) -> None:
        self._cache.remove(row)


class WholeRunner(TextRunner):
    """All tokens go through the model for each new one: for models that a cache does not know."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        super().__init__(decoder, device)
        self._texts: list[list[int]] = []

    def prefill(
        self, prompts: Sequence[Sequence[int]], reads: Sequence[Read | None] = ()
    ) -> tuple[Tensor, list[Any]]:
        self._texts += map(list, prompts)
        return self._packed(prompts, reads)

    def decode(self, tokens: Sequence[int]) -> Tensor:
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(token)
        return self._packed(self._texts)[0]

    def remove(self, row: int) -> None:
        self._texts[row] = self._texts[-1]
        del self._texts[-1]


def runner_of(decoder: Decoder, device: torch.device, chunk: int | None = CHUNK) -> TextRunner:
    """Return the runner for a model: with a cache, unless its forward functions are its own.

    Args:
        decoder, device: see `TextRunner`.
        chunk: see `CachedRunner`.
    """
    if knows_cache(decoder):
        return CachedRunner(decoder, device, chunk)
    return WholeRunner(decoder, device)


def knows_cache(decoder: Decoder) -> bool:
    """Whether all that could mix the tokens of this decoder is ours, so that a cache is enough."""
    return type(decoder).forward is Decoder.forward and all(map(_known, decoder.blocks))


TOKEN_BY_TOKEN = (GatedFeedForward.forward, FeedForward.forward, MixtureOfExperts.forward)


def _known(block: nn.Module) -> bool:
    return (
        isinstance(block, Block)
        and type(block).forward is Block.forward
        and type(block.attention).forward is Attention.forward
        and type(block.feed_forward).forward in TOKEN_BY_TOKEN
    )
