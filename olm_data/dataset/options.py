"""The options of tokenising that change bytes, as plans and manifests hold them.

    ReadOptions -> Options: of a dataset (manifest.json), with what its splits and shards are
                   Settings: of a plan (plan.json), with digests of the tokenizer and of its parent

On disk each is one flat object in which an option that is not in use is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

import msgspec

from olm_data.bounded_json import Size
from olm_data.dataset.choices import Container, SpecialPolicy
from olm_data.dataset.inputs import ReadOptions, Share
from olm_data.select.selection import HASH_SPACE
from olm_data.storage.names import is_column_name

Split = Literal["train", "validation"]


class Last(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where `--limit` ends: `[path, position, bytes of text up to it]`.

    `position` is None where there are fewer documents than the limit.
    """

    path: str
    position: Size | None
    text_bytes: Size | None


class Options(ReadOptions, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What decides the bytes of a dataset beside its inputs and its tokenizer.

    Attributes:
        holdout: share of the documents that goes to the validation split.
        limit, last: how many documents were asked for, and where they end.
        container: whether the tokens have a NumPy header.
        dedup: "exact" keeps only the first document in input order of each text.
        shuffle_documents: whether each shard's documents are shuffled, by `seed`.
        split: which split of the dataset this is; of a plan, which makes both, None.
    """

    holdout: Share = "0"
    limit: Size | None = None
    last: Last | None = None
    container: Container = "npy"
    dedup: Literal["exact"] | None = None
    shuffle_documents: bool = False
    split: Split | None = None

    @property
    def holdout_below(self) -> int:
        """Documents whose uint64 content hash is below this are held out."""
        return int(Fraction(self.holdout) * HASH_SPACE)

    @property
    def shuffle(self) -> int | None:
        """Seed of the order of the documents in each shard, or None for input order."""
        return self.seed if self.shuffle_documents else None

    def stored(self) -> dict[str, Any]:
        """Return the options as a JSON object: those that are always told, and those in use."""
        value: dict[str, Any] = {}
        for name, item in super().stored().items():
            value[name] = item
            if name == "shuffle_documents":  # of the shuffle alone, the seed stands beside it
                value.setdefault("seed", self.seed)
        return value

    def _is_stored(self, name: str) -> bool:
        if name == "container":
            return self.container != "npy"
        if name == "shuffle_documents":
            return self.shuffle_documents
        return super()._is_stored(name)


class Settings(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a plan, with digests of the tokenizer.

    Attributes:
        tokenizer, tokenizer_probe: digests of the file, and of the ids it gives to the probe.
        vocab_size, bos, eos, special: as in a manifest's `tokenizer`.
        shard_text_bytes: wanted bytes of text a shard.
        parent, first_shard: of an addition, the digest of the version it goes on top of, and the
            number of its first shard.
    """

    tokenizer: str
    tokenizer_probe: str
    vocab_size: Size
    bos: Size | None
    eos: Size | None
    special: SpecialPolicy
    shard_text_bytes: Size
    parent: str | None = None
    first_shard: Size = 0

    def _is_stored(self, name: str) -> bool:
        if name in ("bos", "eos"):
            return True
        if name == "first_shard":
            return self.parent is not None
        return super()._is_stored(name)


class ImportedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a dataset of another project's token files: whose format they are in."""

    imported: str

    def stored(self) -> dict[str, Any]:
        """Return the options as a JSON object."""
        return {"imported": self.imported}


def read_options(value: Mapping[str, Any]) -> Options | ImportedOptions:
    """Return the options in a manifest.

    Raises:
        ValueError: they are none that can be used.
    """
    if "imported" in value:
        return msgspec.convert(value, ImportedOptions)
    options = msgspec.convert(value, Options)
    for name in (options.text_column, options.id_column, *(name for name, _ in options.keep)):
        if name is not None and not is_column_name(name):
            raise ValueError("a column has a name with control characters, or one that is too long")
    return options
