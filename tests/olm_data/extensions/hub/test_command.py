"""What `olm-data push` and `pull` print: the result, what stayed here, and what to type next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import inside
from support.hub_stub import HubStub
from support.tokenizing import make_dataset, texts, write_jsonl

BOOKS = "hf://datasets/lab/books"


def test_result_on_standard_output_and_the_rest_beside_it(
    tmp_path: Path,
    tiny_tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from huggingface_hub import constants

    source = write_jsonl(tmp_path / "books.jsonl", texts(20))
    make_dataset([source], tiny_tokenizer, tmp_path / "books")
    (tmp_path / "hub").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with HubStub(tmp_path / "hub").running() as stub:
        for name, value in stub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        looked = inside(capsys, "push", tmp_path / "books", BOOKS, "--dry-run", "--licence", "mit")
        said = inside(capsys, "push", tmp_path / "books", BOOKS, "--licence", "mit")
        again = inside(capsys, "push", tmp_path / "books", BOOKS, "--json")
        back = inside(capsys, "pull", BOOKS, tmp_path / "back")
    assert looked.returncode == said.returncode == again.returncode == back.returncode == 0
    assert looked.stdout.splitlines()[0].endswith("  would push")
    assert said.stdout.splitlines()[0].endswith("  pushed")
    assert "not sent    job.json\n" in said.stdout
    result = json.loads(again.stdout)
    assert result["status"] == "already there"
    assert f"next: olm-data pull {BOOKS}@{result['commit']} FOLDER" in said.stderr
    assert result["digest"] in back.stdout
    card = (tmp_path / "hub/datasets/lab/books/README.md").read_text()
    assert 'license: "mit"' in card
