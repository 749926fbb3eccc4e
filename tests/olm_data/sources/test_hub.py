"""Named and other hub datasets, through the hub's real clients against a stub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.command import olm_data
from support.hub_stub import HubStub
from support.reading import read_source, resolve_source

from olm_data.cli import cli
from olm_data.errors import StorageError
from olm_data.sources import named


def run(hub: HubStub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a fresh process whose hub clients know the stub from their start."""
    return olm_data(*arguments, folder=home, extra=hub.environment(home))


def test_only_the_wanted_columns_of_a_row_group_are_fetched(endpoint: HubStub) -> None:
    before = len(endpoint.requests)
    read_source(source="fineweb-edu", target_bytes=1000)
    size = (
        endpoint.root / "datasets/HuggingFaceFW/fineweb-edu/sample/10BT/000_00000.parquet"
    ).stat()
    ranges = [r.rpartition("bytes=")[2] for r in endpoint.requests[before:] if "bytes=" in r]
    spans = [tuple(map(int, r.split("-"))) for r in ranges]
    parts = [stop - start for start, stop in spans if stop - start < size.st_size - 1]
    assert len(parts) >= 8
    assert max(parts) < size.st_size // 3


def test_a_mirror_with_the_same_layout_gives_the_same_inputs_by_name(endpoint: HubStub) -> None:
    remote = resolve_source(source="fineweb-edu", subset="sample-10BT")
    mirror = endpoint.root / "datasets/HuggingFaceFW/fineweb-edu"
    local = resolve_source(source="fineweb-edu", root=str(mirror))
    assert [(f.path, f.bytes) for f in local.inputs] == [(f.path, f.bytes) for f in remote.inputs]
    assert local.options == remote.options
    assert local.name == remote.name == "fineweb-edu-sample-10BT"


def test_offline_the_command_says_at_once_that_the_hub_is_needed(
    endpoint: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "a.txt").write_text("text")
    done = run(endpoint, tmp_path, "tokenize", "a.txt", "--tokenizer", "nobody/x", "--output", "o")
    assert done.returncode == 6
    assert "unset HF_HUB_OFFLINE" in done.stderr
    assert "--tokenizer FILE" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--source", "fineweb-edu"], ["hf://datasets/a/b/*.parquet"]])
def test_a_hub_that_cannot_be_reached_is_called_by_its_name(
    endpoint: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    done = CliRunner().invoke(cli, ["tokenize", *words, "--tokenizer", "t", "--output", "o"])
    assert isinstance(done.exception, StorageError)
    assert "the hub cannot be reached" in str(done.exception)
    assert "why: host 127.0.0.1" in str(done.exception)
    assert "HF_ENDPOINT" in str(done.exception)
    assert "--root PATH" in str(done.exception)


def test_the_bare_command_tokenises_a_named_source_with_the_hubs_tokenizer(
    hub: tuple[HubStub, list[str]], tmp_path: Path, tiny_tokenizer: Path
) -> None:
    stub, texts = hub
    place = stub.root / "models" / "openai-community" / "gpt2"
    place.mkdir(parents=True, exist_ok=True)
    (place / "tokenizer.json").write_bytes(tiny_tokenizer.read_bytes())
    (place / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    done = run(stub, tmp_path, "tokenize", "--source", "fineweb-edu", "--workers", "1")
    assert done.returncode == 0, done.stderr
    output = tmp_path / "tokens" / "fineweb-edu-sample-10BT-gpt2"
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["totals"]["documents"] == len(texts)
    assert manifest["inputs"][0]["path"].startswith("HuggingFaceFW/fineweb-edu/sample/10BT/")
    assert str(tmp_path) not in json.dumps({**manifest, "tools": None})


@pytest.mark.slow
def test_any_hub_dataset_reads_through_the_datasets_library(
    hub: tuple[HubStub, list[str]], tmp_path: Path, tiny_tokenizer: Path
) -> None:
    pytest.importorskip("datasets")
    stub, texts = hub
    # fmt: off
    done = run(
        stub, tmp_path, "tokenize", "--source", "hf:HuggingFaceFW/fineweb-edu:sample-10BT",
        "--tokenizer", str(tiny_tokenizer), "--output", "out", "--workers", "1", "--keep", "url",
    )
    # fmt: on
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["totals"]["documents"] == len(texts)
    assert [item["documents"] for item in manifest["inputs"]] == [60, 60]


def test_a_wrong_config_or_split_of_a_hub_dataset_is_a_usage_error(
    hub: tuple[HubStub, list[str]], tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    script = """
from olm_data.errors import UsageError
from olm_data.sources import SourceRequest, resolve_source
for config, split in ((":nope", None), ("", "dev")):
    try:
        source = "hf:HuggingFaceFW/fineweb-edu" + config
        resolve_source(SourceRequest(source=source, split=split))
    except UsageError as error:
        print(error.what, error.why)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **hub[0].environment(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("no such config or split") == 2
    assert "sample-10BT" in done.stdout
    assert "train" in done.stdout


SUBSETS: dict[str, Any] = {
    ("fineweb-edu", None): "sample/10BT/*.parquet",
    ("fineweb", "CC-MAIN-2024-10"): "data/CC-MAIN-2024-10/*.parquet",
    ("dclm", "global-shard_01_of_10"): "global-shard_01_of_10/local-shard_*/*.jsonl.zst",
    ("c4", None): "en/c4-train.*.json.gz",
    ("wikipedia", "20231101.de"): "20231101.de/train-*.parquet",
    ("finemath", None): "finemath-4plus/*.parquet",
    ("the-stack", "rust"): "data/rust/*.parquet",
    ("tinystories", None): "data/train-*.parquet",
}


@pytest.mark.parametrize(("asked", "pattern"), SUBSETS.items(), ids=str)
def test_subsets_of_the_catalogue_are_globs_of_the_repository(asked: Any, pattern: str) -> None:
    assert named.subset_glob(*asked)[1] == pattern
