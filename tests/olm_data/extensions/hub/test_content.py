"""What a repository has where a push begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hub_stub import HubStub

from olm_data.errors import ValidationError
from olm_data.extensions.hub.content import Branch, Content
from olm_data.storage.hub import Repository
from olm_data.storage.store import Store


def test_a_file_of_a_branch_is_read_within_its_limit(hub: HubStub, tmp_path: Path) -> None:
    (hub.root / "models/lab/first").mkdir(parents=True)
    (hub.root / "models/lab/first/a.txt").write_text("text")
    place = Repository.parse("hf://lab/first")
    head = place.required_commit()
    branch = Branch(place, head, place.files(head), tmp_path)
    assert branch.read("a.txt", 4) == b"text"
    assert branch.read("b.txt", 4) is None
    with pytest.raises(ValidationError, match="at most 3"):
        branch.read("a.txt", 3)
    assert Branch(place, None, {}, tmp_path).read("a.txt", 4) is None


def test_a_part_lies_in_the_folder(tmp_path: Path) -> None:
    content = Content(Store(str(tmp_path)), "d", {"a.txt": ""}, ("a.txt",))
    assert content.path("a.txt") == tmp_path / "a.txt"
