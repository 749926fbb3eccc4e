"""olm-data verify: what each option does, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command import olm_data
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.cli import cli
from olm_data.errors import UsageError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    source = write_jsonl(folder / "a.jsonl", texts(300))
    make_dataset([source], tiny_tokenizer, folder / "out", shard_tokens=300, holdout="1/8")
    return folder / "out"


def test_the_command_says_it_was_a_sample_and_how_to_read_the_rest(made: Path) -> None:
    done = olm_data("verify", made, "--sample", "1%", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert "sample        1/100\n" in done.stdout
    assert f"next: olm-data verify {made}   reads every byte" in done.stderr


@pytest.mark.parametrize("words", [["--sample", "0"], ["--seed", "3"], ["--root", "."]])
def test_options_that_would_do_nothing_are_refused(words: list[str], made: Path) -> None:
    assert isinstance(CliRunner().invoke(cli, ["verify", str(made), *words]).exception, UsageError)
