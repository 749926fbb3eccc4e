"""What may be removed: never the newest good checkpoint, never more than the rule says."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from olm_train.checkpoint.manifest import Kind
from olm_train.checkpoint.place import candidates, remove_checkpoint, remove_partial
from olm_train.checkpoint.policy import Removal, removable

known = st.dictionaries(st.integers(0, 99), st.sampled_from(Kind), min_size=1)


@given(known, st.sampled_from(Removal), st.data())
def test_the_newest_good_one_newer_ones_and_permanent_ones_stay(
    kinds: dict[int, Kind], rule: Removal, data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(sorted(kinds)))
    gone = removable(kinds, newest, rule)
    assert gone == sorted(set(gone))
    for step in gone:
        assert step < newest
        assert kinds[step] is not Kind.permanent


def test_each_rule_removes_what_it_says() -> None:
    kinds = {1: Kind.permanent, 2: Kind.ephemeral, 3: Kind.final, 4: Kind.ephemeral}
    assert removable(kinds, 4, Removal.ephemeral_only) == [2]
    assert removable(kinds, 4, Removal.all_non_permanent) == [2, 3]
    assert removable(kinds, 4, Removal.never) == []


def test_removal_takes_the_name_away_first_and_partial_ones_are_cleaned(tmp_path: Path) -> None:
    for name in ("step00000001", "step00000002", "step00000003.tmp", "mine.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    remove_checkpoint(tmp_path, 1)
    assert candidates(tmp_path) == ["step00000002"]
    assert remove_partial(tmp_path) == ["step00000003.tmp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.tmp", "step00000002"]
