"""The job of a task crosses to another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.inline_runner import InlineRunner
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.runners.base import whole


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """Three JSONL files of 40 documents each."""
    return [write_jsonl(tmp_path / f"{k}.jsonl", texts(40, 40 * k)) for k in range(3)]


def test_the_job_runs_in_a_fresh_process_from_its_pickle_alone(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    import pickle

    class Spy(InlineRunner):
        def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
            whole(job.run(0, lambda **_: None))  # makes the encoder, which must not travel
            super().run(pickle.loads(pickle.dumps(job)), tasks, total, **callbacks)

    made = make_dataset(inputs[:1], tiny_tokenizer, tmp_path / "out", runner=Spy())
    assert made.manifest.totals.documents == 40
