"""`olm-data tokenize --source fineweb-edu` through the hub's real client, against a local hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.command import olm_data
from support.hub_stub import HubStub
from support.tokenizing import texts

from olm_data.dataset.dataset import Dataset
from olm_data.extensions.verify.datasets import verify

README = """---
configs:
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""


@pytest.fixture
def hub(tmp_path: Path, tiny_tokenizer: Path) -> Iterator[HubStub]:
    """A hub with two files of FineWeb-Edu's schema and a tokenizer under GPT-2's name."""
    data = tmp_path / "hub" / "datasets" / "HuggingFaceFW" / "fineweb-edu"
    (data / "sample" / "10BT").mkdir(parents=True)
    (data / "README.md").write_text(README)
    for part in range(2):
        rows = texts(50, 50 * part)
        table = pa.table(
            {
                "text": rows,
                "id": [f"<urn:uuid:{part}-{n}>" for n in range(50)],
                "dump": ["CC-MAIN-2024-10"] * 50,
                "url": [f"https://example.org/{part}/{n}" for n in range(50)],
                "file_path": ["s3://commoncrawl/x"] * 50,
                "language": ["en"] * 50,
                "language_score": [0.9] * 50,
                "token_count": [len(text) for text in rows],
                "score": [3.5] * 50,
                "int_score": [4] * 50,
            }
        )
        pq.write_table(
            table, data / "sample" / "10BT" / f"00{part}_00000.parquet", row_group_size=20
        )
    model = tmp_path / "hub" / "models" / "openai-community" / "gpt2"
    model.mkdir(parents=True)
    shutil.copy(tiny_tokenizer, model / "tokenizer.json")
    with HubStub(tmp_path / "hub").running() as stub:
        yield stub


@pytest.mark.slow
def test_the_bare_command_works_on_stated_defaults_and_equals_a_local_mirror(
    hub: HubStub, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    extra = hub.environment(tmp_path / "home")
    done = olm_data("tokenize", "--source", "fineweb-edu", folder=tmp_path, extra=extra)
    assert done.returncode == 0, done.stderr
    output = tmp_path / "tokens" / "fineweb-edu-sample-10BT-gpt2"
    assert "tokenizer gpt2" in done.stderr
    assert "tokens/fineweb-edu-sample-10BT-gpt2" in done.stderr
    dataset = Dataset.open(str(output))
    assert dataset.documents == 100
    document = dataset.document(70)
    assert document.id == "<urn:uuid:1-20>"
    assert document.input == "HuggingFaceFW/fineweb-edu/sample/10BT/001_00000.parquet"
    assert (document.position_kind, document.position) == ("row", 20)
    assert document.columns["url"] == "https://example.org/1/20"
    assert verify(str(output)).ok

    again = olm_data("tokenize", "--source", "fineweb-edu", "--json", folder=tmp_path, extra=extra)
    assert json.loads(again.stdout.splitlines()[-1])["already_complete"] is True

    mirror = tmp_path / "hub" / "datasets" / "HuggingFaceFW" / "fineweb-edu"
    (tmp_path / "gpt2").mkdir()
    shutil.copy(tiny_tokenizer, tmp_path / "gpt2" / "tokenizer.json")
    words = ("--source", "fineweb-edu", "--root", mirror, "--tokenizer", tmp_path / "gpt2")
    local = olm_data("tokenize", *words, "--output", tmp_path / "mirrored")
    assert local.returncode == 0, local.stderr
    assert Dataset.open(str(tmp_path / "mirrored")).digest == dataset.digest


@pytest.mark.slow
def test_from_the_hub_to_s3(hub: HubStub, s3: dict[str, str], tmp_path: Path) -> None:
    output = f"s3://{s3['bucket']}/{tmp_path.name}/fineweb-edu"
    words = ("--source", "fineweb-edu", "--subset", "sample-10BT", "--tokenizer", "gpt2")
    extra = hub.environment(tmp_path / "home")
    done = olm_data("tokenize", *words, "--output", output, folder=tmp_path, extra=extra)
    assert done.returncode == 0, done.stderr
    report = verify(output)
    assert report.findings == []
    assert report.documents == 100
    assert not (tmp_path / "tokens").exists()


def test_a_hub_that_cannot_be_reached_is_exit_6_and_nothing_is_left(tmp_path: Path) -> None:
    extra = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    done = olm_data("tokenize", "--source", "fineweb-edu", folder=tmp_path, extra=extra)
    assert done.returncode == 6, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "tokens").exists()
