"""`--dedup minhash`: keys by which near-duplicates meet, for the passes of `dedup.py`.

    text -> words, lower case -> hashes of all 5 words in a row -> rensa -> signature uint32 [b * r]
         -> of each band of r numbers its hash -> b keys (hash, number of the band) a document

Two documents share a key with the probability 1 - (1 - J^r)^b, J being the Jaccard similarity of
their sets of 5 words; half of the pairs at J = (1/b)^(1/r) do. A document that shares a key with
one before it is dropped, whatever became of that one. Signatures differ between versions of rensa.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from olm_data.errors import UsageError
from olm_data.runners.base import Report
from olm_data.select.selection import content_hashes, document_digests
from olm_data.sources.base import DocumentBatch
from olm_data.tokenization.duplicates import Keys

WORDS = 5
MOST_NUMBERS = 4096
_SEED = 1
_WORD = re.compile(r"\w+")
_FACTOR = 0x9E3779B97F4A7C15


def parse_bands(text: str) -> tuple[int, int]:
    """Return the bands and rows that `14x8` spells.

    Raises:
        UsageError: it spells none.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})", text)
    if found is None or int(found[1]) * int(found[2]) > MOST_NUMBERS:
        raise UsageError(
            f"--minhash {text!r} is not BANDSxROWS, of at most {MOST_NUMBERS} numbers",
            fix="write 14x8, which finds texts that share 72 % of their 5 words in a row",
        )
    return int(found[1]), int(found[2])


def shingles(text: str) -> np.ndarray:
    """Return uint64 hashes of all five words in a row; of a shorter text, one of all words."""
    words = [word.encode() for word in _WORD.findall(text.lower()) or [text]]
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, words), np.uint64, len(words))
    return window_hashes(np.pad(hashes, (0, max(WORDS - len(hashes), 0))), WORDS)


def window_hashes(values: np.ndarray, length: int) -> np.ndarray:
    """Return uint64 [k - length + 1]: hashes of all `length` values of uint64 [k] in a row."""
    count = len(values) - length + 1
    result = np.zeros(count, np.uint64)
    for k in range(length):
        result += values[k : k + count] * np.uint64(pow(_FACTOR, k, 1 << 64))
    return result


def find_band_keys(
    batches: Iterable[DocumentBatch], bands: int, rows: int, report: Report
) -> Iterator[Keys]:
    """Yield the keys of all documents, in order, `bands` a document."""
    import rensa

    for batch in batches:
        if batch.documents:
            sets = [shingles(batch.text(k)) for k in range(batch.documents)]
            ends = np.cumsum([0, *map(len, sets)], dtype=np.uint64)
            matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
                np.concatenate(sets), ends, bands * rows, _SEED
            )
            signatures = np.array(matrix.to_rows(), "<u4")
            places = np.arange(0, signatures.nbytes + 1, 4 * rows)
            hashes = content_hashes(document_digests(signatures.view(np.uint8).ravel(), places))
            yield hashes, np.tile(np.arange(bands), batch.documents)
        report(documents=batch.documents, text_bytes=len(batch.data))
