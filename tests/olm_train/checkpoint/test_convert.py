"""Old checkpoints: their pickles make nothing but inert records, and nothing is written over."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path

import pytest

from olm_data.errors import ConflictError, InputError, ValidationError
from olm_data.storage.store import Store
from olm_train.checkpoint.convert import PickledCheckpoint, Restricted, convert

STORED = Path(__file__).parent / "version-1/step00000002"


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def test_an_index_that_names_what_it_is_not_made_of_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"names posix\.system"):
        Restricted(io.BytesIO(pickle.dumps(Payload()))).load()


def test_each_piece_has_a_shape_or_is_a_plain_value() -> None:
    found = PickledCheckpoint(Store(str(STORED)))
    names = {piece.name for piece in found.pieces()}
    assert names >= found.shapes.keys()
    assert found.manifest.version == 1


def test_a_run_in_the_new_folder_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "step00000001").mkdir()
    with pytest.raises(ConflictError, match="a run here already, with the checkpoint step00000001"):
        convert(str(STORED), str(tmp_path), print)


def test_a_folder_without_a_checkpoint_that_verifies_is_refused(tmp_path: Path) -> None:
    told: list[str] = []
    damaged = shutil.copytree(STORED, tmp_path / "old" / STORED.name)
    (damaged / "train.json").write_text("{}")
    with pytest.raises(InputError, match="no checkpoint that verifies"):
        convert(str(tmp_path / "old"), str(tmp_path / "new"), told.append)
    assert ["train.json has 2 bytes instead of" in line for line in told] == [True]
    assert not (tmp_path / "new").exists()
