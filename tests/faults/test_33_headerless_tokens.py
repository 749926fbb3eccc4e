"""FAULTS row 33: tokens without header are never read with a guessed type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from olm_data.errors import InputError, UsageError
from olm_data.extensions.importing.import_files import import_files
from olm_data.tokenizer.tokenizer import load_tokenizer

TOKENIZER = Path(__file__).parents[1] / "support" / "foreign" / "tokenizer.json"
IDS = np.append(np.arange(1, 200) % 200, 256)


def imported(path: Path, dtype: str | None) -> int:
    tokenizer, output = load_tokenizer(TOKENIZER), str(path.parent / "out")
    return import_files([str(path)], output, tokenizer, dtype=dtype).tokens


def test_33_the_type_of_a_raw_file_is_asked_for(tmp_path: Path) -> None:
    IDS.astype("<u2").tofile(tmp_path / "a.npy")
    with pytest.raises(UsageError, match="do not say how wide"):
        imported(tmp_path / "a.npy", None)
    assert not (tmp_path / "out").exists()
    assert imported(tmp_path / "a.npy", "uint16") == 200


@pytest.mark.parametrize(
    ("written", "said"),
    [("<u4", "uint16"), ("<u2", "uint32"), (">u2", "uint16"), (">u4", "uint32")],
)
def test_33_a_raw_file_of_another_type_or_byte_order_is_refused(
    written: str, said: str, tmp_path: Path
) -> None:
    IDS.astype(written).tofile(tmp_path / "a.npy")
    with pytest.raises(InputError, match=r"every second value is 0|entries"):
        imported(tmp_path / "a.npy", said)


def test_33_a_file_with_a_header_is_not_read_as_raw(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IDS.astype("<u2"))
    with pytest.raises(InputError, match="NumPy header"):
        imported(tmp_path / "a.npy", "uint16")
