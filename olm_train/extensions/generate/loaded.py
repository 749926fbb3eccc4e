"""A trained model ready to write: weights on their device, tokenizer, where texts begin and end.

run, checkpoint, export, what model.save wrote, model of transformers -> LoadedModel -> Engine
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

from olm_data.command import say
from olm_data.errors import OlmError, UsageError, ValidationError
from olm_data.storage.names import is_unicode
from olm_data.tokenizer.tokenizer import library_errors
from olm_train.checkpoint.portable import TrainedModel, open_portable
from olm_train.checkpoint.text_rules import CHAT_TEMPLATE, TextRules
from olm_train.distributed.world import local_device
from olm_train.extensions.generate.engine import MAX_ROWS, Engine
from olm_train.extensions.generate.runner import runner_of
from olm_train.extensions.generate.template import ChatTemplate
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
        rules: how its texts begin and end.
    """

    found: TrainedModel
    model: Decoder
    device: torch.device
    tokenizer: Tokenizer
    rules: TextRules

    @classmethod
    def open(
        cls,
        place: str,
        checkpoint: str,
        on_damage: Callable[[OlmError], None] = lambda error: say(f"warning: {error}"),
        *,
        device: torch.device | None = None,
        trust: bool = False,
    ) -> LoadedModel:
        """Open the model at a place, see `open_portable`; without a device on this machine's.

        Raises:
            InputError: there is none, or no tokenizer with it.
            ValidationError: it is damaged.
        """
        found = open_portable(place, checkpoint, on_damage, trust=trust)
        tokenizer = found.tokenizer()
        rules = found.rules(tokenizer)
        device = device or local_device()
        model = found.model().to(device)
        return cls(found=found, model=model, device=device, tokenizer=tokenizer, rules=rules)

    @property
    def context(self) -> int | None:
        """Most tokens it looks at; None: no limit is known."""
        return self.rules.context or self.model.config.max_positions

    @cached_property
    def ids_of(self) -> PromptIds:
        """Makes ids of prompts."""
        size = self.model.config.vocab_size
        return PromptIds(
            self.tokenizer, self.rules.begins, self.rules.first, size, self.found.folder
        )

    def template(self, path: Path | None) -> ChatTemplate:
        """Return what makes prompts of conversations: a file, or its own template, or plain lines.

        Raises:
            InputError: there is no such file, or it is no template.
        """
        rules = self.rules
        if path is not None:
            return ChatTemplate.read(path, rules.special, whole=rules.whole)
        if rules.template is None:
            return ChatTemplate()
        where = f"{self.found.folder}/{CHAT_TEMPLATE}"
        return ChatTemplate.of(rules.template, rules.special, where, whole=rules.whole)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens."""
        with library_errors("the tokenizer fails to decode", self.found.folder):
            text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def engine(self, max_rows: int = MAX_ROWS, *, context: int | None = None) -> Engine:
        """Return an engine on it; `context`: most tokens it looks at; None: as the model says."""
        return Engine(
            runner_of(self.model, self.device),
            self.tokenizer,
            ends=self.rules.ends,
            context=context or self.context,
            max_rows=max_rows,
        )


@dataclass(frozen=True)
class PromptIds:
    """Text of a prompt to ids.

    Attributes:
        tokenizer: of the model.
        begins: id that begins each document; None: none does.
        first: id that an empty prompt becomes; None: there is none.
        vocab_size: ids that the model knows.
        where: place of both, for messages.
    """

    tokenizer: Tokenizer
    begins: int | None
    first: int | None
    vocab_size: int
    where: str

    def begun(self, prompt: str) -> bool:
        """Whether a token is put before this prompt."""
        return self.begins is not None or not prompt

    def __call__(self, prompt: str, *, whole: bool = False) -> tuple[int, ...]:
        """Return the ids of a prompt; an empty one begins a document.

        Args:
            whole: it spells the token that begins it, if any does.

        Raises:
            UsageError: it is no text, or empty where nothing begins a document.
            InputError: the tokenizer cannot encode it.
            ValidationError: the model does not know an id of the tokenizer.
        """
        ids = self.plain(prompt)
        if self.begins is not None and not whole:
            ids = [self.begins, *ids]
        elif not ids:
            if self.first is None:
                raise UsageError("the prompt has no token", fix="give a --prompt with some text")
            ids = [self.first]
        self.check(ids)
        return tuple(ids)

    def plain(self, text: str) -> list[int]:
        """Return the ids of a text alone.

        Raises:
            UsageError: it is no text.
            InputError: the tokenizer cannot encode it.
        """
        if not is_unicode(text):
            raise UsageError(
                "the prompt is not valid UTF-8", fix="in the C locale, set LANG=C.UTF-8"
            )
        with library_errors("the tokenizer fails to encode this prompt", self.where):
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

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


def of_model(command: Callable[..., None]) -> Callable[..., None]:
    """Add MODEL and how it is opened to a command, which gets the model and its chat template."""

    @click.argument("model")
    @click.option(
        "--checkpoint", default="latest", show_default=True, help="A step or folder name."
    )
    @click.option(
        "--template",
        type=click.Path(path_type=Path),
        help="Jinja file that makes prompts of conversations, as transformers has them; without: "
        "that of the model, or lines that begin with User: and Assistant:.",
    )
    @click.option(
        "--trust", is_flag=True, help="Import classes that a saved model names: I trust it."
    )
    @wraps(command)
    def opened(model: str, checkpoint: str, template: Path | None, trust: bool, **own: Any) -> None:
        loaded = LoadedModel.open(model, checkpoint, trust=trust)
        command(loaded, loaded.template(template), **own)

    return opened
