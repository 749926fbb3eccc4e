"""`olm-data import`: files that other projects' own writers wrote become a dataset, in place.

The files are in tests/support/foreign; its make.py says how they were made.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.command import inside
from support.datasets import mix_datasets
from support.tokenizing import digests

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, InputError, OlmError, UsageError, ValidationError
from olm_data.exporting.export import export
from olm_data.importing.run import Imported, import_files
from olm_data.rows.reader import RowReader
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import load_tokenizer
from olm_data.verify.run import verify

FOREIGN = Path(__file__).parents[2] / "support" / "foreign"
TEXTS: list[str] = json.loads((FOREIGN / "documents.json").read_text())
EOS = 256
TOKENIZER = FOREIGN / "tokenizer.json"

SETS = {
    "dolma/part-0-00000.npy": "uint16",
    "datatrove/text_00000_unshuffled.ds": None,
    "megatron/int32.bin": None,
    "megatron/uint16.bin": None,
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A copy of the files, for a test to spoil."""
    return Path(shutil.copytree(FOREIGN, tmp_path / "foreign"))


def make(inputs: Path | list[Path], output: Path, eos: str = "auto", **options: object) -> Imported:
    named = [str(path) for path in (inputs if isinstance(inputs, list) else [inputs])]
    return import_files(named, str(output), load_tokenizer(TOKENIZER, eos=eos), **options)


def decoded(dataset: Dataset) -> list[str]:
    spec = load_tokenizer(TOKENIZER)
    documents = [dataset.document(n).tokens for n in range(dataset.documents)]
    assert all(tokens[-1] == EOS for tokens in documents)
    return [spec.decode(tokens[:-1]) for tokens in documents]


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


def test_ids_sources_and_lines_of_dolma_are_kept(files: Path, tmp_path: Path) -> None:
    make(files / "dolma", tmp_path / "out", dtype="uint16")
    dataset = Dataset.open(str(tmp_path / "out"))
    spec = load_tokenizer(TOKENIZER)
    for number in range(dataset.documents):
        document = dataset.document(number)
        line = document.columns["loc"]
        assert document.id == f'id "{line - 1}", x'
        assert document.columns["src"] == "a,b.jsonl.gz"
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
    assert "no .csv.gz; 39 documents found by EOS id 256" in said.stderr
    assert "tokens after the last EOS id are one more" in said.stderr
    assert "EOS scan    1 files have no sidecar" in said.stdout
    assert "not ended   1 documents do not end in the EOS id" in said.stdout
    found = Dataset.open(str(tmp_path / "scanned"))
    assert found.documents == with_sidecar.documents == 40
    assert verify(str(tmp_path / "scanned")).ok


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
    import boto3

    client = boto3.client("s3", endpoint_url=s3["endpoint_url"])
    for suffix in ("npy", "csv.gz"):
        name = f"part-0-00000.{suffix}"
        client.upload_file(str(files / "dolma" / name), s3["bucket"], f"{tmp_path.name}/in/{name}")
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
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make([files / "megatron" / "uint16.bin"], tmp_path / "a")
    make([files / "dolma"], tmp_path / "b", dtype="uint16")
    lock = mix_datasets(tmp_path, ["a", "b"], stages=[(2000, {"a": 1, "b": 1})], sequence_length=32)
    assert verify(str(lock)).ok
    batch = RowReader(lock, verify="full").read(np.arange(62))
    assert int(batch.input_ids.max()) == EOS
    assert (batch.labels[batch.input_ids == EOS] == -100).all()
    for words in (("stats", tmp_path / "b"), ("show", "document", tmp_path / "b", "0")):
        said = inside(capsys, *words)
        assert said.returncode == 0, said.stderr
    assert "a,b.jsonl.gz" in said.stdout


