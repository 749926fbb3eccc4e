"""Folders for unfinished work outlive no writer, and no living writer loses one."""

from __future__ import annotations

from pathlib import Path

from olm_data.storage.disk import BESIDE, LOCK, abandoned, scratch


def test_a_folder_is_gone_after_its_block_and_in_use_during_it(tmp_path: Path) -> None:
    with scratch(tmp_path) as folder:
        (folder / "a").write_text("x")
        assert folder.name.startswith(BESIDE)
        assert abandoned(tmp_path, remove=True) == []
        assert (folder / "a").exists()
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_writer_left_is_found_and_removed_only_if_asked(tmp_path: Path) -> None:
    with scratch(tmp_path) as folder:
        left = folder.with_name(folder.name + "x")
        left.mkdir()
        host, machine, _, started = (folder / LOCK).read_text().split(" ")
        (left / LOCK).write_text(f"{host} {machine} {2**22 + 1} {started}")
    assert abandoned(tmp_path) == [left]
    assert left.exists()
    assert abandoned(tmp_path, remove=True) == [left]
    assert not left.exists()
