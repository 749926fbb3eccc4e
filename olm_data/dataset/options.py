"""The options of tokenising that change bytes, as plans and manifests hold them.

    RecordOptions -> Options: of a dataset (manifest.json), with what its splits and shards are
                     Settings: of a plan (plan.json), with digests of tokenizer and parent

On disk each is one flat object in which an option that is not in use is left out.
"""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar, Literal

import msgspec

from olm_data.bounded_json import Size
from olm_data.dataset.inputs import Container, RecordOptions, Share, SpecialPolicy, written
from olm_data.decoding import convert, decode_typed
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


class Options(RecordOptions, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What decides the bytes of a dataset beside its inputs and its tokenizer.

    A seed is that of the draw and of the shuffle; None without either.

    Attributes:
        holdout: share of the documents that goes to the validation split.
        limit, last: how many documents were asked for, and where they end.
        container: whether the tokens have a NumPy header.
        dedup: "exact" keeps only the first document in input order of each text, "minhash" of those
            that are nearly the same.
        minhash: bands of the signatures, and rows of each; None of another `dedup`.
        decontaminate: sha256 of the evaluation texts, and how many words in a row no document
            shares with them; None: it may.
        shuffle_documents: whether each shard's documents are shuffled, by `seed`.
        split: which split of the dataset this is; of a plan, which makes both, None.
    """

    holdout: Share = written("0")
    limit: Size | None = None
    last: Last | None = None
    container: Container = "npy"
    dedup: Literal["exact", "minhash"] | None = None
    minhash: tuple[Size, Size] | None = None
    decontaminate: tuple[str, Size] | None = None
    shuffle_documents: bool = False
    split: Split | None = None

    words: ClassVar[tuple[str, ...]] = (*RecordOptions.words, "container")
    uses_of_seed: ClassVar[tuple[str, ...]] = (*RecordOptions.uses_of_seed, "shuffle_documents")

    @property
    def holdout_below(self) -> int:
        """Documents whose uint64 content hash is below this are held out."""
        return int(Fraction(self.holdout) * HASH_SPACE)

    @property
    def shuffle(self) -> int | None:
        """Seed of the order of the documents in each shard, or None for input order."""
        return self.seed if self.shuffle_documents else None


class Settings(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a plan, with digests of the tokenizer.

    Attributes:
        tokenizer, tokenizer_probe: digests of the file, and of the ids it gives to the probe.
        vocab_size, bos, eos, special: as in a manifest's `tokenizer`.
        shard_text_bytes: wanted bytes of text a shard.
        parent, first_shard: of an addition, the digest of the version it goes on top of, and the
            number of its first shard; None of a new dataset.
    """

    tokenizer: str
    tokenizer_probe: str
    vocab_size: Size
    bos: Size | None
    eos: Size | None
    special: SpecialPolicy
    shard_text_bytes: Size
    parent: str | None = None
    first_shard: Size | None = None

    def options(self, split: Split) -> Options:
        """Return the options of a split, for its manifest."""
        return msgspec.structs.replace(convert(self, Options, from_attributes=True), split=split)


class ImportedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a dataset of another project's token files: whose format they are in."""

    imported: str


class _Kind(msgspec.Struct):
    """Of the options in a manifest, what tells whose they are."""

    imported: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def decode_options(data: msgspec.Raw) -> Options | ImportedOptions:
    """Return the options in a manifest.

    Raises:
        ValueError: they are none that can be used.
    """
    if decode_typed(data, _Kind).imported is not msgspec.UNSET:
        return decode_typed(data, ImportedOptions)
    options = decode_typed(data, Options)
    for name in (options.text_column, options.id_column, *(name for name, _ in options.keep)):
        if name is not None and not is_column_name(name):
            raise ValueError("a column has a name with control characters, or one that is too long")
    return options
