"""What this program keeps in a folder while it works is known to whoever reads the folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.importing import FOREIGN, make

from olm_data.dataset.folder import refuse_dataset_folder
from olm_data.sources.listing import list_files
from olm_data.storage.destination import CLAIM, LocalFolder
from olm_data.storage.disk import scratch
from olm_data.storage.exclusive import PROBE, exclusive
from olm_data.storage.lease import SHORTEST_TAKEOVER
from olm_data.storage.names import is_working
from olm_data.storage.store import WORKER_PREFIX, Store

KILLED = (
    ".lease-000003.json",
    f"{PROBE}{'0a' * 16}",
    CLAIM,
    ".staging-ab_c12z8/part.npy",
    ".worker-3~abcd1234/part.npy",
    ".olm-staging-host.name-77-abcd1234/.lock",
    ".out.exporting-000001/a.npy",
    ".out.exporting-lease-000001.json",
    ".web.pulling/a.npy",
    ".web.pulling-lease-000001.json",
)


def test_what_a_writer_makes_in_a_folder_is_known_as_its_own(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    worker = Store(str(tmp_path), staging_prefix=f"{WORKER_PREFIX}a-b.7~")
    with (
        exclusive(store),
        store.staging(),
        worker.staging(),
        scratch(tmp_path),
        LocalFolder(str(tmp_path / "out")).draft(b""),
    ):
        made = {path.name for path in tmp_path.iterdir()}
        assert len(made) == 6
        assert all(map(is_working, made))


def test_what_killed_writers_left_is_no_input_and_in_the_way_of_no_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The lease that cannot be read holds for so long.
    defaults = exclusive.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
    monkeypatch.setitem(defaults, "takeover", SHORTEST_TAKEOVER)
    clean, folder = FOREIGN / "dolma", tmp_path / "in"
    expected = make(clean, tmp_path / "clean", dtype="uint16", strict_inputs=True)
    folder.mkdir()
    for path in clean.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name in KILLED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    done = make(folder, folder, dtype="uint16", strict_inputs=True)
    assert (done.tokens, done.passed_over) == (expected.tokens, {})
    assert b"passed_over" not in (folder / "manifest.json").read_bytes()


@pytest.mark.parametrize("name", KILLED)
def test_what_a_killed_writer_left_is_in_no_listing(name: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    (texts / name).parent.mkdir(parents=True)
    (texts / name).write_text("{}")
    refuse_dataset_folder(Store(str(texts)))
    (texts / "a.txt").write_text("a")
    for argument in (texts, texts / "*", texts / "**"):
        assert list_files([str(argument)]).passed == ()


@pytest.mark.parametrize(
    "name", [".lease-mine.json", ".staging-notes.npy", ".hidden.npy", "lease-000001.json", ".web"]
)
def test_a_users_own_hidden_file_is_still_said(name: str, tmp_path: Path) -> None:
    assert not is_working(name)
    for each in (name, "a.txt"):
        (tmp_path / each).write_text("{}")
    listing = list_files([str(tmp_path)])
    assert {Path(f.path).name for f in (*listing.files, *listing.passed)} == {name, "a.txt"}
