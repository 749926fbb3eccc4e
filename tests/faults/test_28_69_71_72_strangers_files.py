"""FAULTS rows 28, 69, 71, 72: pipes, links, escapes and deep JSON in the files of others."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.command import inside
from support.deep_json import DEEP
from support.forged import forged_lock
from support.small_datasets import mix_datasets
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.manifest import decode_manifest
from olm_data.errors import ValidationError, printable, shown
from olm_data.extensions.verify.datasets import verify
from olm_data.mixture.lock import Lock
from olm_data.page import note, svg
from olm_data.regular_files import open_regular, read_regular
from olm_data.storage.names import acts, is_column_name, is_mixture_name
from olm_data.storage.store import Store

FORGED = "a\x1b[2K\r\nerror: all is lost\x9b31m\u202e.jsonl"


@pytest.fixture
def forged_source(tmp_path: Path) -> Path:
    """A file whose name and ids hold escapes, line breaks and a direction mark."""
    path = tmp_path / FORGED
    lines = [
        {"id": f"{n}\x1b]0;owned\x07\nmade 9 tokens", "text": t} for n, t in enumerate(texts(9))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_28_every_command_escapes_what_comes_from_names_and_ids(
    forged_source: Path, tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out\x1b[31m\nmade 7 tokens"
    common = (forged_source, "--tokenizer", tiny_tokenizer, "--encoder", "hf", "--output", output)
    broken = tmp_path / ("b" + FORGED)
    broken.write_text("{\n" * 50)
    assert inside(capsys, "tokenize", *common[:-1], tmp_path / "named").returncode == 0
    (tmp_path / "named").rename(output)  # what no command would make
    runs = [
        inside(capsys, "tokenize", *common, "--dry-run"),
        inside(capsys, "tokenize", *common, "--workers", "1"),
        inside(capsys, "tokenize", *common, "--workers", "1", "--eos", "none"),  # another plan
        inside(capsys, "tokenize", broken, *common, "--dry-run", "--text-column", "a\x1b[31m\nb"),
        inside(capsys, "verify", output),
        inside(capsys, "show", "document", output, "0"),
        inside(capsys, "doctor", output, "--clean", "--older-than", "0s", "--dry-run"),
        inside(capsys, "tokenize", tmp_path / ("absent" + FORGED), *common[1:]),
        inside(capsys, "--debug", "verify", tmp_path / ("absent" + FORGED)),
    ]
    assert [run.returncode for run in runs[:3]] == [2, 2, 2], [run.stderr for run in runs]
    for run in runs:
        said = run.stdout + run.stderr
        assert not {"\x1b", "\x9b", "\u202e", "\x07", "\r"} & set(said), said
        assert not any(
            line.startswith(("error: all is lost", "made 7", "made 9")) for line in said.split("\n")
        ), said


def test_28_a_bad_record_of_such_a_file_is_named_on_one_line(
    tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged_source = tmp_path / FORGED
    forged_source.write_text('{"text": "x"}\n' + "{\n" * 50)
    refused = inside(
        capsys,
        *("tokenize", forged_source, "--tokenizer", tiny_tokenizer, "--encoder", "hf"),
        *("--workers", "1", "--output", tmp_path / "out"),
    )
    assert refused.returncode == 4
    assert "\x1b" not in refused.stderr
    assert not any(line.startswith("error: all") for line in refused.stderr.split("\n"))


KINDS = ("zero", "pipe", "folder", "socket", "out")


FILES = (
    "manifest.json",
    "plan.json",
    "job.json",
    "tokenizer.json",
    "shard-00000.json",
    "shard-00000.ends.npy",
    "shard-00000.docs.parquet",
    "shard-00000.tokens.npy",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("regular")
    source = write_jsonl(folder / "a.jsonl", texts(20))
    make_dataset([source], tiny_tokenizer, folder / "web")
    mix_datasets(folder, ["web"], stages=[(500, {"web": 1})], sequence_length=16)
    return folder


def put(kind: str, path: Path, away: Path) -> None:
    """Make what stands at `path` of another kind than a regular file of its folder."""
    path.unlink(missing_ok=True)
    if kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(here)
    else:
        away.write_bytes(b"{}")
        path.symlink_to(away)


@pytest.mark.parametrize("kind", KINDS)
def test_69_s5_only_a_regular_file_inside_the_folder_is_opened(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    put(kind, folder / "x", tmp_path / "away")
    store = Store(folder)
    for operation in (store.read, store.sha256, store.open, lambda n: store.read(n, 0, 5)):
        with pytest.raises(ValidationError, match=r"is where a file|link to another place"):
            operation("x")
    if kind != "out":
        for read in (open_regular, read_regular):
            with pytest.raises(ValidationError, match="is where a file is expected"):
                read(folder / "x")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_69_verify_refuses_each_file_of_a_dataset(
    name: str, kind: str, made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "web"
    shutil.copytree(made / "web", folder)
    put(kind, folder / name, tmp_path / "away")
    assert any(name in finding.file for finding in verify(str(folder)).findings)


@pytest.mark.parametrize("kind", ["zero", "pipe", "folder"])
def test_69_commands_on_locks_runs_and_manifests_end_at_once(
    kind: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = next(made.glob("*.lock.json"))
    bad, run = tmp_path / "bad.lock.json", tmp_path / "run"
    put(kind, bad, tmp_path / "away")
    run.mkdir()
    for name in ("metrics.jsonl", "starts.jsonl", "ends.jsonl", "config.json", "sample.json"):
        put(kind, run / name, tmp_path / "away")
    for words in (
        ("show", "row", bad, "0"),
        ("verify", bad),
        ("mix", bad),
        ("show", "step", lock, "1", "--run", run),
        ("report", lock, "--run", run, "--output", tmp_path / "r.html"),
        ("verify", run),
        ("import", bad),
    ):
        done = inside(capsys, *map(str, words))
        assert done.returncode in (2, 3, 4), (words, done.returncode, done.stderr)
        assert "Traceback" not in done.stderr


def test_69_s5_a_split_that_is_a_link_out_of_the_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "manifest.json").write_text("{}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "validation").symlink_to(tmp_path / "away")
    with pytest.raises(ValidationError, match="link to another place"):
        Store(tmp_path / "data").child("validation").read("manifest.json")


def test_69_s5_a_file_above_its_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.truncate(1 << 40)  # holes: no byte is stored
    with pytest.raises(ValidationError, match="at most"):
        Store(tmp_path).read("x")
    with pytest.raises(ValidationError, match="at most 10"):
        read_regular(tmp_path / "x", 10)


HOSTILE = ["a\x1b[2Jb", "a\x07", "a\u202eb", "a\nb", "a\u2028b", "a\x9b31m", "x" * 2000, ""]


@pytest.fixture(scope="module")
def escaped(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("names")
    rows = [
        {"text": text, "k": f"$\\frac{n}$\u202e\x1b]0;x\x07"} for n, text in enumerate(texts(9))
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_dataset([folder / "a.jsonl"], tiny_tokenizer, folder / "web", keep=["k"])
    mix_datasets(folder, ["web"], stages=[(100, {"web": 1})], sequence_length=16)
    return folder


def lock_with(escaped: Path, change: Any) -> bytes:
    """The lock, changed as a forger does: with a digest that is right."""
    value = json.loads(next(escaped.glob("*.lock.json")).read_bytes())
    change(value)
    return forged_lock(value)


@pytest.mark.parametrize("name", HOSTILE)
def test_71_s6_names_are_refused_where_they_are_decoded(name: str, escaped: Path) -> None:
    def source(value: dict[str, Any]) -> None:
        value["sources"][0]["name"] = name
        value["locations"] = {name: "./web"}

    def stage(value: dict[str, Any]) -> None:
        value["stages"][0]["name"] = name

    assert not is_mixture_name(name)
    for change in (source, stage):
        with pytest.raises(ValidationError) as caught:
            Lock.decode(lock_with(escaped, change), "lock")
        assert not acts(str(caught.value).replace("\n", ""))
    path = escaped / "web" / "manifest.json"
    manifest = decode_manifest(path.read_bytes(), "manifest")
    options = msgspec.structs.replace(manifest.options, keep=((name, "string"),))
    forged = msgspec.structs.replace(
        manifest, stored_options=msgspec.Raw(msgspec.json.encode(options))
    )
    forged = msgspec.structs.replace(forged, digest=forged.compute_digest())
    with pytest.raises(ValidationError, match="control characters"):
        decode_manifest(forged.encode(), "manifest")


def test_71_s6_names_in_other_scripts_are_names() -> None:
    for name in ("\u540d\u524d", "caf\u00e9 $x$", "\U0001f468\u200d\U0001f469", "a\u3000b"):
        assert is_column_name(name)


def test_71_no_escape_of_a_kept_value_acts(
    escaped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = next(escaped.glob("*.lock.json"))
    page = tmp_path / "page.html"
    for words in (
        ("show", "document", escaped / "web", "0"),
        ("stats", escaped / "web", "--html", page),
        ("show", "document", lock, "web:0"),
        ("report", lock, "--output", tmp_path / "report.html"),
    ):
        done = inside(capsys, *map(str, words))
        assert done.returncode == 0, done.stderr
        assert not acts((done.stdout + done.stderr).replace("\n", "")), words
    for file in (page, tmp_path / "report.html"):
        assert not acts(file.read_text().replace("\n", ""))


def test_71_s6_a_formula_in_a_picture_is_drawn_as_it_stands() -> None:
    def draw(axes: Any) -> None:
        axes.plot([1, 10, 100], [1, 10, 1000], label=r"$\frac{oops$ \x07")
        axes.set_yscale("log")
        axes.set_title("\x1b[31m\u202e$x_$")
        axes.legend()

    drawn = svg(draw, "a \u202e picture")
    assert r"$\frac{oops$" in drawn
    assert "mathdefault" not in drawn
    assert not acts(drawn.replace("\n", ""))


def test_71_s6_everything_shown_goes_through_one_function() -> None:
    text = "a\x1b[31m\u202e\u2066b\nc"
    assert shown(text) == "a\\x1b[31m\\u202e\\u2066b\nc"
    assert printable(text) == shown(text).replace("\n", "\\n")
    assert note(text) == f'<p class="note">{shown(text)}</p>'


def test_71_s8_keeping_a_column_with_a_control_character_is_refused_before_work(
    tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "one", "k\x1b[31m": 1}) + "\n")
    done = inside(
        capsys,
        *("tokenize", str(source), "--tokenizer", str(tiny_tokenizer), "--keep", "k\x1b[31m"),
        *("--output", str(tmp_path / "out")),
    )
    assert done.returncode == 4
    assert "control characters" in done.stderr
    assert "\x1b" not in done.stderr
    assert not (tmp_path / "out" / "plan.json").exists()


def test_71_a_step_of_a_run_log_with_escapes_stays_on_its_line(tmp_path: Path) -> None:
    from olm_data.run_log.log import read_metrics

    (tmp_path / "metrics.jsonl").write_bytes(b'{"a\x1b": 1}\n')
    with pytest.raises(ValidationError, match="control bytes") as caught:
        list(read_metrics(tmp_path))
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("name", ["lists", "inside", "twice"])
@pytest.mark.parametrize("file", ["manifest.json", "plan.json", "job.json", "shard-00000.json"])
def test_72_every_json_file_of_a_dataset_is_refused_with_a_message(
    file: str, name: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "web", tmp_path / "web")
    (tmp_path / "web" / file).write_bytes(DEEP[name])
    done = inside(capsys, "verify", str(tmp_path / "web"))
    assert done.returncode == 3, done.stderr
    (tmp_path / "web" / "manifest.json").unlink()
    for words in (("status",), ("work", "--tasks", "0")):
        done = inside(capsys, words[0], str(tmp_path / "web"), *words[1:])
        assert done.returncode in (0, 2, 3, 4), (words, done.stderr)
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", DEEP)
def test_72_locks_and_run_logs(
    name: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, run = next(made.glob("*.lock.json")), tmp_path / "run"
    (tmp_path / "bad.lock.json").write_bytes(DEEP[name])
    assert inside(capsys, "show", "row", str(tmp_path / "bad.lock.json"), "0").returncode == 3
    run.mkdir()
    (run / "starts.jsonl").write_bytes(DEEP[name] + b"\n")
    (run / "metrics.jsonl").write_bytes(DEEP[name] + b"\n")
    for words in (
        ("verify", run),
        ("show", "step", lock, "1", "--run", run),
        ("report", lock, "--run", run, "--output", tmp_path / "r.html"),
    ):
        done = inside(capsys, *map(str, words))
        assert done.returncode == 3, (words, done.stderr)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v["sources"][0].update(max_documents_per_row=1 << 50),
        lambda v: v.update(sequence_length=1 << 40),
        lambda v: v["sources"][0].update(tokens=1 << 63),
        lambda v: v["stages"][0].update(wanted=["1/0"]),
        lambda v: v["sources"][0].update(max_epochs="1e999999999"),
    ],
)
def test_72_s8_numbers_of_a_lock_are_bounded(change: object, made: Path) -> None:
    value = json.loads(next(made.glob("*.lock.json")).read_bytes())
    change(value)  # type: ignore[operator]
    with pytest.raises(ValidationError):
        Lock.decode(forged_lock(value), "lock")
