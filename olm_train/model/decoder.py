"""A decoder-only transformer: token ids and document layout in, logits out.

    ids -> embeddings -> block * n -> norm -> head -> logits

What stands in each place is a part with a file of its own: `block.py`, `attention.py`,
`feed_forward.py`, `norm.py`, `positions.py`, `head.py`.

A row holds pieces of several documents. Positions restart and attention is cut at each document's
start, so the logits of one document are a function of that document alone.

The decoder neither initialises its weights (`init.py`) nor knows how it is spread over processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from olm_data.model_folder import FolderConfig
from olm_train.model.attention import attention_backend
from olm_train.model.attention_backend import DocumentLayout, Shifted, Use
from olm_train.model.config import DecoderConfig
from olm_train.model.head import Head
from olm_train.model.layers import Embedding
from olm_train.model.mixture import Routed, Routing
from olm_train.model.rope import rope_table
from olm_train.model.tap import NO_TAP
from olm_train.model.weights_folder import save_model


class Decoder(nn.Module):
    """The model, its weights uninitialised; on the device "meta" it allocates nothing.

    Attributes:
        config: its shape.
        compute_dtype: dtype of the residual stream, so of all matrix products; None: that of the
            embedding table. Norm statistics, rotations and the loss are in fp32 in any case.
        tap: looks at the activations outside the blocks.
        make_head: of a matrix, the size of the vocabulary and a softcap.
    """

    def __init__(self, config: DecoderConfig, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.tap = NO_TAP
        self.make_head: Callable[[Tensor, int, float | None], Head] = Head
        self.backend = attention_backend(config.attention.backend)
        self.embeddings = Embedding(config.padded_vocab_size, config.d_model, **factory)
        self.position_embeddings = config.positions.build(config, **factory)
        parts = config.feed_forwards
        self._routes = [part.routes for part in parts]
        self.blocks = nn.ModuleList(config.build_block(part, **factory) for part in parts)
        self.norm = config.norm.build(config.d_model, **factory)
        self.lm_head = config.head.build(config, **factory)
        scaling = config.scaling
        self._scale = scaling.logits
        for name, _ in self.named_parameters():
            scaling.rule(name)  # which refuses one that has none

    def require_attention(
        self, device: torch.device, dtype: torch.dtype, *, training: bool
    ) -> None:
        """Check that the attention back-end can compute in `dtype` on `device`.

        Raises:
            UsageError: it cannot; nothing is computed by another one instead.
        """
        attention, head_dim = self.config.attention, self.config.head_size
        use = Use(device, dtype, head_dim, training, attention.softcap is not None)
        self.backend.require(attention.backend, use)

    def forward(
        self,
        input_ids: Tensor,
        *,
        doc_start: Tensor | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        contexts: Sequence[Any] | None = None,
        routing: Routing | None = None,
        reduce: Callable[[Head, Tensor], Any] = Head.logits,
        layers: range | None = None,
        states: Tensor | None = None,
    ) -> Any:
        """Predict the token after each token.

        Args:
            input_ids: int64 [b, S].
            doc_start: int [b, S], index within the row of the first token of each token's
                document. None: each row is one document.
            positions: int [b, S], distance from the document's first token. None: 0..S-1.
            cu_seqlens: int32 [n], document offsets over the flattened micro-batch; only back-ends
                without a mask read them.
            max_seqlen: upper bound of a document's length, likewise.
            contexts: of each layer's attention, in the place of `self.contexts`: memories of keys.
            routing: what the routers of a mixture of experts are to be told; then they are asked.
            reduce: makes of the head and the normalised states [b, S, d_model] what is returned: a
                loss that never holds all logits. Called inside the forward pass, where FSDP2 has
                the head's weight gathered.
            layers: to pass, those of a stage of a pipeline. None: all.
            states: [b, S, d_model], what the layer before the first of them gave.

        Returns:
            What `reduce` gives; by default logits [b, S, vocab_size] in the compute dtype. Where
            `layers` leave out the last one, states. With `routing` a pair of that and `Routed`,
            each tensor with the layers that have experts in front, [layers, ...]; zeros of those
            left out, None if these are all.

        Raises:
            UsageError: the attention back-end cannot run here.
        """
        config = self.config
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        layers = layers or range(config.n_layers)
        if states is None:
            states = self.tap("embeddings", self._embed(input_ids, positions))
        x = states  # [b, S, d_model]
        ropes = {
            rope: rope and rope_table(positions, config.head_size, *rope, x.dtype)
            for rope in dict.fromkeys(config.ropes)
        }
        self.require_attention(x.device, x.dtype, training=torch.is_grad_enabled())
        if contexts is None:
            contexts = self.contexts(input_ids, doc_start, cu_seqlens, max_seqlen)
        if config.attention.shift_keys:
            place = torch.arange(input_ids.shape[1], device=input_ids.device)
            within = positions if doc_start is None else place - doc_start
            contexts = Shifted.of(contexts, within > 0, config.head_size)
        parts = list(zip(self.blocks, self._routes, config.ropes, contexts, strict=True))
        routed = []
        for block, routes, rope, context in parts[layers.start : layers.stop]:
            if routing is None or not routes:
                x = block(x, ropes[rope], context)
            else:
                x, found = block(x, ropes[rope], context, routing=routing)
                routed.append(found)
        result = x
        if layers.stop == config.n_layers:
            x = self.tap("norm", self.norm(x))
            if self._scale != 1.0:
                x = x * self._scale
            result = reduce(self.head(x.dtype), x)
        if routing is None:
            return result
        if not routed:
            return result, None
        around = sum(self._routes[: layers.start]), sum(self._routes[layers.stop :])
        return result, Routed(*(_padded(each, *around) for each in zip(*routed, strict=True)))

    def contexts(
        self,
        input_ids: Tensor,
        doc_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> list[Any]:
        """Return what each layer's attention needs to know of the documents, as the back-end wants
        it; layers of the same window share it. Arguments as in `forward`."""
        (rows, length), device = input_ids.shape, input_ids.device
        if doc_start is None:
            layout = DocumentLayout.whole_rows(rows, length, device)
            if self.config.attention.sliding_window is not None:
                layout = layout._replace(doc_start=torch.zeros_like(input_ids))
        else:
            layout = DocumentLayout(doc_start, cu_seqlens, max_seqlen or length)
        return self.prepared(layout)

    def prepared(self, layout: DocumentLayout) -> list[Any]:
        """Return what each layer's attention needs to know of a layout."""
        prepared = {
            window: self.backend.prepare(layout._replace(window=window))
            for window in dict.fromkeys(self.config.windows)
        }
        return [prepared[window] for window in self.config.windows]

    def head(self, dtype: torch.dtype) -> Head:
        """The map from normalised states of `dtype` to logits."""
        table = self.embeddings if self.lm_head is None else self.lm_head
        config = self.config
        return self.make_head(table.weight.to(dtype), config.vocab_size, config.head.softcap)

    def save(self, folder: str | os.PathLike[str], tokenizer: object = None) -> FolderConfig:
        """Write the model to a folder: safetensors and JSON, no pickle; `load_model` reads it.

        What the folder held before is replaced in one stroke: a process that is killed here leaves
        the model before or this one. A subclass, or a subclass of its configuration, is recorded
        by its import path.

        Args:
            folder: local or remote; it need not exist.
            tokenizer: saved with it: of the library tokenizers, one of transformers made of it,
                one of `olm_data`, or the path of a tokenizer.json.

        Returns:
            What `config.json` holds.

        Raises:
            UsageError: this process holds only a shard of the weights.
            ResourceError, StorageError: it cannot be written.
        """
        return save_model(self, self.config, folder, tokenizer)

    def emptied(self, config: DecoderConfig) -> dict[str, Tensor]:
        """Take on a shape that differs in what is no weight, on the device "meta", in fp32.

        Returns:
            Parameters and buffers as they were, by name; the model has none now.
        """
        tensors = {
            name: tensor.detach()
            for name, tensor in (*self.named_parameters(), *self.named_buffers())
        }
        self.to("meta", torch.float32)
        self.config, self.backend = config, attention_backend(config.attention.backend)
        return tensors

    def _embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embeddings(input_ids)  # [b, S, d_model]
        if self.config.embed_scale != 1.0:
            x = x * self.config.embed_scale
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        return x if self.compute_dtype is None else x.to(self.compute_dtype)


def _padded(tensors: Sequence[Tensor], before: int, after: int) -> Tensor:
    """Stack tensors, with zeros of as many others before and after them."""
    none = torch.zeros_like(tensors[0])
    return torch.stack([*[none] * before, *tensors, *[none] * after])


def build_decoder(config: DecoderConfig, **factory: Any) -> Decoder:
    """Return the model of a shape: of `config.decoder_class`, if it names one."""
    return (config.decoder_class or Decoder)(config, **factory)
