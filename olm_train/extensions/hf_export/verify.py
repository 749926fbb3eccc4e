"""The folder, as transformers computes with it, beside the checkpoint, as we do: in fp32, on a CPU.

    checkpoint, weights rounded as in the folder -> Decoder --+-- logits of random ids
    folder ----------------> AutoModelForCausalLM, float32 ---+   greedy ids, loss of rows, stops

Random ids are longer than every window and than the context before rotary positions were scaled:
what differs only there would else not be seen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from olm_data.errors import UsageError, ValidationError
from olm_data.extras import needs
from olm_data.model_receipt import LossProof, ModelProof
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.head import Head

TOLERANCE = 1e-4
"""Of logits, in fp32; of the largest logit where that is above 1."""
LOSS_TOLERANCE = 1e-5
"""Of a loss, in nats a token, or of itself where it is above 1."""
SHORT, BEYOND, COMPARED = 17, 9, 256
"""Tokens of the shortest prompt; further ones than a window has; positions of a prompt compared."""
NEW_TOKENS = 24
FORCED_AT = 3
"""Of the new tokens: the one that is made an end, to see generation stop."""


def installed() -> bool:
    """Whether transformers is there."""
    return find_spec("transformers") is not None


def knows(model_type: str) -> bool:
    """Whether transformers, or a package that has registered with it, has a class for a model."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def require(model_type: str) -> None:
    """Refuse to go on without transformers, or a class in it.

    Raises:
        MissingExtra: it is not installed.
        UsageError: it has no class for the model.
    """
    with needs("comparing with transformers", where="--verify transformers"):
        known = knows(model_type)
    if not known:
        raise UsageError(
            f"transformers has no class for a {model_type}",
            where="--verify transformers",
            fix="leave it out: then tensors and ids are compared",
        )


def room_here() -> int:
    """Return half of the machine's main memory, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _old_context(config: DecoderConfig) -> int | None:
    """Tokens of the longest documents before positions were stretched, None: they were not."""
    return getattr(getattr(config.positions, "scaling", None), "old_context_len", None)


def lengths_of(config: DecoderConfig) -> tuple[int, ...]:
    """Return tokens of prompts: three lengths, or fewer where learned positions allow no more."""
    windows = [window for window in config.windows if window is not None]
    old = _old_context(config)
    found = {SHORT, 2 * SHORT + max(windows, default=0) + BEYOND, (old or 4 * SHORT) + BEYOND}
    most = config.max_positions or max(found)
    return tuple(sorted({min(length, most) for length in found}))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing bars and warning of prompts that are long on purpose."""
    from transformers.utils import logging as module

    logging: Any = module  # it has no types
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


@torch.no_grad()
@_quiet()
def prove(
    folder: Path,
    model: Decoder,
    eos: Sequence[int],
    batch: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> ModelProof:
    """Compare transformers' model of a folder with ours.

    Args:
        folder: local, with everything in it.
        model: ours, in fp32 on the CPU, its weights rounded as in the folder.
        eos: ids that end a text.
        batch: rows of the mixture: ids, labels and first position of each token's document, int64
            [S] each; none: no loss is compared.

    Raises:
        ValidationError: they differ.
    """
    import transformers

    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True
    )
    theirs.eval()
    config, reader = model.config, f"transformers {transformers.__version__}"
    generator = torch.Generator().manual_seed(len(eos) + 7)
    largest = difference = 0.0
    lengths = lengths_of(config)
    for length in lengths:
        ids = torch.randint(config.vocab_size, (1, length), generator=generator)
        ours, other = _logits(model, theirs, ids)
        largest = max(largest, ours.abs().max().item())
        difference = max(difference, (ours - other).abs().max().item())
    tolerance = TOLERANCE * max(1.0, largest)
    if not difference <= tolerance:  # NaN, too
        raise _differs(
            folder,
            f"{reader} gives logits that differ by {difference:.3g}, more than {tolerance:.3g}",
        )
    short = min(SHORT, max(1, (config.max_positions or SHORT * 2) - 2 * FORCED_AT))
    prompt = torch.randint(config.vocab_size, (1, short), generator=generator)
    same, tie = _greedy(model, theirs, prompt, eos, tolerance, folder)
    for end in eos:
        _stops(theirs, prompt, end, folder)
    windows = [window for window in config.windows if window is not None]
    old = _old_context(config)
    return ModelProof(
        reader=reader,
        model_class=type(theirs).__name__,
        lengths=lengths,
        longer_than_window=max(lengths) > max(windows) if windows else None,
        longer_than_original_context=None if old is None else max(lengths) > old,
        largest_logit=largest,
        largest_difference=difference,
        tolerance=tolerance,
        greedy_tokens=same,
        greedy_tie=tie,
        stops_at=tuple(eos),
        loss=_loss(model, theirs, batch, folder) if batch else None,
    )


