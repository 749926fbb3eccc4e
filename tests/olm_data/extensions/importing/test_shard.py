"""One pass over a token file: what cannot be its ids, or is not as it was, is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.importing import make

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, ValidationError
from olm_data.extensions.verify.datasets import verify


def test_what_changes_after_the_import_is_found(files: Path, tmp_path: Path) -> None:
    make(files / "dolma", tmp_path / "out", dtype="uint16")
    with open(files / "dolma" / "part-0-00000.npy", "r+b") as file:
        file.seek(100)
        file.write(b"\x01")
    assert not verify(str(tmp_path / "out")).ok
    with pytest.raises(ValidationError, match="have changed"):
        Dataset.open(str(tmp_path / "out")).read(0, 100)


def test_another_eos_than_the_files_is_refused_and_none_is_possible(
    files: Path, tmp_path: Path
) -> None:
    inputs = files / "megatron" / "uint16.bin"
    with pytest.raises(InputError, match="none of its 40 documents ends in the EOS id 64"):
        make(inputs, tmp_path / "out", eos="a")
    done = make(inputs, tmp_path / "out", eos="none")
    assert done.digest is not None
    assert Dataset.open(done.output).manifest.tokenizer.eos is None
    assert verify(done.output).ok
