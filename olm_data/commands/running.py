"""What commands that run tasks share: options of where they run, words of the plan and the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from olm_data.commands.said import note

if TYPE_CHECKING:
    from olm_data.dataset.plan import Plan
    from olm_data.progress import Progress
    from olm_data.runners.local import LocalRunner
    from olm_data.runners.ray import RayRunner
    from olm_data.runners.slurm import SlurmRunner
    from olm_data.tokenization.request import Request
    from olm_data.tokenization.run import Summary


@dataclass(frozen=True, kw_only=True)
class Running:
    """What the options say. `runner`: local, slurm or ray."""

    runner: str
    workers: int | None
    slurm: tuple[str, ...]
    ray_address: str | None


def runner_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which gets them as `running`."""

    @click.option("--workers", type=click.IntRange(1), help="Tasks at a time.  [default: all CPUs]")
    @click.option(
        "--runner",
        type=click.Choice(["local", "slurm", "ray"]),
        default="local",
        show_default=True,
        help="Where tasks run: processes here, a Slurm job array, a Ray cluster.",
    )
    @click.option(
        "--slurm", multiple=True, help="An option of sbatch: time=4:00:00. May be repeated."
    )
    @click.option("--ray-address", help="A Ray cluster.  [default: RAY_ADDRESS, or one made here]")
    @wraps(command)
    def with_running(
        *args: Any,
        runner: str,
        workers: int | None,
        slurm: tuple[str, ...],
        ray_address: str | None,
        **rest: Any,
    ) -> Any:
        running = Running(runner=runner, workers=workers, slurm=slurm, ray_address=ray_address)
        return command(*args, running=running, **rest)

    return with_running


def running_of(parameters: dict[str, Any]) -> Running:
    """Take the options that `runner_options` adds out of a command's parameters."""
    names = ("runner", "workers", "slurm", "ray_address")
    return Running(**{name: parameters.pop(name) for name in names})


def make_runner(running: Running) -> LocalRunner | SlurmRunner | RayRunner:
    """Return the runner that the options name.

    Raises:
        UsageError: options that do not go together, or are none.
    """
    from olm_data.errors import UsageError

    for option, given, of in (
        ("--slurm", running.slurm, "slurm"),
        ("--ray-address", running.ray_address, "ray"),
    ):
        if given and running.runner != of:
            raise UsageError(f"{option} is for --runner {of}", fix=f"add --runner {of}")
    if running.runner == "slurm":
        from olm_data.runners.slurm import SlurmRunner

        return SlurmRunner(running.workers, options=running.slurm)
    if running.runner == "ray":
        from olm_data.runners.ray import RayRunner

        return RayRunner(running.workers, address=running.ray_address)
    from olm_data.runners.local import LocalRunner, granted_cpus

    return LocalRunner(running.workers or granted_cpus())


def print_plan(request: Request, plan: Plan, output: str, *, as_json: bool) -> None:
    """Print what `--dry-run` found: for people, or one JSON object."""
    from olm_data.tokenization.report import plan_lines
    from olm_data.tokenization.run import first_documents

    if as_json:
        click.echo(json.dumps({"output": output, **plan.stored()}))
    else:
        click.echo("\n".join(plan_lines(request, plan, output, first_documents(request, plan))))


def print_done(
    request: Request, done: Summary, workers: int, progress: Progress, *, as_json: bool
) -> None:
    """Print what a run made: a summary and what to type next for people, or the event `done`."""
    from olm_data.tokenization.report import next_line, summary_json, summary_lines

    if as_json:
        progress.event("done", **summary_json(done))
    else:
        click.echo("\n".join(summary_lines(request, done, workers)))
        note(next_line(done))