def _logits(model: Decoder, theirs: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 logits [n, vocab] of up to `COMPARED` positions of a prompt, with the last."""
    length = ids.shape[1]
    at = torch.linspace(0, length - 1, min(length, COMPARED)).round().long()

    def some(head: Head, x: Tensor) -> Tensor:
        return head.logits(x[:, at])

    other = theirs(ids, logits_to_keep=at, use_cache=False).logits
    return model(ids, reduce=some)[0].float(), other[0, :, : model.config.vocab_size].float()


def _greedy(
    model: Decoder, theirs: Any, prompt: Tensor, eos: Sequence[int], tolerance: float, folder: Path
) -> tuple[int, bool]:
    """Return how many ids both choose alike, and whether it ended at two equal logits."""
    room = NEW_TOKENS
    if model.config.max_positions is not None:
        room = max(1, min(room, model.config.max_positions - prompt.shape[1]))
    found = theirs.generate(prompt, do_sample=False, max_new_tokens=room, **_mask(prompt))
    wanted, ids = found[0, prompt.shape[1] :].tolist(), prompt
    for number, token in enumerate(wanted):
        logits = model(ids)[0, -1].float()
        best = int(logits.argmax())
        if best != token:
            if logits[best] - logits[token] <= 2 * tolerance:
                return number, True
            raise _differs(folder, f"greedy text differs at its token {number + 1}")
        ids = torch.cat((ids, torch.tensor([[token]])), dim=1)
    if len(wanted) < room and (not wanted or wanted[-1] not in eos):
        raise _differs(folder, "greedy text ended early, and not with a token that ends one")
    return len(wanted), False


def _stops(theirs: Any, prompt: Tensor, end: int, folder: Path) -> None:
    """Let generation choose `end` as its third token, and see that it is the last."""

    def force(ids: Tensor, scores: Tensor) -> Tensor:
        at, forced = ids.shape[1] - prompt.shape[1] + 1, torch.full_like(scores, -torch.inf)
        allowed = end if at == FORCED_AT else (end + 1) % scores.shape[-1]
        while at != FORCED_AT and allowed in _ends(theirs):
            allowed = (allowed + 1) % scores.shape[-1]
        forced[:, allowed] = 0.0
        return forced

    found = theirs.generate(
        prompt,
        do_sample=False,
        max_new_tokens=2 * FORCED_AT,
        logits_processor=[force],
        **_mask(prompt),
    )
    if found.shape[1] != prompt.shape[1] + FORCED_AT:
        raise _differs(folder, f"generation does not stop at the id {end}, which ends a text")


def _ends(theirs: Any) -> list[int]:
    ends = theirs.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


def _mask(prompt: Tensor) -> dict[str, Tensor | int]:
    return {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0}


def _loss(
    model: Decoder, theirs: Any, batch: Sequence[tuple[Tensor, Tensor, Tensor]], folder: Path
) -> LossProof:
    """Compare the loss of rows: ours of whole rows, theirs of each document by itself."""
    ours = others = labels = 0.0
    for ids, wanted, start in batch:
        positions = torch.arange(len(ids)) - start
        logits = model(ids[None], doc_start=start[None], positions=positions[None])[0].float()
        ours += F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum").item()
        labels += int((wanted != -100).sum())
        for first in start.unique().tolist():
            piece = start == first
            found = theirs(ids[piece][None], use_cache=False).logits[0].float()
            others += F.cross_entropy(
                found, wanted[piece], ignore_index=-100, reduction="sum"
            ).item()
    proof = LossProof(
        labels=int(labels), ours=ours / labels, theirs=others / labels, tolerance=LOSS_TOLERANCE
    )
    if not abs(proof.ours - proof.theirs) <= LOSS_TOLERANCE * max(1.0, proof.ours):
        raise _differs(
            folder, f"the loss of rows of the mixture is {proof.theirs:.6f}, ours {proof.ours:.6f}"
        )
    return proof


def _differs(folder: Path, what: str) -> ValidationError:
    return ValidationError(
        what,
        where=str(folder),
        why="the folder would be another model than the checkpoint",
        fix="report it with the configuration of the run; nothing was written",
    )
