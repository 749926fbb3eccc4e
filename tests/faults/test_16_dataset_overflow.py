"""Row 16, tokenise: counts beyond 2^31 and 2^32 tokens, bytes, rows and documents are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import plan_of
from support.small_datasets import write_dataset

from olm_data.dataset.account import InputAccount, check_accounts, totals_by_input
from olm_data.dataset.inputs import Unit
from olm_data.dataset.record import HEADER_BYTES, TOKENS, npy_header, window_counts
from olm_data.dataset.shard import ENDS, Shard
from olm_data.storage.store import Store
from olm_data.tokenization.batches import delimit
from olm_data.tokenization.recipe import parse_budget

ENDS_OF = np.array([2**31 - 1, 2**31 + 5, 2**32 + 7, 2**32 + 9], np.uint64)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_tokens_beyond_2_to_the_32_are_read_where_they_are(dtype: str, tmp_path: Path) -> None:
    kind, total = np.dtype(dtype), int(ENDS_OF[-1])
    with open(tmp_path / f"shard-00000{TOKENS}", "wb") as file:  # sparse: 8 and 17 GB of nothing
        file.write(npy_header(kind, total))
        file.truncate(HEADER_BYTES + total * kind.itemsize)
        for place in (2**31 - 2, 2**32 + 6, total - 1):
            file.seek(HEADER_BYTES + place * kind.itemsize)
            file.write(np.array([place % 60_000], kind).tobytes())
    ends = npy_header(np.dtype(np.uint64), 4) + ENDS_OF.tobytes()
    (tmp_path / f"shard-00000{ENDS}").write_bytes(ends)
    manifest = msgspec.structs.replace(write_dataset(tmp_path / "small", [[[1]]]), dtype=kind.name)
    info = msgspec.structs.replace(manifest.shards[0], tokens=total, documents=4)
    shard = Shard(Store(tmp_path), manifest, info, verify="off")
    last = (total - 1) % 60_000
    assert shard.read(2**31 - 3, 2**31).tolist() == [0, (2**31 - 2) % 60_000, 0]
    assert shard.read(2**32 + 5, total).tolist() == [0, (2**32 + 6) % 60_000, 0, last]
    assert np.load(tmp_path / f"shard-00000{TOKENS}", mmap_mode="r")[total - 1] == last


def test_window_counts_of_ends_beyond_2_to_the_32_are_exact() -> None:
    counts = window_counts(ENDS_OF)
    assert list(counts["64"]) == [2, 1, 1]  # starts at 0 | 2^31 - 1, 2^31 + 5 | 2^32 + 7
    assert all(last <= most for most, _, last in counts.values())


def test_a_plan_of_exabytes_covers_every_byte_once() -> None:
    size, cut = 2**62, 2**58 + 3
    units = [(0, at, min(at + cut, size), min(cut, size - at)) for at in range(0, size, cut)]
    plan = plan_of([("a", size, "r")], units, 2**60)
    covered = [plan.units[k] for start, stop in plan.tasks for k in range(start, stop)]
    assert [msgspec.structs.astuple(unit) for unit in covered] == units
    assert sum(plan.text_bytes(task) for task in range(len(plan.tasks))) == size


@given(counts=st.lists(st.integers(0, 2**60), min_size=2, max_size=9))
def test_accounts_add_up_whatever_their_size(counts: list[int]) -> None:
    accounts = [
        InputAccount(
            input=0,
            units=((k, k + 1),),
            documents=n,
            held_out=0,
            dropped={"empty": n},
            special_hits=0,
            bad=(),
            sha256="",
        )
        for k, n in enumerate(counts)
    ]
    total = totals_by_input(accounts)[0]
    assert total.documents_in == 2 * sum(counts)
    sums: dict[str, Any] = {"held_out": 0, "dropped": {"empty": sum(counts)}}
    units = [Unit(input=0, start=k, stop=k + 1, bytes=1) for k in range(len(counts))]
    check_accounts("t", units, accounts, documents=sum(counts), **sums)


def test_a_share_of_2_to_the_63_records_is_exact() -> None:
    budget = parse_budget("0.1%")
    assert budget.allows(2**63 // 1000, 2**63)
    assert not budget.allows(2**63 // 1000 + 1, 2**63)


def test_offsets_stay_64_bit_through_the_marks() -> None:
    none, chosen = np.zeros(0, np.uint32), np.ones(3, bool)
    ids, offsets = delimit(none, np.zeros(4, np.int64), chosen, bos=1, eos=2)
    assert (ids.dtype, offsets.dtype) == (np.uint32, np.int64)
    assert offsets.tolist() == [0, 2, 4, 6]
