"""A model of lm-evaluation-harness that is a checkpoint: `--model olm --model_args checkpoint=RUN`.

    loglikelihood          pairs -> ids, encoded together -> `RequestRows` -> log p, is it greedy
    loglikelihood_rolling  text -> windows that see as much as fits -> the same, added up
    generate_until         context -> `Engine`, as many texts at a time as rows -> text
                           generation_kwargs -> Wishes: stop strings, a length, how ids are chosen

What a request loses for want of room is counted, said, and part of the results. Importing this
module makes the name `olm` known to lm_eval.

Log-probabilities of continuations given as ids, packed into rows as a run packs its tasks.

    pairs of ids -> `rows_of` -> rows -> one forward pass each -> logits of the scored places alone
        -> summed by request: nats, and ids that are not the most likely one

Logits in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from olm_data.errors import OlmError, UsageError, ValidationError, shown, suggest
from olm_data.extras import needs
from olm_train.data.batch import Batch
from olm_train.distributed.world import World, local_device
from olm_train.extensions.downstream.tasks import RequestRows
from olm_train.extensions.generate.engine import MAX_ROWS, TextRequest
from olm_train.extensions.generate.loaded import LoadedModel
from olm_train.extensions.generate.sampling import Sampling
from olm_train.extensions.generate.template import Message
from olm_train.model.decoder import Decoder
from olm_train.model.head import Head
from olm_train.model.loss import IGNORE_INDEX, sum_by_piece
from olm_train.model.precision import at_least_fp32

CHUNK = 1024
"""Tokens whose logits exist at a time."""

Pair = tuple[list[int], list[int]]
"""Ids of a context, at least one, and of its continuation, at least one."""
Answer = tuple[float, bool]
"""Log-probability of a continuation in nats, and whether each of its ids is the most likely one."""
Keep = Callable[[int, Answer], None]
"""Told the number of a pair and its answer as soon as it is known."""


def rows_of(pairs: Sequence[Pair], max_length: int, rows: int, device: torch.device) -> RequestRows:
    """Return pairs in rows.

    Args:
        max_length: tokens that the model looks at.
        rows: of a batch.

    Raises:
        UsageError: a continuation is longer than that.
    """
    context = np.array([len(a) for a, _ in pairs], np.int64)
    sizes = np.array([len(a) + len(b) for a, b in pairs], np.int64)
    # no longer than all of them together: a few short ones make no row of a long context
    length = min(max_length, int((sizes - 1).sum()))
    found = RequestRows(
        np.fromiter((token for pair in pairs for ids in pair for token in ids), np.int64),
        sizes.cumsum(),
        context,
        length,
        rows * length,
        world=World(device=device),
    )
    if found.cut.any():
        longest = int((sizes - context).max())
        raise UsageError(
            f"a continuation has {longest:,} tokens, and the model looks at {max_length:,}",
            why="it cannot be scored as a whole",
            fix="leave the task out",
        )
    return found


def answers(
    model: Decoder,
    rows: RequestRows,
    device: torch.device,
    keep: Keep | None = None,
    *,
    quiet: bool = False,
) -> list[Answer]:
    """Return the answers of requests, in their order; `quiet`: without a progress bar."""
    found: list[Answer] = [(0.0, False)] * rows.requests
    with tqdm(total=rows.requests, desc="Scoring requests", disable=quiet) as bar:
        for batch, members, offsets in rows:
            sums = _sums(model, batch.to(device), torch.from_numpy(offsets).to(device))
            for request, nats, misses in zip(members.tolist(), *sums.tolist(), strict=True):
                if request < 0:
                    continue
                found[request] = (-nats, misses == 0)
                if keep is not None:
                    keep(request, found[request])
                bar.update()
    return found


@torch.no_grad()
def _sums(model: Decoder, batch: Batch, offsets: Tensor) -> Tensor:
    """Return nats, and ids that are not the most likely one, of each piece: fp64 [2, pieces]."""
    labels = batch.labels.flatten()  # [b * S]
    scored = (labels != IGNORE_INDEX).nonzero()[:, 0]

    def reduce(head: Head, x: Tensor) -> Tensor:
        head, x = head._replace(weight=at_least_fp32(head.weight)), at_least_fp32(x)
        states = x.flatten(0, -2)[scored]  # [n, d_model]
        both = torch.zeros(2, len(labels), device=x.device)
        for places, part in zip(scored.split(CHUNK), states.split(CHUNK), strict=True):
            logits, wanted = head.logits(part), labels[places]  # [n, V], [n]
            both[0, places] = F.cross_entropy(logits, wanted, reduction="none")
            both[1, places] = (logits.argmax(dim=-1) != wanted).float()
        return both

    both = batch.through(model, reduce)
    return torch.stack([sum_by_piece(each, labels, offsets)[0] for each in both]).cpu()


with needs("the tasks of lm-evaluation-harness"):
    import lm_eval.models  # noqa: F401  which knows its own names only where none is known yet
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

ROWS = 8
"""Rows of a batch that is scored, unless told otherwise."""
MAX_GEN_TOKS = 256
"""Tokens of a text, unless its task says; lm_eval's own number."""

