"""Stages and groups of a manifest: what weights may say, and where they come from."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from pathlib import Path

import pytest
from support.stand_in import parse_mixture, stand_in_dataset

from olm_data.errors import InputError, UsageError
from olm_data.mixture.mix import MixPlan

HEAD = "version: 1\nseed: 3\nsequence_length: 10\non_exhausted: error\nsources:\n"


def test_weights_from_a_file_are_those_of_the_file_and_its_digest_is_locked(tmp_path: Path) -> None:
    raw = b'{"web": 0.30000000000000004, "code": 7e-1}\n'
    (tmp_path / "weights.json").write_bytes(raw)
    head = HEAD + "  web: {data: ./web}\n  code: {data: ./code}\n"
    text = head + "stages:\n  - {name: a, tokens: 1K, weights_file: weights.json}\n"
    mixture = parse_mixture(text, folder=str(tmp_path))
    opened = {name: stand_in_dataset(name, 10_001) for name in ("web", "code")}
    lock = MixPlan(mixture, opened).compile()
    assert lock.stages[0].weights_file == {
        "name": "weights.json",
        "sha256": hashlib.sha256(raw).hexdigest(),
    }
    share = Fraction("0.30000000000000004")
    assert Fraction(lock.stages[0].wanted[1]) == share / (share + Fraction("0.7"))
    (tmp_path / "weights.json").write_text('{"web": 1,\n "cod": 2}')
    with pytest.raises(UsageError, match="no source 'cod'") as error:
        parse_mixture(text, folder=str(tmp_path))
    assert str(error.value.where).endswith("weights.json:2")
    (tmp_path / "weights.json").unlink()
    with pytest.raises(InputError, match="cannot read the file with the weights") as missing:
        parse_mixture(text, folder=str(tmp_path))
    assert "(from manifest.yaml:9)" in str(missing.value)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ("{code: {web: 1, code: 1}}", "group 'code' contains itself: code > code"),
        ("{code: {hard: 1}, hard: {code: 1}}", "contains itself: hard > code > hard"),
        ("{a: {web: 1}, b: {a: 1, web: 1}}", "source 'web' is reached twice"),
        ("{web: {c: 1}}", "'web' is a source and a group"),
        ("{a: {wep: 1}}", "no source 'wep'"),
        ("{a: {web: 0}}", "sum to 0"),
        ("{a: {}}", "groups.a is empty"),
    ],
)
def test_groups_that_are_no_tree_are_refused_with_their_line(groups: str, says: str) -> None:
    text = HEAD + "  web: {data: ./web}\n  c: {data: ./c}\n"
    with pytest.raises(UsageError) as error:
        parse_mixture(text + f"groups: {groups}\nstages: [{{name: a, epochs: {{web: 1}}}}]\n")
    assert says in str(error.value)
    assert error.value.where == "manifest.yaml:8"
