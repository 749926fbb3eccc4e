"""A dataset: random access to the tokens and documents of the shards its manifest names.

manifest.json -> Dataset.open -> shards, opened on first touch
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from olm_data.config.arguments import checked
from olm_data.config.hints import PositiveInt
from olm_data.dataset.docs import DOCS, KeptValue
from olm_data.dataset.labels import trained
from olm_data.dataset.manifest import Manifest, read_manifest
from olm_data.dataset.record import damaged
from olm_data.dataset.shard import Shard, Verify
from olm_data.dataset.tokenizer import own_tokenizer
from olm_data.storage.objects import Options, use_options
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import TokenizerSpec

_MAX_MAPPED_SHARDS = 16_384  # the kernel allows 65,530 maps a process


@dataclass(frozen=True)
class Origin:
    """Where a document came from, and its kept columns."""

    number: int
    id: str | None
    input: str
    position: int
    position_kind: str
    text_bytes: int
    columns: dict[str, KeptValue]


@dataclass(frozen=True, repr=False)
class Document(Origin):
    """One document: where it came from, and its tokens, BOS and EOS included.

    Attributes:
        tokens: 1-D array in the dataset's dtype.
        trained: bool of the same length, whether a model is trained to give the token.
        dataset: what it is a document of.
    """

    tokens: np.ndarray
    trained: np.ndarray
    dataset: Dataset

    @property
    def text(self) -> str:
        """The text again, without BOS and EOS; bytes that are no UTF-8 show as U+FFFD.

        Raises:
            ValidationError: the dataset's tokenizer.json is missing or another one.
        """
        rules, ids = self.dataset.manifest.tokenizer, self.tokens
        if rules.bos is not None and len(ids) and ids[0] == rules.bos:
            ids = ids[1:]
        if rules.eos is not None and len(ids) and ids[-1] == rules.eos:
            ids = ids[:-1]
        return self.dataset.tokenizer.decode(ids)

    def __repr__(self) -> str:
        place = f"{self.input}, {self.position_kind} {self.position:,}"
        name = "" if self.id is None else f" {self.id!r}"
        return f"<Document {self.number:,}{name}: {len(self.tokens):,} tokens, {place}>"


class Dataset(Sequence[Document]):
    """Random access to the tokens and documents of a dataset; a sequence of its documents.

    Token positions and document numbers count over all shards in manifest order. Several threads
    may read at the same time.

        dataset = Dataset.open("./tokens/books")
        len(dataset), dataset[0].text, [document.id for document in dataset]

    Attributes:
        manifest: the parsed manifest.
        digest: sha256 that names this dataset.
        dtype: NumPy dtype of the stored tokens.
        token_ends: int64 [shards], cumulative tokens.
        document_ends: int64 [shards], cumulative documents.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        *,
        verify: Verify = "lazy",
        max_open: int | None = None,
    ) -> None:
        self.store, self.manifest, self.verify = store, manifest, verify
        self.digest = str(manifest.digest)
        self.dtype = np.dtype(manifest.dtype)
        self.token_ends = np.cumsum([s.tokens for s in manifest.shards], dtype=np.int64)
        self.document_ends = np.cumsum([s.documents for s in manifest.shards], dtype=np.int64)
        self._max_open = max_open or open_shards_budget()
        self._open: OrderedDict[int, Shard] = OrderedDict()

    @classmethod
    @checked()
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        digest: str | None = None,
        verify: Verify = "lazy",
        max_open: PositiveInt | None = None,
        storage_options: Options | None = None,
    ) -> Dataset:
        """Open the dataset at a local path or URL; reads the manifest only.

        Args:
            path: folder of the dataset.
            digest: which version, where inputs were added since; the newest by default.
            verify: `off`, `lazy` (each 64 KiB block of tokens on first touch) or `full` (whole
                shard when it is opened).
            max_open: most shards kept open at a time.
            storage_options: for the clients of buckets, as fsspec takes them; by URL, where they
                differ. This process goes on using them.

        Raises:
            InputError: there is no dataset, or no such version of it.
            ValidationError: the manifest is damaged, edited or of another version.
        """
        use_options(storage_options or {})
        store = Store(os.fspath(path))
        return cls(store, read_manifest(store, digest), verify=verify, max_open=max_open)

    def __len__(self) -> int:
        """Return the number of documents."""
        return self.documents

    @overload
    def __getitem__(self, number: int) -> Document: ...
    @overload
    def __getitem__(self, number: slice) -> list[Document]: ...
    def __getitem__(self, number: int | slice) -> Document | list[Document]:
        """Return document `number`, counted from the end if negative, or those of a slice.

        Raises:
            IndexError: there is no such document.
        """
        if isinstance(number, slice):
            return [self.document(i) for i in range(*number.indices(len(self)))]
        return self.document(number + len(self) if number < 0 else number)

    def __repr__(self) -> str:
        return (
            f"<Dataset {self.store.root!r}: {self.tokens:,} tokens, {self.documents:,} documents, "
            f"{len(self.manifest.shards):,} shards ({self.dtype.name}), tokenizer "
            f"{self.tokenizer_name}, digest {self.digest[:12]}>"
        )

    def _repr_html_(self) -> str:
        """Return what notebooks show: its facts."""
        from olm_data.printing import as_html  # of no use to a run

        totals = self.manifest.totals
        facts = {
            "place": self.store.root,
            "tokens": totals.tokens,
            "documents": totals.documents,
            "text bytes": totals.text_bytes,
            "dropped": self.manifest.dropped,
            "inputs": len(self.manifest.inputs),
            "shards": len(self.manifest.shards),
            "dtype": self.dtype.name,
            "tokenizer": self.tokenizer_name,
            "digest": self.digest,
        }
        return as_html(facts)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.manifest.totals.tokens

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.manifest.totals.documents

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        return self.manifest.tokenizer.vocab_size

    @property
    def tokenizer_name(self) -> str:
        """What the tokenizer was called where the dataset was made; not digested."""
        return self.manifest.tools.tokenizer or self.manifest.tokenizer.sha256[:12]

    @cached_property
    def tokenizer(self) -> TokenizerSpec:
        """The tokenizer stored in the dataset, with the dataset's BOS and EOS.

        Raises:
            ValidationError: it is missing, or not the one the dataset was made with.
        """
        return own_tokenizer(self.store, self.manifest.tokenizer, self.tokenizer_name)

    @property
    def eos(self) -> int | None:
        """Id that ends each document, or None."""
        return self.manifest.tokenizer.eos

    def shard(self, index: int) -> Shard:
        """Return shard `index`, opening and checking it on first use.

        Raises:
            ValidationError: the shard's files disagree with the manifest.
        """
        shard = self._open.get(index)
        if shard is not None:
            with contextlib.suppress(KeyError):  # another thread has just put it away
                self._open.move_to_end(index)
            return shard
        shard = self._open[index] = self.open_shard(index)
        if len(self._open) > self._max_open:
            self._open.popitem(last=False)
        return shard

    def open_shard(self, index: int, *, copy: str | None = None) -> Shard:
        """Open and check shard `index` for a caller that keeps it itself.

        Args:
            copy: folder with a copy of its files that may vanish: it is read without memory maps.

        Raises:
            ValidationError: the shard's files disagree with the manifest.
        """
        store, info = self.store if copy is None else Store(copy), self.manifest.shards[index]
        return Shard(store, self.manifest, info, verify=self.verify, mapped=copy is None)

    def check_docs(self, index: int, why: str) -> None:
        """Refuse document rows of shard `index` that are not the manifest's.

        Args:
            why: what would be wrong with what is made of them, for the message.

        Raises:
            ValidationError: they are missing, or others.
        """
        info, what = self.manifest.shards[index], "the file is missing"
        with contextlib.suppress(FileNotFoundError):
            if self.store.sha256(info.name + DOCS) == info.sha256.docs:
                return
            what = "the document rows do not match their digest in the manifest"
        raise damaged(self.store.url(info.name + DOCS), what, why)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) in the dataset's dtype; a view if in one local shard."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of a dataset of {self.tokens}")
        parts = [self.shard(i).read(a, b) for i, a, b in self._pieces(start, stop)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, self.dtype)

    def trained(self, start: int, stop: int) -> np.ndarray:
        """Return bool [stop - start], which of the tokens [start, stop) are trained."""
        mask = np.ones(stop - start, bool)
        done = 0
        for i, a, b in self._pieces(start, stop):
            if (labels := self.shard(i).labels) is not None:
                mask[done : done + b - a] = trained(labels, a, b)
            done += b - a
        return mask

    def ends_between(self, start: int, stop: int) -> np.ndarray:
        """Return the document ends e with start < e < stop, ascending, as int64 token positions."""
        parts = []
        for i, a, b in self._pieces(start, stop):
            ends = self.shard(i).ends
            base = int(self.token_ends[i]) - self.manifest.shards[i].tokens
            low, high = np.searchsorted(ends, np.array([a + 1, b + 1], np.uint64))
            parts.append(ends[low:high].astype(np.int64) + base)
        ends = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return ends[ends < stop]

    def document_span(self, number: int) -> tuple[int, int]:
        """Return the token positions [start, stop) of document `number`."""
        i, local = self._document_shard(number)
        base = int(self.token_ends[i]) - self.manifest.shards[i].tokens
        ends = self.shard(i).ends
        return base + (int(ends[local - 1]) if local else 0), base + int(ends[local])

    def document_at(self, token: int) -> int:
        """Return the number of the document that holds token position `token`."""
        if not 0 <= token < self.tokens:
            raise IndexError(f"token {token} of a dataset of {self.tokens}")
        i = int(np.searchsorted(self.token_ends, token, side="right"))
        local = token - (int(self.token_ends[i]) - self.manifest.shards[i].tokens)
        first = int(self.document_ends[i]) - self.manifest.shards[i].documents
        return first + int(np.searchsorted(self.shard(i).ends, np.uint64(local), side="right"))

    def document(self, number: int) -> Document:
        """Return document `number` with its provenance."""
        origin = self.origin(number)
        span = self.document_span(number)
        return Document(
            **vars(origin), tokens=self.read(*span), trained=self.trained(*span), dataset=self
        )

    def origin(self, number: int) -> Origin:
        """Return where document `number` came from; reads none of its tokens."""
        i, local = self._document_shard(number)
        shard = self.shard(i)
        row = shard.docs.row(local)
        if not 0 <= row.input < len(self.manifest.inputs):
            raise damaged(shard.store.url(shard.name), f"document {local} names no input")
        source = self.manifest.inputs[row.input]
        return Origin(
            number=number,
            id=row.id,
            input=source.path,
            position=row.position,
            position_kind=source.position,
            text_bytes=row.text_bytes,
            columns=row.columns,
        )

    def shard_of(self, number: int) -> tuple[str, int]:
        """Return the name of the shard that holds document `number`, and its number there."""
        i, local = self._document_shard(number)
        return self.manifest.shards[i].name, local

    def _document_shard(self, number: int) -> tuple[int, int]:
        if not 0 <= number < self.documents:
            raise IndexError(f"document {number} of a dataset of {self.documents}")
        i = int(np.searchsorted(self.document_ends, number, side="right"))
        return i, number - (int(self.document_ends[i]) - self.manifest.shards[i].documents)

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Split tokens [start, stop) into (shard, first, last) pieces local to each shard."""
        pieces = []
        i = int(np.searchsorted(self.token_ends, start, side="right"))
        while start < stop:
            base = int(self.token_ends[i]) - self.manifest.shards[i].tokens
            end = min(stop, int(self.token_ends[i]))
            pieces.append((i, start - base, end - base))
            start, i = end, i + 1
        return pieces


def open_shards_budget() -> int:
    """Return how many shards this process may keep open: at most 16,384.

    Half the file limit, as the maps of tokens and ends hold a file handle each.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_MAPPED_SHARDS
    return max(16, min(_MAX_MAPPED_SHARDS, soft // 4))
