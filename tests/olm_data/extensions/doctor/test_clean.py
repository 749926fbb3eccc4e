"""What `doctor --clean` takes for a leftover; tests/faults/test_12_leftovers.py deletes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from olm_data.errors import UsageError
from olm_data.extensions.doctor.doctor import clean, parse_age
from olm_data.storage.lease import LONGEST_TAKEOVER


@pytest.mark.parametrize(
    ("text", "seconds"), [("0s", 0), ("30m", 1800), ("12h", 43_200), ("1d", 86_400)]
)
def test_an_age_has_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "d", "1w", "-1d", "1.5h", "1d ", "1 d", "99999999d"])
def test_what_spells_no_age_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="is not an age") as caught:
        parse_age(text)
    assert "12h" in str(caught.value)


def test_a_name_tells_what_a_file_may_be_and_a_lease_must_be_older_than_a_takeover(
    tmp_path: Path,
) -> None:
    kinds = {
        ".olm-probe-" + "0" * 32: "probe",
        "run/host.json": "heartbeat",
        "plan.json": None,
        "other/run/host.json": None,  # no plan beside it
        "shard-00000.tokens.npy": None,
    }
    for name in kinds:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (0, 0))
    found = clean(str(tmp_path), 1, dry_run=True)
    mine = {item.name: item.kind for item in found.found if item.kind != "scratch"}
    assert mine == {str(tmp_path / name): kind for name, kind in kinds.items() if kind}
    assert LONGEST_TAKEOVER > 1
    assert not found.deleted
    assert len(list(tmp_path.rglob("*.json"))) == 3
