"""What `olm-data push` and `pull` print: the result, what stayed here, and what to type next."""

from __future__ import annotations

import json

import pytest
from support.command import Olm
from support.hub_stub import HubStub
from support.project import Project
from support.tokenizing import texts

BOOKS = "hf://datasets/lab/books"


def test_result_on_standard_output_and_the_rest_beside_it(
    monkeypatch: pytest.MonkeyPatch, olm: Olm, project: Project
) -> None:
    from huggingface_hub import constants

    source = project.write("books.jsonl", texts(20))
    project.make([source], "books")
    (project / "hub").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with HubStub(project / "hub").running() as stub:
        for name, value in stub.environment(project / "home").items():
            monkeypatch.setenv(name, value)
        looked = olm("push", project / "books", BOOKS, "--dry-run", "--licence", "mit")
        said = olm("push", project / "books", BOOKS, "--licence", "mit")
        again = olm("push", project / "books", BOOKS, "--json")
        back = olm("pull", BOOKS, project / "back")
    assert looked.returncode == said.returncode == again.returncode == back.returncode == 0
    assert looked.stdout.splitlines()[0].endswith("  would push")
    assert said.stdout.splitlines()[0].endswith("  pushed")
    assert "not sent    job.json\n" in said.stdout
    result = json.loads(again.stdout)
    assert result["status"] == "already there"
    assert f"next: olm-data pull {BOOKS}@{result['commit']} FOLDER" in said.stderr
    assert result["digest"] in back.stdout
    card = (project / "hub/datasets/lab/books/README.md").read_text()
    assert 'license: "mit"' in card
