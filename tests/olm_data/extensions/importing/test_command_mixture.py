"""olm-data import of a mixture writes a manifest and prints commands that run."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.importing import OLMO
from support.stand_in import parse_mixture
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.cli import cli
from olm_data.errors import ConflictError
from olm_data.extensions.exporting.export import export
from olm_data.extensions.importing.mixtures import (
    ForeignSource,
    import_command,
)
from olm_data.mixture.lock import Lock
from olm_data.mixture.manifest import SCHEMA


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


def test_d8_the_commands_it_prints_run_as_they_are(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes, in a folder with a space; the manifest in another folder than the shell."""
    monkeypatch.chdir(tmp_path)
    blend = []
    for name in ("web", "code"):
        source = write_jsonl(tmp_path / f"{name}.jsonl", texts(60))
        make_dataset([source], tiny_tokenizer, tmp_path / "made" / name)
        export(f"made/{name}", "megatron", f"their data/{name}", merge=True)
        blend += ["0.5", f"'their data/{name}/dataset'"]
    (tmp_path / "blend.txt").write_text(" ".join(blend))
    (tmp_path / "runs").mkdir()
    words = ["import", "blend.txt", "--tokens", "1024", "--sequence-length", "16"]
    words += ["--output", "runs/m.yaml", "--tokenizer", str(tiny_tokenizer)]
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


def command_of(*paths: str, **options: str) -> str | None:
    given = {"data": "./tokens", "output": "m.yaml", "tokenizer": "gpt2", "dtype": "uint16"}
    source = ForeignSource("web", Fraction(1), paths, None)
    return import_command(source, **(given | options))


def test_d8_the_output_is_where_the_manifest_looks(tmp_path: Path) -> None:
    assert "--output runs/./tokens/web" in str(command_of("/a/p", output="runs/m.yaml"))
    assert "--dtype" not in str(command_of("/a/p"))
    remote = command_of("/a/p", output="runs/m.yaml", data="s3://b/t/")
    assert str(remote).endswith("--output s3://b/t/web")
