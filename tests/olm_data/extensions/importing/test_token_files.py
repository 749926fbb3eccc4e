"""Which token files a name stands for; nothing among them goes unnamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.command import Olm
from support.importing import EOS, SETS, TEXTS, TOKENIZER, decoded, make

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, UsageError
from olm_data.extensions.exporting.export import export
from olm_data.extensions.importing.token_files import DTYPES, advice, defect, looks_like


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
    files: Path, tmp_path: Path, olm: Olm
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
    refused = olm(*words, "--strict-inputs")
    assert refused.returncode == 4
    assert "README.md" in refused.stderr
    said = olm(*words)
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


# The dtype of a token file is believed only where its bytes can be ids of it.
WRITTEN = [dtype.str for dtype in DTYPES]


def text_like(seed: int, count: int, vocab: int, eos: int) -> np.ndarray:
    """Return ids as tokenizers give them: common tokens low, and an EOS id now and then."""
    draw = np.random.default_rng(seed)
    ids = np.minimum((vocab ** draw.random(count)).astype(np.int64), vocab - 1)
    ids[draw.random(count) < 0.02] = eos
    return ids


@settings(max_examples=150)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(8, 3_000),
    st.sampled_from([300, 5_000, 32_000, 50_257, 65_024, 65_536, 100_278, 262_144]),
    st.booleans(),
    st.sampled_from(WRITTEN),
    st.sampled_from(["uint16", "uint32"]),
)
@example(1, 12, 50_257, True, "<i8", "uint32")
@example(1, 3_000, 65_536, True, ">u2", "uint16")
def test_ids_written_with_another_dtype_are_never_taken(
    seed: int, count: int, vocab: int, first_ends: bool, written: str, said: str
) -> None:
    if vocab > 1 << 16 and "uint16" in (np.dtype(written).name, said):
        return
    ids = text_like(seed, count, vocab, 0 if first_ends else vocab - 1)
    if (ids < 256).sum() > count - 4:
        return  # as good as no high byte: nothing tells the orders apart
    data = ids.astype(written).tobytes()
    right = np.dtype(written) == np.dtype(said)
    if right or count > 100 or written != ">u2" or said != "uint16":  # an order needs repetitions
        assert (defect(data, np.dtype(said), vocab) is None) == right
    if count > 100 or not written.startswith(">"):
        assert looks_like(data, vocab) == np.dtype(written)


@settings(max_examples=50)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(200, 3_000),
    st.sampled_from([5_000, 50_257, 65_024, 65_536]),
    st.booleans(),
    st.floats(0, 0.9),
    st.sampled_from(WRITTEN),
)
@example(1, 3_000, 65_536, False, 0.7, ">u2")
def test_padding_does_not_hide_what_is_written(
    seed: int, count: int, vocab: int, first_pads: bool, share: float, written: str
) -> None:
    padding = 0 if first_pads else vocab - 1
    ids = text_like(seed, count, vocab, padding)
    ids = np.append(ids, np.full(int(count * share / (1 - share)), padding))
    data = ids[: len(ids) // 8 * 8].astype(written).tobytes()
    for said in ("uint16", "uint32"):
        right = np.dtype(written) == np.dtype(said)
        assert (defect(data, np.dtype(said), vocab) is None) == right


@pytest.mark.parametrize("size", [0, 2, 4, 8, 14, 24])
def test_a_few_values_are_nothing_to_go_by(size: int) -> None:
    data = np.array([5, 0, 7, 0] * 6, "<u2").tobytes()[:size]
    assert (defect(data, np.dtype("uint16"), 1_000) is None) == (size < 16)


def test_a_sidecar_proves_the_width_so_that_zeros_in_turn_are_tokens() -> None:
    data = np.array([5, 0] * 500, "<u2").tobytes()
    assert defect(data, np.dtype("uint16"), 1_000)
    assert defect(data, np.dtype("uint16"), 1_000, width_known=True) is None


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("said", ["uint16", "uint32"])
def test_an_import_has_the_ids_of_the_file_or_says_what_it_looks_like(
    written: str, said: str, tmp_path: Path
) -> None:
    ids = text_like(7, 400, EOS, EOS)
    ids.astype(written).tofile(tmp_path / "a.npy")
    if np.dtype(written) == np.dtype(said):
        assert make(tmp_path / "a.npy", tmp_path / "out", dtype=said).tokens == 400
        return
    with pytest.raises(InputError) as refused:
        make(tmp_path / "a.npy", tmp_path / "out", dtype=said)
    assert advice(np.dtype(written)) in str(refused.value)
    with pytest.raises(UsageError) as asked:
        make(tmp_path / "a.npy", tmp_path / "asked")
    assert advice(np.dtype(written)) in str(asked.value)
    assert not (tmp_path / "asked").exists()
