"""How the ids that two encoders give differ."""

from __future__ import annotations

import numpy as np

from olm_data.encoders.base import Ids, ids_of


def differences(wanted: Ids, got: Ids) -> list[int]:
    """Return which documents have other ids in `got`; all where not even their number agrees."""
    documents = len(wanted[1]) - 1
    if len(got[1]) != len(wanted[1]):
        return list(range(documents))
    if np.array_equal(wanted[1], got[1]) and np.array_equal(wanted[0], got[0]):
        return []
    return [
        k for k in range(documents) if not np.array_equal(ids_of(wanted, k), ids_of(got, k))
    ] or list(range(documents))


def compare(wanted: Ids, got: Ids) -> str:
    """Return "" where both are the same, or a sentence naming the first difference."""
    differ = differences(wanted, got)
    if not differ:
        return ""
    k = differ[0]
    if len(got[1]) != len(wanted[1]):
        return f"{len(got[1]) - 1} documents, not {len(wanted[1]) - 1}"
    one, other = ids_of(wanted, k), ids_of(got, k)
    if np.array_equal(one, other):
        return "the offsets of the documents differ"
    return f"document {k} of the sample: {first_difference(one, other)}"


def first_difference(wanted: np.ndarray, got: np.ndarray) -> str:
    """Say in words where two rows of ids part."""
    common = min(len(wanted), len(got))
    differ = np.flatnonzero(wanted[:common] != got[:common])
    if len(differ):
        at = int(differ[0])
        return f"token {at} is {int(got[at])}, not {int(wanted[at])}"
    return f"{len(got)} tokens, not {len(wanted)}"
