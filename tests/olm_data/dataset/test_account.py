"""Accounts add up, or there is an error; packed ids read back as they were."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.dataset.account import (
    BAD_REASONS,
    DROP_REASONS,
    SKIP_REASONS,
    InputAccount,
    check_accounts,
    dropped_of,
    input_digest,
    pack,
    totals_by_input,
    unpack,
)
from olm_data.dataset.inputs import Unit
from olm_data.errors import ValidationError

COUNTS = st.integers(0, 50)
DROPS = st.dictionaries(st.sampled_from([*DROP_REASONS, *SKIP_REASONS]), st.integers(1, 9))


@st.composite
def accounts(draw: st.DrawFn) -> list[InputAccount]:
    return [
        InputAccount(
            input=draw(st.integers(0, 3)),
            units=((number, number + 1),),
            documents=draw(COUNTS),
            held_out=draw(COUNTS),
            dropped=draw(DROPS),
            special_hits=draw(COUNTS),
            bad=(),
            sha256="",
            replaced=draw(COUNTS),
            unknown_tokens=draw(COUNTS),
            unknown_documents=draw(COUNTS),
        )
        for number in range(draw(st.integers(1, 6)))
    ]


@given(accounts())
def test_totals_lose_and_repeat_no_record(given_accounts: list[InputAccount]) -> None:
    totals = totals_by_input(given_accounts)
    assert list(totals) == sorted({each.input for each in given_accounts})
    for field in ("documents", "held_out", "special_hits", "replaced", "documents_in"):
        assert sum(getattr(t, field) for t in totals.values()) == sum(
            getattr(each, field) for each in given_accounts
        )
    assert dropped_of(totals.values()) == dropped_of(given_accounts)


def planned(given_accounts: list[InputAccount]) -> list[Unit]:
    return [
        Unit(input=each.input, start=start, stop=stop, bytes=1)
        for each in given_accounts
        for start, stop in each.units
    ]


WRONG = {
    "documents": "does not add up: documents: ",
    "held_out": "does not add up: documents held out: ",
    "dropped": "does not add up: drops: ",
    "lost": "units read are not the units planned",
    "twice": "units read are not the units planned",
    "shorter": "units read are not the units planned",
}


@given(accounts(), st.sampled_from(sorted(WRONG)))
def test_an_account_that_is_one_off_is_refused(
    given_accounts: list[InputAccount], what: str
) -> None:
    units = planned(given_accounts)
    stored = {
        "documents": sum(each.documents for each in given_accounts),
        "held_out": sum(each.held_out for each in given_accounts),
    }
    dropped = Counter(dropped_of(given_accounts))
    check_accounts("task 0", units, given_accounts, dropped=dropped, **stored)
    if what in ("lost", "twice"):
        units = units[1:] if what == "lost" else [units[0], *units]
    elif what == "shorter":
        units = [msgspec.structs.replace(units[0], stop=units[0].stop + 1), *units[1:]]
    elif what == "dropped":
        dropped["empty"] += 1
    else:
        stored[what] += 1
    with pytest.raises(ValidationError, match=WRONG[what]):
        check_accounts("task 0", units, given_accounts, dropped=dropped, **stored)


@given(st.lists(st.booleans(), max_size=300))
def test_packed_ids_read_back_as_they_were(found: list[bool]) -> None:
    assert unpack(pack(np.array(found, bool)), len(found)).tolist() == found


def test_packed_ids_beyond_the_size_are_refused_before_they_take_memory() -> None:
    with pytest.raises(ValueError, match="more than 2 values"):
        unpack(pack(np.array([False, False, True])), 2)
    bomb = base64.b64encode(zlib.compress(bytes(1 << 20))).decode()
    with pytest.raises(ValueError, match="more than 36 bytes"):
        unpack(bomb, 9)
    with pytest.raises(ValueError, match="header"):
        unpack(base64.b64encode(b"no zlib").decode(), 9)


def test_an_inputs_digest_is_that_of_its_parts_in_order() -> None:
    parts = [hashlib.sha256(text).hexdigest() for text in (b"a", b"b")]
    raw = b"".join(bytes.fromhex(part) for part in parts)
    assert input_digest(parts) == hashlib.sha256(raw).hexdigest() != input_digest(parts[::-1])


def test_every_bad_reason_is_a_reason_and_zeros_stay_out_of_the_file() -> None:
    assert DROP_REASONS.keys() > BAD_REASONS
    empty = InputAccount(
        input=0, units=(), documents=0, held_out=0, dropped={}, special_hits=0, bad=(), sha256=""
    )
    assert b"replaced" not in msgspec.json.encode(empty)
