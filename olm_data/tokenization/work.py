"""`olm-data work`: some tasks of a run, by a process that knows nothing but the output's place.

    plan.json, tokenizer.json, job.json -> TokenizeJob -> tasks not yet committed -> local processes

What the workers of a batch system run. Any number of them may work on one output, beside each other
and beside the command that began it; two on the same task write the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from olm_data.dataset.manifest import JOB
from olm_data.dataset.plan import parse_tasks
from olm_data.errors import UsageError
from olm_data.runners.base import Note
from olm_data.runners.heartbeat import RUN, Heartbeat
from olm_data.runners.local import LocalRunner
from olm_data.storage.store import Store, absolute
from olm_data.threads import in_order
from olm_data.tokenization.stored_job import load_job
from olm_data.tokenization.task_results import no_run


def find_tasks(output: str, text: str, part: str | None) -> list[int]:
    """Return the task numbers that `3-7,9` spells, or `@NAME`: a file of `run/` that spells them.

    Args:
        part: `2/8` takes the tasks 2, 10, 18, ... of them, counted from 0; None takes all.

    Raises:
        UsageError: they spell none.
    """
    if text.startswith("@"):
        try:
            text = Store(output).child(RUN).read(text[1:]).decode()
        except FileNotFoundError as error:
            raise UsageError("there is no such list of tasks", where=f"{output}: {text}") from error
    tasks = parse_tasks(text)
    if part is None:
        return tasks
    index, _, count = part.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UsageError(f"--part {part!r} is not INDEX/COUNT", fix="write 0/8, 1/8, ... 7/8")
    return tasks[int(index) :: int(count)]


def work(
    output: str,
    tasks: Sequence[int],
    *,
    workers: int,
    name: str,
    note: Note,
    trust: bool = False,
) -> int:
    """Run those of `tasks` that are not finished, on `workers` processes of this machine.

    Returns how many it ran.

    Args:
        name: of this worker; no other live worker of the output may have it.
        note: where to say that a process died and the like.
        trust: classes of somebody's own that the run names may be imported.

    Raises:
        UsageError: the plan has no such task.
        OlmError: as `TokenizeJob.run`; finished tasks are kept.
    """
    output = absolute(output)
    if not Store(output).exists(JOB):  # nothing is written to a place that is no run's
        raise no_run(output)
    with Heartbeat(Store(output), name, note=note) as heartbeat:
        job = load_job(output, trust=trust).beside(name)
        total = len(job.plan.tasks)
        if tasks and max(tasks) >= total:
            raise UsageError(f"the plan has {total:,} tasks, there is no task {max(tasks):,}")
        finished = list(in_order(lambda task: job.finished(task) is not None, tasks))
        todo = [task for task, there in zip(tasks, finished, strict=True) if not there]
        try:
            if todo:
                done, watch = heartbeat.saw_done, heartbeat.saw
                LocalRunner(workers).run(job, todo, total, done=done, watch=watch, note=note)
        finally:
            for split in job.splits:  # processes that were killed cannot clean up themselves
                split.clear_staging()
    return len(todo)
