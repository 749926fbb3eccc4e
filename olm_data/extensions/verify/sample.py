"""The quick look of `verify --sample`: sizes of everything, and some blocks read and checked.

    share, seed -> strata -> pieces of 1 MiB, spread evenly over all token files
                          -> shards whose ends and document rows are read whole

Of every shard: commit record against the manifest, presence and exact size of all files, header of
the tokens. Of the chosen pieces: checksums of their blocks, ids below the vocabulary size. The
choice depends on the share, the seed and the dataset's digest alone, so that two people look at the
same bytes, and another seed looks at others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import msgspec
import numpy as np
import xxhash

from olm_data.dataset.docs import DOCS
from olm_data.dataset.manifest import Manifest, ShardInfo
from olm_data.dataset.record import BLOCK_BYTES, file_header
from olm_data.dataset.shard import ENDS, LABELS
from olm_data.extensions.verify.shard import (
    ShardResult,
    VerifyReport,
    check_docs,
    check_ends,
    check_labels,
    check_record,
    header_fits,
)
from olm_data.storage.store import Store

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


def check_shard_sample(
    store: Store,
    manifest: Manifest,
    info: ShardInfo,
    pieces: list[int],
    whole: bool,
    seen: Callable[[int], None],
) -> ShardResult:
    """Check one shard in a quick look.

    Args:
        pieces: pieces of the token file to read.
        whole: also read the ends and the document rows.
        seen: called with the number of bytes of each piece.
    """
    result = ShardResult(VerifyReport(target=info.name))
    report = result.report
    with report.unreadable(store.url(info.name)):
        result.record = check_record(store, manifest, info, report)
        if result.record is None:
            return result
        record = result.record[0]
        tokens_name = manifest.tokens_name(info)
        for kind, name in (
            ("tokens", tokens_name),
            ("ends", info.name + ENDS),
            ("docs", info.name + DOCS),
            *([] if info.runs is msgspec.UNSET else [("labels", info.name + LABELS)]),
        ):
            promised = record.files.get(kind)
            size = store.size(name)
            wanted = None if promised is None else promised.bytes
            report.add(store.url(name), "bytes", wanted, "missing" if size is None else size)
        if report.findings:
            return result
        tokens = store.url(tokens_name)
        dtype = np.dtype(manifest.dtype)
        header = file_header(manifest.container, dtype, info.tokens)
        header_fits(tokens, store.read(tokens_name, 0, len(header)), header, report)
        crc32 = record.blocks.crc32
        size = manifest.tokens_bytes(info)
        for piece in pieces:
            start = piece * PIECE_BYTES
            data = store.read(tokens_name, start, min(start + PIECE_BYTES, size))
            seen(len(data))
            for offset in range(0, len(data), BLOCK_BYTES):
                at = (start + offset) // BLOCK_BYTES
                found = f"{zlib.crc32(data[offset : offset + BLOCK_BYTES]):08x}"
                report.add(tokens, f"block {at}", crc32[at * 8 : at * 8 + 8], found)
            ids = np.frombuffer(data, dtype, offset=len(header) if start == 0 else 0)
            largest = int(ids.max(initial=0))
            if largest >= manifest.tokenizer.vocab_size:
                report.add(tokens, "ids", f"below {manifest.tokenizer.vocab_size}", largest)
        if whole:
            check_ends(store, info, report)
            check_labels(store, info, report)
            check_docs(store, manifest, info, report, result.record)
    return result
