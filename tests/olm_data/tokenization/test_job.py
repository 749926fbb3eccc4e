"""The job of a task crosses to another process."""

from __future__ import annotations

from typing import Any

from support.inline_runner import InlineRunner
from support.project import Project

from olm_data.runners.base import whole


def test_the_job_runs_in_a_fresh_process_from_its_pickle_alone(project: Project) -> None:
    import pickle

    class Spy(InlineRunner):
        def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
            whole(job.run(0, lambda **_: None))  # makes the encoder, which must not travel
            super().run(pickle.loads(pickle.dumps(job)), tasks, total, **callbacks)

    made = project.make(project.inputs[:1], runner=Spy())
    assert made.manifest.totals.documents == 40
