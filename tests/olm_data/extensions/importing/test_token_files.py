"""Which token files a name stands for; nothing among them goes unnamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.command import inside
from support.importing import SETS, TEXTS, TOKENIZER, decoded, make

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError
from olm_data.extensions.exporting.export import export


@pytest.mark.parametrize("form", ["megatron", "olmo-core", "datatrove"])
def test_a_folder_of_our_own_export_is_imported_whole(
    form: str, files: Path, tmp_path: Path
) -> None:
    names = list(SETS)
    for number, name in enumerate(names):
        make(files / name, tmp_path / f"set-{number}", dtype=SETS[name])
        exported = tmp_path / f"{form}-{number}"
        export(str(tmp_path / f"set-{number}"), form, str(exported))
        assert any(path.name.startswith("shard-00000.") for path in exported.iterdir())
        stored = Dataset.open(str(tmp_path / f"set-{number}"))
        told = stored.dtype.name if form == "olmo-core" else None  # the others say it themselves
        done = make(exported, tmp_path / f"back-{number}", dtype=told, strict_inputs=True)
        assert (done.files, done.documents) == (1, len(TEXTS))
        assert done.passed_over == {}
        back = Dataset.open(str(tmp_path / f"back-{number}"))
        assert sorted(decoded(back)) == sorted(
            decoded(Dataset.open(str(tmp_path / f"set-{number}")))
        )


def test_the_links_of_a_killed_import_below_its_own_inputs_are_no_inputs(
    files: Path, tmp_path: Path
) -> None:
    folder = files / "dolma"
    whole = make(folder, tmp_path / "whole", dtype="uint16")
    (folder / "out").mkdir()
    os.link(next(folder.glob("*.npy")), folder / "out" / "shard-00000.tokens.bin")
    assert make(folder, folder / "out", dtype="uint16", strict_inputs=True).digest == whole.digest


def test_no_name_hides_a_token_file_and_what_is_not_imported_is_named_and_counted(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    stems = ["shard-00000", "shard-1", "shard-00001.tokens", "manifest", "part"]
    for stem in stems:
        for suffix in ("bin", "idx"):
            shutil.copy(files / "megatron" / f"int32.{suffix}", folder / f"{stem}.{suffix}")
    (folder / "README.md").write_text("about")
    (folder / ".hidden.bin").write_bytes(b"x")
    (folder / "orphan.idx").write_bytes(b"x")
    words = ("import", folder, "--tokenizer", TOKENIZER, "-o", tmp_path / "out")
    refused = inside(capsys, *words, "--strict-inputs")
    assert refused.returncode == 4
    assert "README.md" in refused.stderr
    said = inside(capsys, *words)
    assert said.returncode == 0, said.stderr
    assert f"files        {len(stems)}\n" in said.stdout
    for reason, name in (("format", "README.md"), ("hidden", ".hidden.bin")):
        assert f"{reason}: count 1, names {name}\n" in said.stdout
    assert "sidecar: count 1, names orphan.idx\n" in said.stdout
    tools = Dataset.open(str(tmp_path / "out")).manifest.tools
    assert tools.passed_over["sidecar"].names == ["orphan.idx"]


def test_the_files_of_a_dataset_beside_token_files_are_no_token_files(
    files: Path, tmp_path: Path
) -> None:
    folder = files / "megatron"
    os.remove(folder / "uint16.bin")
    os.remove(folder / "uint16.idx")
    first = make(folder, folder)  # in place: its own shard-*.ends.npy are there from now on
    assert first.passed_over == {}
    manifest = (folder / "manifest.json").read_bytes()
    os.remove(folder / "manifest.json")
    again = make(folder, folder)
    assert (folder / "manifest.json").read_bytes() == manifest
    assert (again.digest, again.files) == (first.digest, first.files)
    other = make(folder, tmp_path / "other")
    assert other.files == first.files
    assert other.passed_over["dataset"].count >= 2 * first.files


@pytest.mark.parametrize("named", ["int32", "int32.idx", "int32.bin"])
def test_a_megatron_prefix_names_its_pair(named: str, files: Path, tmp_path: Path) -> None:
    done = make(files / "megatron" / named, tmp_path / "out")
    assert decoded(Dataset.open(str(tmp_path / "out"))) == TEXTS
    assert (done.files, done.passed_over) == (1, {})


def test_a_prefix_of_nothing_is_refused(files: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no token file here"):
        make(files / "megatron" / "int", tmp_path / "out")


def test_copies_among_the_files_are_said(files: Path, tmp_path: Path) -> None:
    first, second = files / "megatron" / "int32.bin", tmp_path / "copy" / "other.bin"
    second.parent.mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(first.with_suffix(suffix), second.with_suffix(suffix))
    assert make(first, tmp_path / "one").notes == []
    (said,) = make([first, second], tmp_path / "both").notes
    assert said.startswith(f"{second} holds the tokens of {first}")
