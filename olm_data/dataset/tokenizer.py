"""The tokenizer of a dataset: its rules in the manifest, and the file that lies beside it.

    TokenizerRules (manifest.json, mixture.lock.json) --.
    tokenizer.json --digest equal? probed before?-------+--> own_tokenizer -> TokenizerSpec

Whatever shows, searches, verifies or continues a dataset gets its tokenizer here.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from olm_data.bounded_json import Size
from olm_data.errors import ValidationError
from olm_data.storage.store import Store
from olm_data.tokenizer.probe import probe
from olm_data.tokenizer.tokenizer import EOS_NAMES, TokenizerSpec, open_reference, spec_from_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"


class TokenizerRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tokenizer made the ids of a dataset or a mixture, and how documents begin and end.

    Attributes:
        sha256, probe_sha256: digests of the file, and of the ids it gives for the probe texts.
        vocab_size: every id is below it.
        bos, eos: id before / after each document, or None for none.
    """

    sha256: str
    probe_sha256: str
    vocab_size: Size
    bos: Size | None
    eos: Size | None

    def difference(self, other: TokenizerRules, *, ends: bool = False) -> str | None:
        """Return a field by which the same id means something else in the two; None: there is none.

        Args:
            ends: compare how documents begin and end, too.
        """
        fields = ("sha256", "probe_sha256", "vocab_size", *(("bos", "eos") if ends else ()))
        return next((f for f in fields if getattr(self, f) != getattr(other, f)), None)

    @property
    def eos_begins(self) -> int | None:
        """EOS where no BOS begins a document: its first token is predicted after it, as in lm_eval
        and in a stream of documents; None: BOS does, or there is neither."""
        return self.eos if self.bos is None else None

    @property
    def delimiters(self) -> tuple[int, ...]:
        """The ids that stand before and after each document."""
        return tuple(i for i in (self.bos, self.eos) if i is not None)

    def body(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids of a whole document without BOS and EOS."""
        return ids[self.bos is not None : len(ids) - (self.eos is not None)]


class TokenizerInfo(TokenizerRules, frozen=True, forbid_unknown_fields=True):
    """The same of a dataset; `special` says what became of text that spells a special token."""

    special: str

    @classmethod
    def of(cls, spec: TokenizerSpec, special: str) -> TokenizerInfo:
        """Return the rules of what is made with a tokenizer."""
        return cls(
            spec.sha256, spec.probe_sha256, spec.vocab_size, spec.bos, spec.eos, special
        )  # fmt: skip


def own_tokenizer(store: Store, info: TokenizerRules, name: str) -> TokenizerSpec:
    """Load the tokenizer in a dataset's folder, with the dataset's BOS and EOS.

    Args:
        name: what it is called in messages.

    Raises:
        InputError: it is not safe to use.
        ValidationError: it is missing, or not the one the dataset was made with.
    """
    return spec_of(read_own(store, info), info, store.url(TOKENIZER), name)


def read_own(store: Store, info: TokenizerRules) -> bytes:
    """Return the `tokenizer.json` in a dataset's folder.

    Raises:
        ValidationError: it is missing, or not the one the dataset was made with.
    """
    url = store.url(TOKENIZER)
    try:
        data = store.read(TOKENIZER)
    except FileNotFoundError as error:
        raise ValidationError(
            "the dataset's tokenizer.json is missing", where=url, fix="restore it from a copy"
        ) from error
    refuse_other(data, info, url)
    return data


def refuse_other(data: bytes, info: TokenizerRules, where: str) -> None:
    """Refuse a `tokenizer.json` that did not make the ids.

    Raises:
        ValidationError: it is another one.
    """
    if sha256(data).hexdigest() != info.sha256:
        raise ValidationError(
            "the tokenizer.json is not the one the dataset was made with",
            where=where,
            why="the ids would be shown as other text",
            fix="restore it from a copy",
        )


def spec_of(data: bytes, info: TokenizerRules, where: str, name: str) -> TokenizerSpec:
    """Parse the `tokenizer.json` of a dataset, whose digest has been compared.

    Raises:
        InputError: it is not safe to use.
    """
    probe(data, where)
    return _parsed(data, name, info.eos, info.bos)


def prompt_tokenizer(data: bytes, info: TokenizerRules | None, where: str) -> Tokenizer:
    """Return the library's tokenizer, with which a prompt may spell special tokens.

    Raises:
        InputError: it is not safe to use.
        ValidationError: it is another one than that of the data.
    """
    if info is not None:
        refuse_other(data, info, where)
    probe(data, where)
    return open_reference(data, plain=False, name=where)


def end_of_document(tokenizer: Tokenizer) -> int | None:
    """Return the id of the special token whose name says that it ends a document; None: none's."""
    found = [tokenizer.token_to_id(name) for name in EOS_NAMES]
    return next((token for token in found if token is not None), None)


@lru_cache(maxsize=2)
def _parsed(data: bytes, name: str, eos: int | None, bos: int | None) -> TokenizerSpec:
    """Parse a tokenizer once for all datasets of a mixture, which have the same."""
    return spec_from_bytes(data, name=name, eos="none", bos="none").delimited(eos=eos, bos=bos)
