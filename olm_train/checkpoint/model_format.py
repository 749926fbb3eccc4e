"""Models that another program wrote: what a format has to offer, and which one claims a place.

place -> format_of: the entry point of `olm_train.model_formats` that claims it, if one does
      -> pinned -> open -> ForeignModel: shape, weights, tokenizer, rules of texts
      -> begin -> Beginning: what a run does with it before its first step
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from olm_data import plugins
from olm_data.errors import InputError
from olm_data.storage.store import absolute
from olm_train.checkpoint.documents import RunOrigin
from olm_train.checkpoint.text_rules import TextRules
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from olm_data.mixture.lock import Lock
    from olm_train.checkpoint.policy import LoadPolicy, Vocabulary
    from olm_train.train_module_base import TrainModule

GROUP = "olm_train.model_formats"


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that are checked and not yet in place.

    Attributes:
        place: where they lie, pinned.
        load: puts them in place; every rank calls it.
        origin: what they are.
    """

    place: str
    load: Callable[[], None]
    origin: RunOrigin


class ForeignModel(ABC):
    """A model that another program wrote.

    Attributes:
        place: pinned.
        config: its shape.
    """

    place: str
    config: DecoderConfig

    @property
    @abstractmethod
    def name(self) -> str:
        """What people call it."""

    @abstractmethod
    def build(self, dtype: torch.dtype | None = None, **changes: Any) -> Decoder:
        """Return the model on the CPU, in eval mode.

        Args:
            dtype: None: that of the files, float32 where they have several.
            changes: replace fields of its shape that are not of its maths.

        Raises:
            InputError, ValidationError, StorageError: the files are none, or not those of its
                shape, or cannot be read.
        """

    @abstractmethod
    def tokenizer_json(self) -> bytes | None:
        """Return its `tokenizer.json`, None where there is none."""

    @abstractmethod
    def no_tokenizer(self, why: str) -> InputError:
        """Return the error that there is none."""

    @abstractmethod
    def rules(self, tokenizer: Tokenizer) -> TextRules:
        """Return how its texts begin and end, and its chat template.

        Raises:
            InputError: its tokenizer cannot be used here.
            ValidationError: a file is malformed.
        """

    @abstractmethod
    def vocabulary_size(self, ids: int, vocabulary: Vocabulary) -> int:
        """Return the size of the vocabulary of a model that is to be trained from it.

        Args:
            ids: that the data may hold.

        Raises:
            UsageError: the model has fewer, and is to keep its own.
        """


@dataclass(frozen=True, kw_only=True)
class ModelFormat:
    """How models of another program are found, opened and trained from.

    Rank 0 hands it to the others, so its parts are functions of a module.

    Attributes:
        free: fields of a shape that such a model does not have, as they are not of its maths.
        claims: whether such a model is meant by a place, or lies there. Raises UsageError or
            StorageError where the address is none, or the store cannot be reached.
        pinned: the place as it means the same to every rank and later.
        may_change: whether an address means another model later, so that a run keeps the pinned
            one.
        open: the model at a pinned place; an InputError says why our decoder cannot be it.
        canonical: the same model with defaults filled in, and without what is not of its maths.
        begin: checks the model at `policy.path` for a module, a lock of the data if there is one,
            and a save folder; every rank calls it. The last argument prints a line, on rank 0.
    """

    free: tuple[str, ...]
    claims: Callable[[str], bool]
    pinned: Callable[[str], str]
    may_change: Callable[[str], bool]
    open: Callable[[str], ForeignModel]
    canonical: Callable[[DecoderConfig], DecoderConfig]
    begin: Callable[[LoadPolicy, TrainModule, Lock | None, str, Callable[[str], None]], Beginning]


def format_of(place: str) -> ModelFormat | None:
    """Return the format that claims a place, None: no other program's model is there."""
    for name in plugins.names(GROUP):
        known: ModelFormat = plugins.load(GROUP, name)
        if known.claims(place):
            return known
    return None


def pinned(place: str) -> str:
    """Return a place as it means the same to every rank and later."""
    known = format_of(place)
    return absolute(place).rstrip("/") if known is None else known.pinned(place)
