"""`olm-data import`: files that other projects' own writers wrote become a dataset, in place."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.command import Olm, inside
from support.importing import EOS, FOREIGN, SETS, TEXTS, TOKENIZER, decoded, make
from support.small_datasets import mix_datasets
from support.tokenizing import digests

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, InputError, OlmError, UsageError
from olm_data.extensions.exporting.export import export
from olm_data.extensions.importing.import_files import import_files
from olm_data.extensions.importing.token_files import DTYPES, advice, defect, looks_like
from olm_data.extensions.verify.datasets import verify
from olm_data.rows.reader import RowReader
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import load_tokenizer


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A copy of the files of other projects, for a test to spoil."""
    return Path(shutil.copytree(FOREIGN, tmp_path / "foreign"))


@pytest.mark.parametrize("name", SETS)
def test_what_the_other_project_wrote_is_what_we_read(
    name: str, files: Path, tmp_path: Path
) -> None:
    before = digests(files)
    done = make(files / name, tmp_path / "out", dtype=SETS[name])
    dataset = Dataset.open(str(tmp_path / "out"), verify="full")
    found = decoded(dataset)
    wanted = [text.strip() for text in TEXTS] if name.startswith("dolma") else TEXTS
    # dolma shuffles documents and strips them
    assert sorted(found) == sorted(wanted)
    if not name.startswith("dolma"):
        assert found == wanted
    assert (done.documents, done.scanned, done.not_ended) == (len(TEXTS), 0, 0)
    report = verify(str(tmp_path / "out"))
    assert report.ok, report.findings
    assert digests(files) == before
    # no token was copied: both names are of one file
    shard = tmp_path / "out" / "shard-00000.tokens.bin"
    assert os.path.samefile(shard, files / name)


def test_files_below_the_output_are_used_by_name_and_nothing_else_is_written_there(
    files: Path, tmp_path: Path
) -> None:
    folder = files / "megatron"
    (folder / "uint16.bin").rename(folder / "more.bin")
    (folder / "uint16.idx").rename(folder / "more.idx")
    os.remove(folder / "int32.bin")
    os.mkdir(folder / "deep")
    for suffix in ("bin", "idx"):
        shutil.copy(folder / f"more.{suffix}", folder / "deep" / f"x.{suffix}")
    before = digests(folder)
    done = make(folder, folder)
    assert (done.linked, done.files) == (0, 2)
    dataset = Dataset.open(str(folder))
    assert [shard.file for shard in dataset.manifest.shards] == ["deep/x.bin", "more.bin"]
    assert decoded(dataset) == TEXTS * 2
    after = digests(folder)
    assert before.items() <= after.items()
    assert {name.partition(".")[0] for name in after.keys() - before.keys()} == {
        *("manifest", "tokenizer", "shard-00000", "shard-00001")
    }
    assert verify(str(folder)).ok
    moved = folder.rename(folder.parent / "moved")  # names are relative
    assert verify(str(moved)).ok


def test_it_works_in_a_bucket(s3: dict[str, str], files: Path, tmp_path: Path) -> None:
    from support.s3 import client

    own = client(s3)
    for suffix in ("npy", "csv.gz"):
        name = f"part-0-00000.{suffix}"
        data = (files / "dolma" / name).read_bytes()
        own.put_object(Bucket=s3["bucket"], Key=f"{tmp_path.name}/in/{name}", Body=data)
    url = f"s3://{s3['bucket']}/{tmp_path.name}"
    spec = load_tokenizer(TOKENIZER)
    import_files([f"{url}/in"], url, spec, dtype="uint16")
    local = make(files / "dolma", tmp_path / "out", dtype="uint16")
    dataset = Dataset.open(url)
    assert dataset.manifest.shards[0].file == "in/part-0-00000.npy"
    ours = Dataset.open(local.output)
    assert np.array_equal(dataset.read(0, dataset.tokens), ours.read(0, ours.tokens))
    assert verify(url).ok
    with pytest.raises(UsageError, match="cannot be linked"):
        import_files([f"{url}/in"], f"{url}/elsewhere", spec, dtype="uint16")


def test_it_can_be_mixed_read_as_rows_counted_and_shown(
    files: Path, tmp_path: Path, olm: Olm
) -> None:
    make([files / "megatron" / "uint16.bin"], tmp_path / "a")
    make([files / "dolma"], tmp_path / "b", dtype="uint16")
    lock = mix_datasets(tmp_path, ["a", "b"], stages=[(2000, {"a": 1, "b": 1})], sequence_length=32)
    assert verify(str(lock)).ok
    batch = RowReader(lock, verify="full").read(np.arange(62))
    assert int(batch.input_ids.max()) == EOS
    assert (batch.labels[batch.input_ids == EOS] == -100).all()
    for words in (("stats", tmp_path / "b"), ("show", "document", tmp_path / "b", "0")):
        said = olm(*words)
        assert said.returncode == 0, said.stderr
    assert "a,b.jsonl.gz" in said.stdout


def test_a_second_run_of_a_killed_import_writes_the_same(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [files / "megatron" / "uint16.bin"]
    make(inputs, tmp_path / "whole")
    wanted = digests(tmp_path / "whole")
    real = Store.create

    def stopped(self: Store, name: str, data: bytes, **more: Any) -> None:
        if name == "manifest.json":
            raise KeyboardInterrupt
        real(self, name, data, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "create", stopped)
        with pytest.raises(KeyboardInterrupt):
            make(inputs, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    make(inputs, tmp_path / "out")
    assert digests(tmp_path / "out") == wanted
    with pytest.raises(ConflictError, match="holds something else"):
        make(inputs, tmp_path / "out")


def test_a_dry_run_checks_and_writes_nothing(files: Path, tmp_path: Path) -> None:
    done = make(files / "dolma", tmp_path / "out", dtype="uint16", dry_run=True)
    assert (done.documents, done.digest) == (40, None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["nothing", "suffix", "twice", "mixed", "tokenizer", "run"])
def test_inputs_and_outputs_that_make_no_sense_are_refused(
    case: str, files: Path, tmp_path: Path
) -> None:
    out, inputs = tmp_path / "out", [files / "megatron" / "uint16.bin"]
    out.mkdir()
    if case == "nothing":
        inputs = [files / "nowhere"]
    elif case == "suffix":
        inputs = [files / "make.py"]
    elif case == "twice":
        inputs *= 2
    elif case == "mixed":
        inputs = [files]
    else:
        (out / {"tokenizer": "tokenizer.json", "run": "plan.json"}[case]).write_text("{}")
    with pytest.raises(OlmError) as caught:
        make(inputs, out)
    assert type(caught.value) in (InputError, UsageError, ConflictError)
    assert not (out / "manifest.json").exists()


# One pass over a token file: what cannot be its ids, or is not as it was, is refused.


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
