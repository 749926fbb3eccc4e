"""What `olm-data status` prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.command import olm_data
from support.inline_runner import InlineRunner
from support.project import Project
from support.tokenizing import texts, write_jsonl

from olm_data.runners.base import whole

OPTIONS: dict[str, Any] = {"shard_tokens": 500, "holdout": "1/8"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(120))


def test_a_run_is_seen_from_another_process_while_it_works(source: Path, project: Project) -> None:
    seen: list[Any] = []

    class Look(InlineRunner):
        def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
            whole(job.run(0, lambda **_: None))
            seen.append(olm_data("status", "out", folder=project.folder).stdout)
            super().run(job, tasks, total, **callbacks)

    project.make([source], runner=Look(), **OPTIONS)
    assert "state      running\n" in seen[0]
    assert "done       1\n" in seen[0]
    assert re.search(r"\n  parent +\S+ +\d+ +running ", seen[0])