ParsedRequest = tuple[tuple[str, str] | None, list[int], list[int]]
"""Texts of a request, ids of its context, ids of its continuation."""

log = logging.getLogger(f"lm_eval.{__name__}")  # which lm_eval shows as its own


@register_model("olm")
class OlmLM(TemplateLM):
    """A model of lm_eval.

    Args:
        checkpoint: a run, checkpoint, export, what `model.save` wrote, or a model of transformers;
            local, remote, or `hf://ORG/NAME[@REVISION]`.
        step: of a run: a step or folder name of a checkpoint, or `latest`.
        max_length: tokens that it looks at; None: as many as the model does.
        batch_size: rows scored, or texts written, at a time; None or `auto`: 8 and 32.
        max_batch_size: at most so many with `auto`.
        device: None: a CUDA device where there is one.
        max_gen_toks: tokens of a text where its task does not say.
        template: Jinja file for `--apply_chat_template`; None: see `LoadedModel.template`.
        trust: import classes of its own by the path that it gives.

    Attributes:
        loaded: the model, in fp32.
        max_length: tokens that it looks at.
        truncated: requests that lost the beginning of their context so far.

    Raises:
        InputError: there is no such model, or no tokenizer with it.
        UsageError: an argument is not as it must be, or nobody knows the length.
        ValidationError: the model is damaged.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        step: str | int = "latest",
        max_length: int | None = None,
        batch_size: str | int | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        template: str | None = None,
        trust: bool = False,
    ) -> None:
        super().__init__()
        size = _size(batch_size)
        most = max_batch_size if size is None and max_batch_size else None
        self._rows = size or min(ROWS, most or ROWS)
        self._texts = size or min(MAX_ROWS, most or MAX_ROWS)
        self._max_gen_toks, self.truncated = int(max_gen_toks), 0
        self._device = _device(device)
        self.loaded = LoadedModel.open(
            str(checkpoint), str(step), _warn, device=self._device, trust=trust
        )
        self.max_length = self._length(max_length)
        self._template = self.loaded.template(None if template is None else Path(template))
        begins = self.loaded.rules.begins
        self._bos = None if begins is None else self.loaded.text_of([begins])

    def get_model_info(self) -> dict[str, str | int | None]:
        """Return what lm_eval keeps with its results: which weights, and what requests lost."""
        found = self.loaded.found
        return {
            "model_checkpoint": found.name,
            "model_step": found.step,
            "model_num_parameters": sum(each.numel() for each in self.loaded.model.parameters()),
            "model_dtype": "float32",
            "max_length": self.max_length,
            "requests_truncated": self.truncated,
        }

    # ---- ids ------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """Id that ends a document, or else the one that begins one.

        Raises:
            UsageError: there is neither.
        """
        return self._either(self.loaded.rules.eos, self.loaded.rules.begins)

    @property
    def prefix_token_id(self) -> int:
        """Id that stands before a text without context: BOS, or else EOS."""
        return self._either(self.loaded.rules.begins, self.loaded.rules.eos)

    def _either(self, first: int | None, second: int | None) -> int:
        found = second if first is None else first
        if found is None:
            raise UsageError(
                "the tokenizer has neither BOS nor EOS",
                where=self.loaded.found.folder,
                why="the probability of a first token is not defined",
            )
        return found

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the ids of a text.

        Args:
            add_special_tokens: begin with BOS where the model was trained so; None: unless the text
                does itself.
        """
        ids = self.loaded.ids_of.plain(string)
        self.loaded.ids_of.check(ids)
        wanted = add_special_tokens
        if wanted is None:
            wanted = self._bos is None or not string.startswith(self._bos)
        if wanted and self.loaded.rules.begins is not None:
            return [self.loaded.rules.begins, *ids]
        return ids

    # ---- scoring --------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[ParsedRequest], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Answer]:
        pairs = [self._pair(*request) for request in requests]

        def keep(number: int, answer: Answer) -> None:
            texts = requests[number][0]
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)

        return self._score(pairs, keep, quiet=disable_tqdm)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each whole text, every token of it once.

        A text longer than `max_length` is cut into windows; each sees as many tokens before its own
        as fit. BOS, or else EOS, stands before the first and is not scored.
        """
        owners, pairs = list[int](), list[Pair]()
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            for window in windows:
                context, continuation = make_disjoint_window(window)
                pairs.append((context, continuation))
                owners.append(number)
        found = self._score(pairs, quiet=disable_tqdm)
        totals = [0.0] * len(requests)
        for owner, (log_p, _) in zip(owners, found, strict=True):
            totals[owner] += log_p
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _pair(
        self, texts: tuple[str, str] | None, context: list[int], continuation: list[int]
    ) -> Pair:
        """Return ids that can be scored: as `olm-data eval-set build` makes them."""
        if not continuation and texts is not None:  # the last token of the context swallowed it
            continuation = self.tok_encode(texts[1], add_special_tokens=False)
        if not continuation:
            raise UsageError(
                "a request has nothing to score: its continuation has no token",
                where=None if texts is None else repr(texts[0][-80:]),
            )
        return context or [self.prefix_token_id], continuation

    def _score(
        self, pairs: Sequence[Pair], keep: Keep | None = None, *, quiet: bool
    ) -> list[Answer]:
        if not pairs:
            return []
        rows = rows_of(pairs, self.max_length, self._rows, self._device)
        self._lost(rows.lost, "requests are", "contexts")
        return answers(self.loaded.model, rows, self._device, keep, quiet=quiet)

    # ---- writing --------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text after each context, which ends before the first of its stop strings.

        Raises:
            UsageError: a wish is not known, or leaves no room for the context.
            ValidationError: the model gives non-finite logits.
        """
        asked = [Wishes.of(request.args[1], self._max_gen_toks) for request in requests]
        prompts = [
            self._prompt(request.args[0], wishes.max_gen_toks)
            for request, wishes in zip(requests, asked, strict=True)
        ]
        lost = np.array([dropped for _, dropped in prompts], np.int64)
        self._lost(lost, "prompts and their answers are", "prompts")
        loaded = self.loaded
        engine = loaded.engine(self._texts, context=self.max_length)
        writings = [
            engine.add(
                TextRequest(
                    prompt=prompt,
                    sampling=wishes.sampling.after(number),
                    max_new_tokens=wishes.max_gen_toks,
                    stop=wishes.until,
                )
            )
            for number, ((prompt, _), wishes) in enumerate(zip(prompts, asked, strict=True))
        ]
        with tqdm(total=len(writings), desc="Writing texts", disable=disable_tqdm) as bar:
            while engine.busy:
                bar.update(sum(each.finish is not None for each in engine.step()))
        texts = []
        for request, wishes, writing in zip(requests, asked, writings, strict=True):
            if writing.finish == "non-finite":
                raise ValidationError(
                    "the model gives non-finite logits", where=loaded.found.folder
                )
            text: str = loaded.tokenizer.decode(writing.ids, skip_special_tokens=True)
            texts.append(wishes.cut(text))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _prompt(self, context: str, new: int) -> tuple[tuple[int, ...], int]:
        """Return the end of a context that leaves room for an answer, and ids dropped before it."""
        room = self.max_length - new
        if room < 1:
            raise UsageError(
                f"an answer of {new:,} tokens leaves no room for its prompt: the model looks at "
                f"{self.max_length:,}",
                where="max_gen_toks",
                fix="ask for fewer: --gen_kwargs max_gen_toks=N",
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        return tuple(ids[-room:]), max(0, len(ids) - room)

    # ---- conversations --------------------------------------------------------------------------

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as a prompt, which the answer goes on from.

        Raises:
            UsageError: the template refuses it, or its last message is to be gone on with.
        """
        if not add_generation_prompt:
            raise UsageError(
                "a template makes prompts for new answers, and this task begins the answer itself",
                fix="leave --apply_chat_template out for it",
            )
        return self._template.prompt(
            [Message(each["role"], each["content"]) for each in chat_history]
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the place of the template, for the records of lm_eval; None: none is used.

        Raises:
            UsageError: one is named; there is one alone.
        """
        if isinstance(chat_template, str):
            raise UsageError(
                "there are no templates with names",
                where="--apply_chat_template",
                fix="give its file: --model_args template=FILE",
            )
        return (self._template.where or "User: ... Assistant:") if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm_eval keeps prompts: another tokenizer or template gives another."""
        return f"{self.loaded.found.folder}+{self._template.where}".replace("/", "__")

    # ---- arguments ------------------------------------------------------------------------------

    def _length(self, wanted: int | None) -> int:
        found, places = self.loaded.context, self.loaded.model.config.max_positions
        if wanted is None and found is None:
            raise UsageError(
                "nobody recorded how long the rows were that this model was trained on",
                where=self.loaded.found.folder,
                fix="say it: --model_args max_length=TOKENS",
            )
        length = int(found or 0) if wanted is None else int(wanted)
        if length < 1 or (places is not None and length > places):
            raise UsageError(
                f"max_length is {length:,}, and the model has {places or 0:,} positions"
                if length > 0
                else f"max_length is {length:,}",
                where="max_length",
            )
        return length

    def _lost(self, lost: NDArray[np.int64], what: str, whose: str) -> None:
        count = int((lost > 0).sum())
        self.truncated += count
        if count:
            log.warning(
                f"{count:,} of {len(lost):,} {what} longer than the {self.max_length:,} tokens "
                f"that the model looks at: the {whose} lose their beginning, at most "
                f"{int(lost.max()):,} tokens"
            )


def _size(given: str | int | None) -> int | None:
    """Return a batch size; None: it is ours to choose."""
    if given is None or str(given).startswith("auto"):
        return None
    if not str(given).isdecimal() or int(given) < 1:
        raise UsageError(f"a batch size is a number from 1 on, or auto, not {given}")
    return int(given)


def _device(wanted: str | None) -> torch.device:
    if wanted is None:
        return local_device()
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        log.warning("there is no CUDA device: the CPU is used instead of %s", wanted)
        return torch.device("cpu")
    return torch.device(wanted)


def _warn(error: OlmError) -> None:
    log.warning("%s", shown(str(error)))


LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the same wish; of several the first counts, as in lm_eval."""
KNOWN = {*LENGTHS, "until", "do_sample", "temperature", "num_beams", "seed"}
SHARES = ("top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Wishes:
    """How a text is to be written.

    Attributes:
        until: strings that end it.
        max_gen_toks: tokens of it at most.
        sampling: how tokens are chosen; its seed is that of the first text.
    """

    until: tuple[str, ...]
    max_gen_toks: int
    sampling: Sampling

    @classmethod
    def of(cls, given: Mapping[str, Any], max_gen_toks: int) -> Wishes:
        """Return the wishes of a request.

        Args:
            given: its `generation_kwargs`.
            max_gen_toks: where they say no length.

        Raises:
            UsageError: one is not known, or out of range.
        """
        for name in given:
            if name not in KNOWN and name not in SHARES:
                raise UsageError(
                    f"generation_kwargs has {name}, which is not known here",
                    why="without it the texts would be other ones",
                    fix=suggest(name, sorted({*KNOWN, *SHARES})),
                )
        if given.get("num_beams") not in (None, 1):
            raise UsageError("there is no beam search here", where="num_beams", fix="leave it out")
        until = given.get("until") or ()
        lengths = [given[name] for name in LENGTHS if given.get(name) is not None]
        length = int(lengths[0]) if lengths else max_gen_toks
        if length < 1:
            raise UsageError(f"a text has 1 token or more, not {length}", where="max_gen_toks")
        shares = {name: given[name] for name in SHARES if given.get(name) is not None}
        if "top_k" in shares:
            shares["top_k"] = max(0, shares["top_k"])  # vLLM's -1: all
        sampling = Sampling(
            temperature=_temperature(given), seed=int(given.get("seed") or 0), **shares
        )
        return cls((until,) if isinstance(until, str) else tuple(until), length, sampling)

    def cut(self, text: str) -> str:
        """Return a text up to the first of its stop strings."""
        for stop in self.until:
            text = text.partition(stop)[0] if stop else text
        return text


def _temperature(given: Mapping[str, Any]) -> float:
    """Return 0, which takes the most likely token, unless a task says that texts are drawn."""
    sampled, temperature = given.get("do_sample"), given.get("temperature")
    if sampled is False:
        return 0.0
    if temperature is None:
        return 1.0 if sampled else 0.0
    return float(temperature)
