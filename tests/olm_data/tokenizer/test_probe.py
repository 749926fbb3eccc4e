"""A tokenizer file is tried in a child once; hostile ones: FAULTS row 77."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from olm_data.errors import InputError
from olm_data.tokenizer import probe as module
from olm_data.tokenizer.probe import probe


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    started: list[Any] = []
    run = subprocess.run

    def counted(*arguments: Any, **options: Any) -> Any:
        started.append(arguments)
        return run(*arguments, **options)

    monkeypatch.setattr(module.subprocess, "run", counted)
    return started


def test_a_good_file_is_tried_once_and_remembered(
    tiny_tokenizer: Path, children: list[Any]
) -> None:
    data = tiny_tokenizer.read_bytes()
    probe(data, "tokenizer.json")
    probe(data, "tokenizer.json")
    assert len(children) == 1
    probe(data + b" ", "another")
    assert len(children) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"MOST_BYTES": 10}, "more than 10"),
        ({"CPU_SECONDS": 0}, "not safe to use"),
        ({"MEMORY_BASE": 1 << 20, "MEMORY_FACTOR": 0}, "not safe to use"),
        ({"WALL_SECONDS": 0.01}, "not safe to use"),
    ],
)
def test_each_limit_ends_a_trial_and_is_not_remembered_as_good(
    tiny_tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    children: list[Any],
    change: dict[str, float],
    says: str,
) -> None:
    data = tiny_tokenizer.read_bytes()
    with monkeypatch.context() as patch:
        for name, value in change.items():
            patch.setattr(module, name, value)
        with pytest.raises(InputError, match=says):
            probe(data, "tokenizer.json")
    before = len(children)
    probe(data, "tokenizer.json")
    assert len(children) == before + 1
