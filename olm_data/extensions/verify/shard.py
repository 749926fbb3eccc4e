"""The checks `verify` makes on one shard, and the report that all checks write to.

record, ends, tokens (streamed once: sha256, block checksums, ids, EOS), document rows -> findings
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, pairwise

import msgspec
import numpy as np
import xxhash

from olm_data.dataset.docs import DOCS, DocumentRows
from olm_data.dataset.labels import trained_tokens
from olm_data.dataset.manifest import Manifest, ShardInfo
from olm_data.dataset.record import (
    BLOCK_BYTES,
    HEADER_BYTES,
    RECORD,
    Blocks,
    ShardRecord,
    file_header,
    npy_header,
    window_counts,
)
from olm_data.dataset.shard import ENDS, LABELS
from olm_data.errors import OlmError, StorageError
from olm_data.printing import Seconds
from olm_data.regular_files import MAX_DOCUMENT, MAX_SMALL
from olm_data.storage.store import Store


class Finding(msgspec.Struct, frozen=True):
    """One disagreement between what is on disk and what is promised."""

    file: str
    field: str
    expected: str
    found: str


class VerifyReport(msgspec.Struct, kw_only=True):
    """What `verify` saw.

    Attributes:
        ok: whether nothing disagrees.
        target: what was verified.
        findings: all disagreements; empty means verified.
        notes: facts worth knowing that are no faults.
        datasets: (place, digest) of each dataset checked.
        shards, tokens, documents: how much there is.
        bytes_read: bytes of token files read.
        sample: share of the token blocks that was asked for, as a fraction, or None for all.
        unread_bytes: bytes of token files that were not read, because only a sample was asked for.
        round_trip: documents decoded and encoded again.
        deep: documents whose original text was read again and compared by content hash.
        deep_encoded: of these, the ones encoded again and compared id by id.
        unproved: inputs that `--deep` could not compare with, and why: gone, or changed.
        seconds: wall time; `read_seconds` of it for the bytes of the shards.
    """

    ok: bool = True
    target: str
    findings: list[Finding] = []  # msgspec gives each its own
    notes: list[str] = []
    datasets: list[tuple[str, str]] = []
    shards: int = 0
    tokens: int = 0
    documents: int = 0
    bytes_read: int = 0
    sample: str | None = None
    unread_bytes: int = 0
    round_trip: int = 0
    deep: int = 0
    deep_encoded: int = 0
    unproved: list[str] = []
    seconds: Seconds = 0.0
    read_seconds: Seconds = 0.0

    def add(self, file: str, field: str, expected: object, found: object) -> None:
        """Note a disagreement unless `expected` equals `found`."""
        if expected != found:
            self.findings.append(Finding(file, field, str(expected), str(found)))
            self.ok = False

    def include(self, findings: Iterable[Finding]) -> None:
        """Take over what other checks found, each finding once."""
        known = set(self.findings)
        self.findings += [found for found in findings if found not in known]
        self.ok = not self.findings

    @contextlib.contextmanager
    def unreadable(self, url: str) -> Iterator[None]:
        """Note a file that is missing or cannot be read, of the shard at `url`, as a finding.

        Raises:
            StorageError: the store does not answer, which says nothing about the bytes.
        """
        try:
            yield
        except FileNotFoundError as error:
            self.add(str(error.filename or error), "file", "present", "missing")
        except StorageError:
            raise
        except OlmError as error:
            self.add(error.where or url, "file", "readable", error.what)


class Meter:
    """Bytes of token files read so far, of all that will be: over all datasets, from all threads.

    Args:
        watch: called with (read, total) after each piece, or None.
    """

    def __init__(self, watch: Callable[[int, int], None] | None = None) -> None:
        self.read = self.total = 0
        self._watch, self._lock = watch, threading.Lock()

    def seen(self, count: int) -> None:
        """Note that `count` more bytes were read."""
        with self._lock:
            self.read += count
            self.total = max(self.total, self.read)
            if self._watch is not None:
                self._watch(self.read, self.total)


@dataclass
class ShardResult:
    """What the checks of one shard found; `record` is None where it cannot be read."""

    report: VerifyReport
    record: tuple[ShardRecord, str] | None = None
    eos_inside: int = 0


PIECE_BYTES = 16 * BLOCK_BYTES
"""Read at once: large enough for a disk, small enough to be spread widely."""


def choose(key: str, total: int, share: Fraction) -> list[int]:
    """Choose about `share` of the numbers below `total`, one from each of equal strata.

    Args:
        key: what the choice depends on.
        total: how many there are.
        share: above 0, at most 1.

    Returns:
        ceil(total * share) different numbers, ascending.
    """
    count = -(-total * share.numerator // share.denominator)
    cuts = [total * k // count for k in range(count + 1)] if count else []
    return [
        low + xxhash.xxh3_64_intdigest(f"{key} {low}".encode()) % (high - low)
        for low, high in pairwise(cuts)
    ]


class SamplePlan:
    """Which pieces of which shards a quick look reads.

    Attributes:
        pieces: for each shard, the numbers of the chosen pieces of its token file.
        whole: bool for each shard: whether its ends and document rows are read.
        bytes: most bytes of token files that will be read.
    """

    def __init__(self, manifest: Manifest, share: Fraction, seed: int) -> None:
        sizes = [manifest.tokens_bytes(info) for info in manifest.shards]
        of_shard = [-(-size // PIECE_BYTES) for size in sizes]
        key = f"{seed} {manifest.digest}"
        ends = np.cumsum(of_shard, dtype=np.int64)
        chosen = np.array(choose(f"blocks {key}", sum(of_shard), share), np.int64)
        self.bytes = len(chosen) * PIECE_BYTES
        shard = np.searchsorted(ends, chosen, side="right")
        self.pieces: list[list[int]] = [[] for _ in sizes]
        for index, piece in zip(shard.tolist(), chosen.tolist(), strict=True):
            self.pieces[index].append(piece - int(ends[index]) + of_shard[index])
        self.whole = np.zeros(len(sizes), bool)
        self.whole[choose(f"shards {key}", len(sizes), share)] = True


def check_shard(
    store: Store,
    manifest: Manifest,
    info: ShardInfo,
    seen: Callable[[int], None],
    pieces: Sequence[int] | None = None,
    *,
    whole: bool = True,
) -> ShardResult:
    """Check the files of one shard.

    Args:
        store: of the dataset.
        manifest: what it says.
        info: of the shard.
        seen: called with the number of bytes of each piece of tokens that was read.
        pieces: numbers of the pieces of tokens to read; None: all.
        whole: read the ends and document rows, too; else only their sizes are compared.
    """
    result = ShardResult(VerifyReport(target=info.name))
    report = result.report
    url, ends = store.url(info.name), None
    with report.unreadable(url):
        result.record = check_record(store, manifest, info, report)
    if whole:
        with report.unreadable(url):
            ends = _check_rising(store, info, ENDS, info.documents, info.sha256.ends, report, 1)
    with report.unreadable(url):
        _check_tokens(store, manifest, info, ends, result, seen, pieces)
    with report.unreadable(url):
        if whole:
            check_docs(store, manifest, info, report, result.record)
        elif result.record is not None:
            files = [("ends", info.name + ENDS), ("docs", info.name + DOCS)]
            if info.runs is not msgspec.UNSET:
                files.append(("labels", info.name + LABELS))
            for kind, name in files:
                promised, size = result.record[0].files.get(kind), store.size(name)
                found = "missing" if size is None else size
                report.add(store.url(name), "bytes", promised and promised.bytes, found)
    if whole:
        with report.unreadable(url):
            check_labels(store, info, report)
    if ends is not None and result.record is not None:
        windows = window_counts(ends)
        report.add(store.url(info.name + RECORD), "windows", windows, result.record[0].windows)
    return result


def check_record(
    store: Store, manifest: Manifest, info: ShardInfo, report: VerifyReport
) -> tuple[ShardRecord, str] | None:
    url = store.url(info.name + RECORD)
    data = read_or_report(store, info.name + RECORD, report)
    if data is None:
        return None
    digest = hashlib.sha256(data).hexdigest()
    report.add(url, "sha256", info.sha256.record, digest)
    if digest != info.sha256.record:
        return None  # what stands in it may be anything; the other files are checked without
    try:
        size = manifest.tokens_bytes(info)
        record = ShardRecord.decode(data, url, sha256=digest, token_bytes=size)
    except OlmError as error:
        report.add(url, "content", "a commit record", error.what)
        return None
    for name in ("name", "tokens", "documents", "text_bytes", "max_token_id"):
        report.add(url, name, getattr(info, name), getattr(record, name))
    report.add(url, "plan", manifest.plan_of(info.name), record.plan)
    digests = {kind: found.sha256 for kind, found in record.files.items()}
    wanted = {kind: info.sha256[kind] for kind in ("tokens", "ends", "docs")}
    if info.runs is not msgspec.UNSET:
        wanted["labels"] = info.sha256["labels"]
        for name in ("runs", "trained"):
            report.add(url, name, getattr(info, name), getattr(record, name))
    report.add(url, "files", wanted, digests)
    return record, digest


def check_labels(store: Store, info: ShardInfo, report: VerifyReport) -> None:
    if info.runs is msgspec.UNSET:
        return
    labels = _check_rising(store, info, LABELS, info.runs, info.sha256["labels"], report, 0)
    if labels is not None:
        url = store.url(info.name + LABELS)
        report.add(url, "trained tokens", info.trained, trained_tokens(labels))


def _check_rising(
    store: Store,
    info: ShardInfo,
    kind: str,
    count: int,
    sha256: str,
    report: VerifyReport,
    least: int,
) -> np.ndarray | None:
    """Return uint64 [count], at least `least`, that rise to the token count; None: they do not."""
    url = store.url(info.name + kind)
    header = npy_header(np.dtype(np.uint64), count)
    size = len(header) + 8 * count
    data = read_or_report(store, info.name + kind, report, limit=max(size, MAX_SMALL))
    if data is None:
        return None
    report.add(url, "sha256", sha256, hashlib.sha256(data).hexdigest())
    if len(data) != size:
        report.add(url, "bytes", size, len(data))
        return None
    if not header_fits(url, data, header, report):
        return None
    ends = np.frombuffer(data, "<u8", offset=HEADER_BYTES)
    if len(ends) and (ends[0] < least or bool((ends[1:] <= ends[:-1]).any())):
        report.add(url, "order", "rising ends", "ends that do not rise")
        return None
    last = int(ends[-1]) if len(ends) else 0
    report.add(url, "last end", info.tokens, last)
    return ends if last == info.tokens else None


def _check_tokens(
    store: Store,
    manifest: Manifest,
    info: ShardInfo,
    ends: np.ndarray | None,
    result: ShardResult,
    seen: Callable[[int], None],
    pieces: Sequence[int] | None,
) -> None:
    report, name = result.report, manifest.tokens_name(info)
    url, dtype = store.url(name), np.dtype(manifest.dtype)
    size, expected = store.size(name), manifest.tokens_bytes(info)
    if size != expected:
        report.add(url, "bytes", expected, "missing" if size is None else size)
        return
    sha256, bad, largest = hashlib.sha256(), list[int](), -1
    blocks = result.record[0].blocks if result.record else Blocks(0, "")
    eos, eos_count, eos_at_ends = manifest.tokenizer.eos, 0, 0
    header = file_header(manifest.container, dtype, info.tokens)
    header_fits(url, store.read(name, 0, len(header)), header, report)
    for start, piece in _pieces(store, name, size, pieces):
        seen(len(piece))
        sha256.update(piece)
        view = memoryview(piece)  # slices without copies
        for at in range(start, start + len(piece), blocks.bytes) if blocks.bytes else ():
            found = f"{zlib.crc32(view[at - start : at - start + blocks.bytes]):08x}"
            place = at // blocks.bytes * 8
            bad += [] if found == blocks.crc32[place : place + 8] else [at]
        ids = np.frombuffer(piece, dtype, offset=0 if start else len(header))
        largest = max(largest, int(ids.max(initial=0)))
        if eos is not None and ends is not None:
            position = max(start - len(header), 0) // dtype.itemsize
            is_eos = ids == eos
            eos_count += int(np.count_nonzero(is_eos))
            low, high = np.searchsorted(ends, [position + 1, position + len(ids) + 1])
            eos_at_ends += int(is_eos[ends[low:high].astype(np.int64) - 1 - position].sum())
    if bad:
        span = f"{bad[0]:,} to {bad[0] + blocks.bytes:,}"
        report.add(url, "blocks", "unchanged", f"{len(bad)} changed, first at bytes {span}")
    if largest >= manifest.tokenizer.vocab_size:
        report.add(url, "ids", f"below {manifest.tokenizer.vocab_size}", largest)
    if pieces is not None:
        return
    report.add(url, "sha256", info.sha256.tokens, sha256.hexdigest())
    report.add(url, "max_token_id", info.max_token_id, largest if info.tokens else -1)
    if eos is not None and ends is not None:
        not_ended = result.record[0].not_ended if result.record else 0
        report.add(url, f"documents ending in EOS {eos}", len(ends) - not_ended, eos_at_ends)
        at_starts = len(ends) if manifest.tokenizer.bos == eos else 0
        result.eos_inside = eos_count - eos_at_ends - at_starts


def _pieces(
    store: Store, name: str, size: int, chosen: Sequence[int] | None
) -> Iterator[tuple[int, bytes]]:
    """Yield where each piece of a file begins, and its bytes."""
    if chosen is None:
        large = 4 * PIECE_BYTES
        yield from zip(count(0, large), store.pieces(name, large), strict=False)
        return
    for start in (number * PIECE_BYTES for number in chosen):
        yield start, store.read(name, start, min(start + PIECE_BYTES, size))


def check_docs(
    store: Store,
    manifest: Manifest,
    info: ShardInfo,
    report: VerifyReport,
    record: tuple[ShardRecord, str] | None,
) -> None:
    url = store.url(info.name + DOCS)
    promised = record[0].files.get("docs") if record is not None else None
    size = None if promised is None else promised.bytes
    if not same_bytes(store, info.name + DOCS, size, info.sha256.docs, report):
        return  # damaged pages are not worth parsing
    try:
        rows = DocumentRows(store, info.name, info.documents)
        table = rows.table(["input", "text_bytes", "content_hash"])
    except StorageError:
        raise
    except OlmError as error:
        report.add(url, "content", "the rows of its documents", error.what)
        return
    sizes = table["text_bytes"].to_numpy()
    report.add(url, "sum of text_bytes", info.text_bytes, int(sizes.sum()))
    inputs = table["input"].to_numpy()
    if len(inputs) and not (inputs.min() >= 0 and inputs.max() < len(manifest.inputs)):
        report.add(
            url, "input", f"0 to {len(manifest.inputs) - 1}", f"{inputs.min()} to {inputs.max()}"
        )
    options = manifest.tokenized
    threshold = 0 if options is None else options.holdout_below
    if threshold and (split := manifest.split):
        below = int((table["content_hash"].to_numpy() < np.uint64(threshold)).sum())
        wanted = 0 if split == "train" else table.num_rows
        report.add(url, "documents whose content hash is of the validation split", wanted, below)


def same_bytes(
    store: Store, name: str, size: int | None, sha256: str | None, report: VerifyReport
) -> bool:
    """Note a disagreement unless a file has this size and sha256; return whether it has.

    Args:
        size: in bytes; a file of another size is not read. None: unknown, and bounded.
    """
    url, found = store.url(name), store.size(name)
    if found is None:
        report.add(url, "file", "present", "missing")
    elif size is None and found > MAX_DOCUMENT:
        report.add(url, "bytes", f"at most {MAX_DOCUMENT}", found)
    elif size is not None and found != size:
        report.add(url, "bytes", size, found)
    else:
        digest = store.sha256(name)
        report.add(url, "sha256", sha256, digest)
        return digest == sha256
    return False


def header_fits(url: str, data: bytes, header: bytes, report: VerifyReport) -> bool:
    """Note a disagreement unless a file's first bytes are `header`; return whether they are."""
    found = data[: len(header)]
    if found != header:
        report.add(url, "header", repr(header), repr(found))
    return found == header


def read_or_report(
    store: Store, name: str, report: VerifyReport, *, limit: int = MAX_DOCUMENT
) -> bytes | None:
    with report.unreadable(store.url(name)):
        try:
            return store.read(name, limit=limit)
        except (FileNotFoundError, NotADirectoryError):
            report.add(store.url(name), "file", "present", "missing")
    return None
