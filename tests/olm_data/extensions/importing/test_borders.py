"""Where the documents of others' token files end: said by sidecars that fit, or by EOS ids."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.command import inside
from support.importing import EOS, TEXTS, TOKENIZER, make

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError
from olm_data.extensions.verify.datasets import verify
from olm_data.tokenizer.tokenizer import load_tokenizer


def test_ids_sources_and_lines_of_dolma_are_kept(files: Path, tmp_path: Path) -> None:
    make(files / "dolma", tmp_path / "out", dtype="uint16")
    dataset = Dataset.open(str(tmp_path / "out"))
    spec = load_tokenizer(TOKENIZER)
    for number in range(dataset.documents):
        document = dataset.document(number)
        line = document.columns["loc"]
        assert (document.id, document.columns["src"]) == (f'id "{line - 1}", x', "a,b.jsonl.gz")
        assert spec.decode(document.tokens[:-1]) == TEXTS[line - 1].strip()
        assert (document.input, document.position) == ("part-0-00000.npy", number)


def test_without_a_sidecar_documents_end_at_eos_ids_and_that_is_said(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_sidecar = make(files / "dolma", tmp_path / "out", dtype="uint16")
    (files / "dolma" / "part-0-00000.csv.gz").unlink()
    with open(files / "dolma" / "part-0-00000.npy", "r+b") as file:
        file.truncate(2 * (with_sidecar.tokens - 1))  # the last document loses its EOS
    said = inside(
        capsys,
        *("import", files / "dolma", "--tokenizer", TOKENIZER, "--dtype", "uint16"),
        *("--output", tmp_path / "scanned"),
    )
    assert said.returncode == 0, said.stderr
    assert "no .csv.gz; 39 documents found by EOS id 256" in said.stdout
    assert "tokens after the last EOS id are one more" in said.stdout
    assert "scanned    1\nnot ended  1\n" in said.stdout
    found = Dataset.open(str(tmp_path / "scanned"))
    assert found.documents == with_sidecar.documents == 40
    assert verify(str(tmp_path / "scanned")).ok


def csv(folder: Path, change: Callable[[list[str]], list[str]]) -> None:
    path = folder / "dolma" / "part-0-00000.csv.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    path.write_bytes(gzip.compress("".join(f"{x}\r\n" for x in change(lines)).encode()))


def patch(path: Path, place: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(data)


def tokens(folder: Path) -> Path:
    return folder / "dolma" / "part-0-00000.npy"


DOLMA = {
    "a gap": (lambda f: csv(f, lambda x: [x[0], *x[2:]]), "do not tile it: row 2"),
    "the end is missing": (lambda f: csv(f, lambda x: x[:-1]), "its documents end at token"),
    "no number": (lambda f: csv(f, lambda x: ["a" + x[0], *x[1:]]), "malformed"),
    "no gzip": (
        lambda f: (f / "dolma" / "part-0-00000.csv.gz").write_bytes(b"0,1,a,b,c\n"),
        "not a gzip file",
    ),
    "cut": (lambda f: os.truncate(tokens(f), 4012), "its documents end at token 2,007"),
    "half a token": (lambda f: os.truncate(tokens(f), 4013), "not a whole number"),
    "an id too large": (lambda f: patch(tokens(f), 40, b"\xff\xff"), "token 20 is 65,535"),
    "NumPy's own": (lambda f: np.save(tokens(f), np.arange(9, dtype="u2")), "NumPy header"),
}


@pytest.mark.parametrize("defect", DOLMA)
def test_a_file_that_its_sidecar_does_not_fit_is_refused(
    defect: str, files: Path, tmp_path: Path
) -> None:
    spoil, message = DOLMA[defect]
    spoil(files)
    with pytest.raises(InputError, match=message):
        make(files / "dolma", tmp_path / "out", dtype="uint16")
    assert not (tmp_path / "out" / "manifest.json").exists()


def idx(folder: Path) -> Path:
    return folder / "megatron" / "uint16.idx"


MEGATRON = {
    "magic": (lambda f: patch(idx(f), 0, b"x"), "not a Megatron index"),
    "version": (lambda f: patch(idx(f), 9, b"\2"), "version 2"),
    "dtype": (lambda f: patch(idx(f), 17, b"\7"), "dtype code 7"),
    "size": (lambda f: os.truncate(idx(f), 800), "it has 800 bytes"),
    "count": (lambda f: patch(idx(f), 18, b"\xff" * 8), "bytes, not"),
    "length": (lambda f: patch(idx(f), 34, b"\5"), "without a gap"),
    "negative": (lambda f: patch(idx(f), 34, b"\xff" * 4), "without a gap"),
    "document": (lambda f: patch(idx(f), 34 + 12 * 40 + 8, b"\x09"), "tile its sequences"),
    "short": (lambda f: os.truncate(idx(f).with_suffix(".bin"), 4000), ".bin 4,000"),
    "gone": (lambda f: idx(f).unlink(), "there is no .idx"),
}


@pytest.mark.parametrize("defect", MEGATRON)
def test_a_damaged_index_of_megatron_is_refused(defect: str, files: Path, tmp_path: Path) -> None:
    spoil, message = MEGATRON[defect]
    spoil(files)
    with pytest.raises(InputError, match=message):
        make(files / "megatron" / "uint16.bin", tmp_path / "out")


@pytest.mark.parametrize("value", [0, 3, 1 << 40, (1 << 64) - 1])
def test_a_damaged_index_of_datatrove_is_refused(value: int, files: Path, tmp_path: Path) -> None:
    index = files / "datatrove" / "text_00000_unshuffled.ds.index"
    patch(index, 16, value.to_bytes(8, "little"))
    with pytest.raises(InputError, match=r"ends before it begins|leads beyond"):
        make(files / "datatrove", tmp_path / "out")


def test_what_a_sidecar_says_and_a_dataset_does_not_hold_is_said(
    files: Path, tmp_path: Path
) -> None:
    name = files / "datatrove" / "text_00000_unshuffled.ds"
    assert make(name, tmp_path / "plain").notes == []
    mask = Path(f"{name}.loss")  # datatrove's own masks nothing
    mask.write_bytes(bytes(3) + mask.read_bytes()[3:])
    (said,) = make(name, tmp_path / "masked").notes
    assert "3 tokens have no loss by the mask text_00000_unshuffled.ds.loss" in said

    index = idx(files)
    sequences = int.from_bytes(index.read_bytes()[18:26], "little")
    for mode in (0, 1):
        tokens = tmp_path / f"mode{mode}.bin"
        shutil.copy(index.with_suffix(".bin"), tokens)
        modes = bytes([0] * (sequences - 1) + [mode])
        tokens.with_suffix(".idx").write_bytes(index.read_bytes() + modes)
        notes = make(tokens, tmp_path / f"out{mode}").notes
        assert ["modes of its sequences are not read" in note for note in notes] == [True] * mode


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    np.array([1, EOS, 2, EOS], "<u2").tofile(tmp_path / "a.npy")
    rows = "0,0\n0,2\n2,2\n2,4\n4,4\n"
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(rows.encode()))
    done = make(tmp_path / "a.npy", tmp_path / "out", dtype="uint16")
    assert (done.documents, done.empty) == (2, 3)
    dataset = Dataset.open(done.output)
    assert [dataset.document(n).position for n in range(2)] == [1, 3]
    assert (dataset.manifest.dropped, dataset.manifest.totals.documents_in) == ({"empty": 3}, 5)
    assert verify(done.output).ok
