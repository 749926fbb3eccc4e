"""Encoders of one's own, by import path: `my_lab.parts:MyEncoder`, or by a package's entry point.

An encoder of one's own is another way to the ids of a tokenizer: it goes through the same gate as
ours before each run, and is audited during it, so a dataset's bytes do not depend on it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from olm_data.config.import_path import import_path, is_import_path, load_class
from olm_data.dataset.inputs import SpecialPolicy
from olm_data.encoders.base import Ids, Unencodable
from olm_data.errors import UsageError
from olm_data.plugins import path_of
from olm_data.tokenizer.tokenizer import TokenizerSpec

GROUP = "olm_data.encoders"
"""Entry points of packages that have encoders."""


class OwnEncoder(ABC):
    """Turns documents into the ids of a tokenizer; one a process, on one thread.

    Args:
        tokenizer: whose ids they are; the gate tries others beside the one of the run.
        special: what text that spells a special token is.

    Attributes:
        name: its import path.
    """

    def __init__(self, tokenizer: TokenizerSpec, special: SpecialPolicy) -> None:
        self.name = import_path(type(self))
        self.tokenizer, self.special = tokenizer, special

    @abstractmethod
    def ids(self, text: str) -> Sequence[int]:
        """Return the ids of a document: no BOS, no EOS.

        Raises:
            ValueError: it cannot be encoded; it is dropped and counted.
        """

    def encode(self, data: np.ndarray, offsets: np.ndarray) -> Ids:
        """Encode documents, see `Encoder`; override it to encode many at a time."""
        made: list[np.ndarray] = []
        why: dict[int, str] = {}
        for k, (begin, end) in enumerate(pairwise(offsets.tolist())):
            try:
                made.append(np.asarray(self.ids(data[begin:end].tobytes().decode()), np.uint32))
            except ValueError as error:
                why[k] = str(error)
        if why:
            raise Unencodable(why)
        ends = np.cumsum([0, *map(len, made)], dtype=np.int64)
        return np.concatenate([*made, np.empty(0, np.uint32)]), ends


def own_path(name: str) -> str | None:
    """Return the import path that an encoder's name is, or is short for; None: it is another's."""
    return name if is_import_path(name) else path_of(GROUP, name)


def own_encoder(path: str, tokenizer: TokenizerSpec, special: SpecialPolicy) -> OwnEncoder:
    """Import an encoder and make it.

    Raises:
        UsageError: there is no such class, or it is of another kind.
    """
    kind = load_class(path, OwnEncoder, where=f"--encoder {path}")
    if inspect.isabstract(kind):
        raise UsageError(f"{path} has no method ids", where=f"--encoder {path}")
    made: OwnEncoder = kind(tokenizer, special)
    return made
