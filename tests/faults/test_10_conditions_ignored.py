"""FAULTS row 10: a store that ignores or refuses conditional creates is found before work."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import olm_data
from support.inline_runner import Around
from support.store_proxy import Proxy, ignore_condition
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import ConflictError
from olm_data.storage.store import Store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(40))


def test_10_a_single_writer_still_refuses_what_it_can_see(
    proxy: Proxy, source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    output = f"s3://{proxy.server['bucket']}/{tmp_path.name}"
    rival = Around(after=lambda: Store(output).put("manifest.json", b"theirs"))
    with pytest.raises(ConflictError):
        make_dataset([source], tiny_tokenizer, output, single_writer=True, runner=rival)
    assert Store(output).read("manifest.json") == b"theirs"


@pytest.mark.slow
def test_10_the_option_works_from_the_command_line(
    proxy: Proxy, source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    output = f"s3://{proxy.server['bucket']}/{tmp_path.name}"
    proxy.inject(ignore_condition, conditional=True, times=None)
    command = ("tokenize", source, "--tokenizer", tiny_tokenizer, "--output", output)
    refused = olm_data(*command, "--workers", "1", "--encoder", "hf")
    assert refused.returncode == 6, refused.stderr
    assert "add --single-writer" in refused.stderr
    done = olm_data(*command, "--workers", "1", "--encoder", "hf", "--single-writer")
    assert done.returncode == 0, done.stderr
