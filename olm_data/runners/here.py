"""Run tasks in this process, one after the other: what it holds at `memory://` no other sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from olm_data.runners.base import Count, Done, Job, Note, Runner, Watch, whole
from olm_data.runners.local import Reporter


class HereRunner(Runner):
    """Runs the tasks where it is called."""

    workers = 1

    def planned(self, tasks: int) -> str:
        """Return where `tasks` would run, in words."""
        return f"this process: {tasks:,} tasks, one after the other"

    def run(
        self, job: Job, tasks: Sequence[int], total: int, *, done: Done, watch: Watch, note: Note
    ) -> None:
        """See `base.Runner.run`."""
        counts = np.zeros((total, len(Count)), np.int64)
        job.prepare()
        for task in tasks:
            watch(counts, [task])
            done(task, whole(job.run(task, Reporter(counts[task]))))
        watch(counts, [])
