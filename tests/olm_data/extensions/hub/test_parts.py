"""The parts of a dataset are what its manifest and its plans name: with them alone it verifies."""

from __future__ import annotations

import shutil
from pathlib import Path

from olm_data.dataset.manifest import MANIFEST
from olm_data.extensions.hub.parts import dataset_parts
from olm_data.storage.store import Store
from olm_data.verify.datasets import verify


def test_the_parts_are_a_whole_dataset_and_each_is_needed(books: Path, tmp_path: Path) -> None:
    store = Store(str(books))
    parts = {**dataset_parts(store, store.exists), MANIFEST: ""}
    assert not {name for name in parts if name.startswith(("run/", "quarantine/", "."))}
    for name in parts:
        place = tmp_path / "copy" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(books / name, place)
    assert verify(str(tmp_path / "copy")).ok
    for name in sorted(parts.keys() - {MANIFEST}):
        (tmp_path / "copy" / name).rename(tmp_path / "aside")
        assert not verify(str(tmp_path / "copy")).ok, name
        (tmp_path / "aside").rename(tmp_path / "copy" / name)


def test_digests_are_those_of_the_manifest(books: Path) -> None:
    store = Store(str(books))
    parts = dataset_parts(store, store.exists)
    known = {name: sha256 for name, sha256 in parts.items() if sha256}
    assert {"tokenizer.json", "shard-00000.tokens.npy", "validation/tokenizer.json"} <= known.keys()
    assert {name: store.sha256(name) for name in known} == known
