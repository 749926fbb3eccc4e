"""Promises of imported mixtures: exact weights, caps and files of the other, or a refusal."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command import Olm
from support.importing import OLMO
from support.project import Project
from support.stand_in import parse_mixture
from support.tokenizing import texts

from olm_data.cli import cli
from olm_data.errors import ConflictError, UsageError
from olm_data.extensions.exporting.export import export
from olm_data.extensions.importing.mixtures import (
    ForeignSource,
    import_command,
    manifest_text,
    read_mixture_file,
)
from olm_data.mixture.lock import Lock
from olm_data.mixture.manifest import SCHEMA


def manifest(raw: bytes, tokens: int | None = None) -> str:
    return manifest_text(
        read_mixture_file(raw, "f"), origin="f", sequence_length=64, tokens=tokens, data="./tokens"
    )


def test_an_olmo_core_source_list_becomes_a_manifest_with_exact_numbers() -> None:
    text = manifest(OLMO, 10**9)
    mixture = parse_mixture(text)
    assert {s.name: (s.data, s.max_epochs) for s in mixture.sources} == {
        "reddit-high": ("./tokens/reddit-high", Fraction(5, 4)),
        "web": ("./tokens/web", 1),
    }
    assert mixture.stages[0].tokens == 10**9
    assert mixture.stages[0].shares == {
        "reddit-high": Fraction("0.18273684787"),
        "web": Fraction("0.81726315213"),
    }
    assert "# weka://bucket/reddit/**/*.npy" in text


def test_a_whole_olmo_core_mixture_config_says_tokens_and_seed() -> None:
    lines = OLMO.decode().replace("\n", "\n  ")
    text = manifest(f"source_list:\n  {lines}\nrequested_tokens: 5000\nseed: 42\n".encode())
    assert parse_mixture(text).stages[0].tokens == 5000
    assert parse_mixture(text).seed == 42


@pytest.mark.parametrize(
    "blend",
    [
        b"0.3 /data/web_text_document 0.7 /data/code_text_document",
        b"--data-path 0.3 /data/web_text_document \\\n 0.7 /data/code_text_document\n",
        b'{"train": ["0.3", "/data/web_text_document", "0.7", "/data/code_text_document"]}',
        b'{"train": [0.3, "/data/web_text_document", 0.7, "/data/code_text_document"]}',
        b"30 /data/web_text_document\n70 /data/code_text_document\n",
    ],
)
def test_a_megatron_blend_becomes_a_manifest_with_its_weights(blend: bytes) -> None:
    mixture = parse_mixture(manifest(blend, 1000))
    assert mixture.stages[0].shares == {"web": Fraction(3, 10), "code": Fraction(7, 10)}


def test_a_blend_without_weights_goes_once_through_each_source() -> None:
    mixture = parse_mixture(manifest(b"/a/web_text_document /b/web_text_document /c/code"))
    assert mixture.stages[0].epochs == {"a-web": 1, "b-web": 1, "code": 1}
    with pytest.raises(UsageError, match="sizes decide"):
        manifest(b"/a/web /c/code", 1000)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "empty"),
        (b"\x00\x93\xff 'quote without end", "neither a mixture of OLMo-core"),
        (b"0.5 /a x /b", "not numbers"),
        (b"1 /a 1 /a", "two sources"),
        (b"-1 /a 1 /b", "negative"),
        (b"1 /a 1 /b", "how many tokens"),
        (OLMO.replace(b"paths", b"path"), "unknown field sources[0].path"),
        (OLMO.replace(b": web", b": reddit_high").replace(b"t:h", b"t_h"), "two sources"),
        (OLMO.replace(b".5\n", b".5x\n"), "is a number, not"),
        (b"source: 1\n", "a list `sources`"),
    ],
)
def test_what_has_no_exact_meaning_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(UsageError) as error:
        manifest(raw)
    assert says in str(error.value)


def command_of(*paths: str, **options: str) -> str | None:
    given = {"data": "./tokens", "output": "m.yaml", "tokenizer": "gpt2", "dtype": "uint16"}
    source = ForeignSource("web", Fraction(1), paths, None)
    return import_command(source, **(given | options))


@pytest.mark.parametrize(
    ("path", "argument"),
    [
        ("/d/a.npy", "/d/a.npy"),
        ("/d/a b.npy", "'/d/a b.npy'"),
        ("/d x/part-*.npy", "'/d x/part-'*.npy"),
        ("/d/$(touch x)/[01]?.npy", "'/d/$(touch x)/'[01]?.npy"),
        ("/d/**/*.npy", "/d/"),
        ("s3://b/d/**/*.npy", "s3://b/d/"),
        ("s3://b/d/*.npy", "s3://b/d/"),
    ],
)
def test_d8_paths_and_patterns_are_spelled_for_a_shell(path: str, argument: str) -> None:
    found = command_of(path)
    assert found == (
        f"olm-data import {argument} --tokenizer gpt2 --dtype uint16 --output ./tokens/web"
    )


@pytest.mark.parametrize("path", ["https://b/a.npy", "s3://b/*/a.npy", "/d/**/a.npy", "weka://x/a"])
def test_d8_what_import_cannot_take_gets_no_command(path: str) -> None:
    assert command_of("/d/a.npy", path) is None


# olm-data import of a mixture writes a manifest and prints commands that run.
def test_the_command_writes_a_manifest_once_and_says_what_to_import(tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_bytes(OLMO)
    arguments = ["import", str(tmp_path / "mix.yaml"), "--tokens", "1B"]
    arguments += ["--output", str(tmp_path / "manifest.yaml")]
    printed = CliRunner().invoke(cli, [*arguments, "--dry-run"], standalone_mode=False)
    assert not (tmp_path / "manifest.yaml").exists()
    assert parse_mixture(printed.stdout).stages[0].tokens == 10**9
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert (tmp_path / "manifest.yaml").read_text() == printed.stdout
    named = printed.stdout.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert (tmp_path / named).resolve() == SCHEMA
    assert "olm-data import does not take weka://bucket/reddit/**/*.npy" in done.stderr
    assert "olm-data import /data/web/part-0.npy --tokenizer TOKENIZER --dtype DTYPE" in done.stderr
    again = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert isinstance(again.exception, ConflictError)


def printed_commands(stderr: str) -> list[str]:
    return [
        line.partition(": ")[2]
        for line in stderr.splitlines()
        if line.startswith(("next: ", "then: "))
    ]


def test_d8_the_commands_it_prints_run_as_they_are(here: Path, project: Project) -> None:
    """Prefixes, in a folder with a space; the manifest in another folder than the shell."""
    blend = []
    for name in ("web", "code"):
        source = project.write(f"{name}.jsonl", texts(60))
        project.make([source], f"made/{name}")
        export(f"made/{name}", "megatron", f"their data/{name}", merge=True)
        blend += ["0.5", f"'their data/{name}/dataset'"]
    (project / "blend.txt").write_text(" ".join(blend))
    (project / "runs").mkdir()
    words = ["import", "blend.txt", "--tokens", "1024", "--sequence-length", "16"]
    words += ["--output", "runs/m.yaml", "--tokenizer", str(project.tokenizer)]
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert done.exit_code == 0, done.exception
    commands = printed_commands(done.stderr)
    assert len(commands) == 3
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in commands:
        run = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, (command, run.stderr)
    lock = Lock.read("runs/m.lock.json")
    assert [source.name for source in lock.sources] == ["code-dataset", "web-dataset"]


def test_d8_the_output_is_where_the_manifest_looks(tmp_path: Path) -> None:
    assert "--output runs/./tokens/web" in str(command_of("/a/p", output="runs/m.yaml"))
    assert "--dtype" not in str(command_of("/a/p"))
    remote = command_of("/a/p", output="runs/m.yaml", data="s3://b/t/")
    assert str(remote).endswith("--output s3://b/t/web")


# olm-data import: which files are a mixture, and which options are for the other kind.
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tokens.npy", "--output", "out"], "--tokenizer and --output are needed"),
        (["tokens.npy", "--tokenizer", "gpt2"], "--tokenizer and --output are needed"),
        (["tokens.npy", "--tokens", "1B"], "--tokens is for mixtures, and these are token files"),
        (["a.npy", "b.yaml", "--data", "x"], "--data is for mixtures, and these are token files"),
        (["mix.yaml", "--eos", "none"], "--eos is for token files, and this is a mixture"),
        (["blend", "--strict-inputs"], "--strict-inputs is for token files"),
        (["prefix.txt", "--bos", "none"], "--tokenizer and --output are needed"),
    ],
)
def test_an_option_of_the_other_kind_is_refused(
    words: list[str], says: str, here: Path, olm: Olm
) -> None:
    (here / "blend").write_text("1 a 1 b")
    (here / "prefix.txt.bin").touch()  # of Megatron, whatever its name ends with
    said = olm("import", *words)
    assert said.returncode == 2
    assert says in said.stderr