def test_a_second_run_of_a_killed_import_writes_the_same(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [files / "megatron" / "uint16.bin"]
    make(inputs, tmp_path / "whole")
    wanted = digests(tmp_path / "whole")
    real = Store.create

    def stopped(self: Store, name: str, data: bytes) -> None:
        if name == "manifest.json":
            raise KeyboardInterrupt
        real(self, name, data)

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
    assert (done.documents, done.manifest) == (40, None)
    assert not (tmp_path / "out").exists()


def test_what_changes_after_the_import_is_found(files: Path, tmp_path: Path) -> None:
    make(files / "dolma", tmp_path / "out", dtype="uint16")
    with open(files / "dolma" / "part-0-00000.npy", "r+b") as file:
        file.seek(100)
        file.write(b"\x01")
    assert not verify(str(tmp_path / "out")).ok
    with pytest.raises(ValidationError, match="have changed"):
        Dataset.open(str(tmp_path / "out")).read(0, 100)


# --- refused -----------------------------------------------------------------------------------


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


def test_the_dtype_is_asked_for_where_no_file_says_it(files: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="do not say how wide") as caught:
        make(files / "dolma", tmp_path / "out")
    assert "--dtype uint16" in str(caught.value.fix)


@pytest.mark.parametrize("name", SETS)
def test_the_wrong_dtype_is_refused(name: str, files: Path, tmp_path: Path) -> None:
    right = SETS[name] or ("uint32" if "int32" in name else "uint16")
    wrong = {"uint16": "uint32", "uint32": "uint16"}[right]
    with pytest.raises(InputError, match=r"tokens|as uint"):
        make(files / name, tmp_path / "out", dtype=wrong)


def test_uint32_tokens_read_as_uint16_are_noticed_without_any_sidecar(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    ids = np.arange(1, 200, dtype="<u4") % 200
    ids[::10] = EOS
    ids.tofile(path)
    with pytest.raises(InputError, match="every second value is 0"):
        make(path, tmp_path / "out", dtype="uint16")
    assert make(path, tmp_path / "out", dtype="uint32").documents > 10


def test_another_eos_than_the_files_is_refused_and_none_is_possible(
    files: Path, tmp_path: Path
) -> None:
    inputs = files / "megatron" / "uint16.bin"
    with pytest.raises(InputError, match="none of its 40 documents ends in the EOS id 64"):
        make(inputs, tmp_path / "out", eos="a")
    done = make(inputs, tmp_path / "out", eos="none")
    assert done.manifest is not None
    assert done.manifest.tokenizer.eos is None
    assert verify(done.output).ok


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    np.array([1, EOS, 2, EOS], "<u2").tofile(tmp_path / "a.npy")
    rows = "0,0\n0,2\n2,2\n2,4\n4,4\n"
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(rows.encode()))
    done = make(tmp_path / "a.npy", tmp_path / "out", dtype="uint16")
    assert (done.documents, done.empty) == (2, 3)
    dataset = Dataset.open(done.output)
    assert [dataset.document(n).position for n in range(2)] == [1, 3]
    assert dataset.manifest.dropped == {"empty": 3}
    assert dataset.manifest.totals.documents_in == 5
    assert verify(done.output).ok


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


@pytest.mark.parametrize("form", ["megatron", "olmo-core", "datatrove"])
def test_d2_a_folder_of_our_own_export_is_imported_whole(
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
        done = make(exported, tmp_path / f"back-{number}", dtype=told)
        assert (done.files, done.documents) == (1, len(TEXTS))
        assert "sidecar" not in done.passed
        assert "dataset" not in done.passed
        back = Dataset.open(str(tmp_path / f"back-{number}"))
        assert sorted(decoded(back)) == sorted(
            decoded(Dataset.open(str(tmp_path / f"set-{number}")))
        )


def test_d2_no_name_hides_a_token_file_and_what_is_not_imported_is_named_and_counted(
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
    assert f"imported {len(stems)} files" in said.stdout
    for reason, name in (("format", "README.md"), ("hidden", ".hidden.bin")):
        assert re.search(rf"not read +1 {reason} .*: {re.escape(name)}", said.stdout)
    assert re.search(r"not read +1 sidecar .*: orphan.idx", said.stdout)
    tools = Dataset.open(str(tmp_path / "out")).manifest.tools
    assert tools.passed_over["sidecar"].names == ["orphan.idx"]


def test_d2_the_files_of_a_dataset_beside_token_files_are_no_token_files(
    files: Path, tmp_path: Path
) -> None:
    folder = files / "megatron"
    os.remove(folder / "uint16.bin")
    os.remove(folder / "uint16.idx")
    first = make(folder, folder)  # in place: its own shard-*.ends.npy are there from now on
    assert first.passed == {}
    os.remove(folder / "manifest.json")
    again = make(folder, folder)
    assert again.manifest is not None
    assert first.manifest is not None
    assert (again.manifest.encode(), again.files) == (first.manifest.encode(), first.files)
    other = make(folder, tmp_path / "other")
    assert other.files == first.files
    assert other.passed["dataset"].count >= 2 * first.files


@pytest.mark.parametrize("named", ["int32", "int32.idx", "int32.bin"])
def test_d10_a_megatron_prefix_names_its_pair(named: str, files: Path, tmp_path: Path) -> None:
    done = make(files / "megatron" / named, tmp_path / "out")
    assert decoded(Dataset.open(str(tmp_path / "out"))) == TEXTS
    assert (done.files, done.passed) == (1, {})


def test_d10_a_prefix_of_nothing_is_refused(files: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no token file here"):
        make(files / "megatron" / "int", tmp_path / "out")
