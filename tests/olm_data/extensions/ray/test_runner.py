"""The Ray runner, on a real Ray: the bytes of a local run, errors brought back, few in flight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command import olm_data
from support.project import Project
from support.tokenizing import digests, texts, write_jsonl

from olm_data.errors import InputError, StorageError
from olm_data.extensions.ray.runner import RayRunner
from olm_data.runners.base import Count

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(120))


def test_ray_tasks_give_the_bytes_of_a_local_run(
    ray_cluster: None, source: Path, project: Project
) -> None:
    options: dict[str, Any] = {"shard_tokens": 300, "holdout": "1/8"}
    most = 0

    class Watched(RayRunner):
        def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
            def watch(counts: np.ndarray, running: Sequence[int]) -> None:
                nonlocal most
                most = max(most, len(running))
                callbacks["watch"](counts, running)

            super().run(job, tasks, total, **(callbacks | {"watch": watch}))

    whole = project.make([source], "whole", **options)
    runner = Watched(2)
    made = project.make([source], runner=runner, **options)
    assert len(made.manifest.shards) > 5
    assert most <= 2  # whatever the number of tasks
    assert made.manifest.digest == whole.manifest.digest
    assert digests(project.out) == digests(project / "whole")
    for count in (Count.DOCUMENTS, Count.TOKENS):
        assert made.now(count) == whole.now(count)


def test_an_error_of_a_task_comes_back_whole(
    ray_cluster: None, source: Path, project: Project
) -> None:
    class Spoil(RayRunner):
        def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
            source.write_bytes(source.read_bytes()[:-100])
            super().run(job, tasks, total, **callbacks)

    with pytest.raises(InputError, match="changed while it was being read") as caught:
        project.make([source], runner=Spoil(2))
    assert caught.value.where == "a.jsonl"
    assert "in run" in str(caught.value.__cause__)


def test_workers_are_the_clusters_cpus_unless_asked(
    ray_cluster: None, source: Path, project: Project
) -> None:
    runner = RayRunner(None)
    project.make([source], runner=runner)
    assert runner.workers == 2


def test_a_cluster_that_does_not_answer_is_an_error_for_the_user(
    source: Path, project: Project
) -> None:
    words = ("--tokenizer", project.tokenizer, "--output", project.out, "--encoder", "hf")
    address = ("--runner", "ray", "--ray-address", "not-an-address")
    failed = olm_data("tokenize", source, *words, *address)
    assert failed.returncode == StorageError.exit_code, failed.stderr
    assert "no Ray cluster answers" in failed.stderr
    failed = olm_data("tokenize", source, *words, "--ray-address", "auto")
    assert failed.returncode == 2
    assert "no effect without runner: ray" in failed.stderr
