"""Snapshots: named by what is in them, complete, and refused once anything is otherwise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.launched import git, write_project

from olm_data.errors import UsageError, ValidationError
from olm_train.extensions.launch.snapshot import (
    Snapshot,
    Taken,
    installed,
    take,
    verify,
    verify_surroundings,
)


@pytest.fixture
def project(tmp_path: Path, tiny_mixture: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in git; the package counts as installed, so that only its files are copied."""
    import olm_train

    monkeypatch.setattr(olm_train, "__file__", "/x/site-packages/olm_train/__init__.py")
    return write_project(tmp_path / "project", tiny_mixture).parent


def taken(project: Path, **more: Any) -> Taken:
    facts = Snapshot(
        files={}, paths=(), packages=("a==1",), mixture="m", lock="l", save_folder="s", work_dir="w"
    )
    options: dict[str, Any] = {"untracked": (), "snapshots": project.parent / "snapshots"}
    return take(project, train="seed: 1\n", facts=facts, **options | more)


def test_the_same_files_have_the_same_digest_and_other_bytes_another(project: Path) -> None:
    first = taken(project)
    assert taken(project).digest == first.digest
    (project / "said.py").write_text("changed, not committed\n")
    second = taken(project)
    assert second.digest != first.digest
    copy = Path(second.folder) / "code/0-project/said.py"
    assert copy.read_text() == "changed, not committed\n"
    assert "code one" in (Path(first.folder) / "code/0-project/said.py").read_text()
    (project / "said.py").chmod(0o755)
    assert taken(project).digest not in (first.digest, second.digest)


def test_a_dry_run_knows_the_digest_and_leaves_nothing(project: Path) -> None:
    digest = taken(project, keep=False).digest
    assert not (project.parent / "snapshots").exists()
    assert taken(project).digest == digest


def test_a_removed_file_is_gone_and_a_link_stays_a_link(project: Path) -> None:
    (project / "link").symlink_to("said.py")
    git(project, "add", "link")
    (project / "launch.yaml").unlink()
    found = taken(project)
    assert {*found.snapshot.files} == {
        "train.yaml", "code/0-project/link", "code/0-project/said.py", "code/0-project/train.yaml",
    }  # fmt: skip
    assert os.readlink(Path(found.folder) / "code/0-project/link") == "said.py"


def test_untracked_files_are_in_it_if_they_are_named_and_else_modules_are_told(
    project: Path,
) -> None:
    (project / "new.py").write_text("x = 1\n")
    (project / "words").mkdir()
    (project / "words" / "a.txt").write_text("a\n")
    without = taken(project)
    assert without.notes == ("not in the snapshot, as git does not track them: new.py",)
    found = taken(project, untracked=["new.py", "words"])
    assert found.notes == ()
    assert {*found.snapshot.files} - {*without.snapshot.files} == {
        "code/0-project/new.py", "code/0-project/words/a.txt",
    }  # fmt: skip
    for name in ("no.py", "../outside"):
        with pytest.raises(UsageError, match="is not a file below"):
            taken(project, untracked=[name])


def test_modules_are_found_beside_launch_yaml_and_at_the_root(project: Path) -> None:
    inner = project / "runs" / "first"
    inner.mkdir(parents=True)
    assert taken(inner).snapshot.paths == ("code/0-project/runs/first", "code/0-project")


def test_a_folder_outside_of_git_has_what_is_named(tmp_path: Path, project: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "mine.py").write_text("x = 1\n")
    found = taken(plain, untracked=["mine.py"])
    assert {*found.snapshot.files} == {"train.yaml", "code/0-plain/mine.py"}


def test_a_package_from_nowhere_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import olm_train

    monkeypatch.setattr(olm_train, "__file__", str(tmp_path / "unpacked/olm_train/__init__.py"))
    with pytest.raises(UsageError, match="neither installed nor in a git checkout"):
        taken(project)


@pytest.mark.parametrize("change", ["edit", "add", "remove", "manifest", "all"])
def test_a_changed_snapshot_is_refused(project: Path, change: str) -> None:
    found = taken(project)
    folder = Path(found.folder)
    said = folder / "code/0-project/said.py"
    assert verify(folder, found.digest) == found.snapshot
    if change == "edit":
        said.write_text("edited\n")
    elif change == "add":
        (folder / "code/0-project/torch.py").write_text("")
    elif change == "remove":
        said.unlink()
    elif change == "manifest":
        path = folder / "snapshot.json"
        path.write_text(path.read_text().replace("a==1", "a==2"))
    else:
        folder.rename(folder.parent / "elsewhere")
    with pytest.raises(ValidationError, match=r"changed|not the snapshot|is gone"):
        verify(folder, found.digest)


def test_other_packages_or_another_lock_are_refused(tiny_mixture: Path) -> None:
    from olm_data.mixture.lock import Lock

    lock = Lock.read(str(tiny_mixture)).digest
    here = Snapshot(
        files={}, paths=(), packages=installed(), mixture=str(tiny_mixture), lock=lock,
        save_folder="s", work_dir="w",
    )  # fmt: skip
    verify_surroundings(here)
    verify_surroundings(msgspec.structs.replace(here, packages=()))  # an image has its own
    with pytest.raises(ValidationError, match=r"1 packages are not those .*: torch==0"):
        verify_surroundings(msgspec.structs.replace(here, packages=(*here.packages, "torch==0")))
    with pytest.raises(ValidationError, match="mixture lock is not that"):
        verify_surroundings(msgspec.structs.replace(here, lock="other"))
