"""A trained model ready to write: weights on their device, tokenizer, where texts begin and end.

run, checkpoint, export or what model.save wrote -> verified -> LoadedModel -> Engine
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from olm_data.errors import OlmError, UsageError, ValidationError
from olm_data.storage.names import is_unicode
from olm_train.checkpoint.portable import Portable, open_portable
from olm_train.generate.engine import MAX_ROWS, Engine
from olm_train.generate.runner import runner_of
from olm_train.model.decoder import Decoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model and what belongs to it.

    Attributes:
        found: what it was opened from.
        model: in fp32, on `device`.
        tokenizer: its own.
        begins: id to begin a prompt with; None: none.
        eos: id that ends a document; None: none does.
        context: most tokens it looks at; None: no limit is known.
    """

    found: Portable
    model: Decoder
    device: torch.device
    tokenizer: Tokenizer
    begins: int | None
    eos: int | None
    context: int | None

    @classmethod
    def open(
        cls,
        place: str,
        checkpoint: str,
        on_damage: Callable[[OlmError], None],
        *,
        device: torch.device,
        trust: bool = False,
    ) -> LoadedModel:
        """Open the model at a place, see `open_portable`.

        Raises:
            InputError: there is none, or no tokenizer with it.
            ValidationError: it is damaged.
        """
        found = open_portable(place, checkpoint, on_damage, trust=trust)
        lock = found.recorded_lock
        begins, eos = found.ends
        tokenizer, model = found.tokenizer(), found.model().to(device)
        return cls(
            found=found,
            model=model,
            device=device,
            tokenizer=tokenizer,
            begins=begins,
            eos=eos,
            context=model.config.max_positions if lock is None else lock.sequence_length,
        )

    @cached_property
    def ids_of(self) -> PromptIds:
        """Makes ids of prompts."""
        size = self.model.config.vocab_size
        return PromptIds(self.tokenizer, self.begins, self.eos, size, self.found.folder)

    @property
    def eos_text(self) -> str:
        """Text of the token that ends a document; empty where none does."""
        return "" if self.eos is None else self.text_of([self.eos])

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def engine(self, max_rows: int = MAX_ROWS) -> Engine:
        """Return an engine on it."""
        return Engine(
            runner_of(self.model, self.device),
            self.tokenizer,
            eos=self.eos,
            context=self.context,
            max_rows=max_rows,
        )


@dataclass(frozen=True)
class PromptIds:
    """Text of a prompt to ids.

    Attributes:
        tokenizer: of the model.
        begins: id that begins each document; None: none does.
        eos: id that ends each document; with nothing else it begins one.
        vocab_size: ids that the model knows.
        where: place of both, for messages.
    """

    tokenizer: Tokenizer
    begins: int | None
    eos: int | None
    vocab_size: int
    where: str

    def begun(self, prompt: str) -> bool:
        """Whether a token is put before this prompt."""
        return self.begins is not None or not prompt

    def __call__(self, prompt: str) -> tuple[int, ...]:
        """Return the ids of a prompt; an empty one begins a document.

        Raises:
            UsageError: it is no text, or empty where nothing begins a document.
            ValidationError: the model does not know an id of the tokenizer.
        """
        if not is_unicode(prompt):
            raise UsageError(
                "the prompt is not valid UTF-8", fix="in the C locale, set LANG=C.UTF-8"
            )
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        start = self.begins if self.begins is not None else self.eos
        if self.begins is not None or not ids:
            if start is None:
                raise UsageError("the prompt has no token", fix="give a --prompt with some text")
            ids = [start, *ids]
        self.check(ids)
        return tuple(ids)

    def check(self, ids: Sequence[int]) -> None:
        """Refuse ids that the model does not know.

        Raises:
            ValidationError: there is one.
        """
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValidationError(
                f"a prompt holds the id {max(ids):,}, and the model knows only {self.vocab_size:,}",
                where=self.where,
            )
