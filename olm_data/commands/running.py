"""What commands that run tasks share: the runner, words of the plan and of the end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from olm_data.commands.said import note

if TYPE_CHECKING:
    from olm_data.dataset.plan import Plan
    from olm_data.progress import Progress
    from olm_data.runners.local import LocalRunner
    from olm_data.runners.ray import RayRunner
    from olm_data.runners.slurm import SlurmRunner
    from olm_data.tokenization.recipe import Recipe
    from olm_data.tokenization.request import Request
    from olm_data.tokenization.run import Summary


def make_runner(recipe: Recipe) -> LocalRunner | SlurmRunner | RayRunner:
    """Return the runner that a recipe names.

    Raises:
        UsageError: options that do not go together, or are none.
    """
    from olm_data.errors import UsageError

    for option, given, of in (
        ("--slurm", recipe.slurm, "slurm"),
        ("--ray-address", recipe.ray_address, "ray"),
    ):
        if given and recipe.runner != of:
            raise UsageError(f"{option} is for --runner {of}", fix=f"add --runner {of}")
    if recipe.runner == "slurm":
        from olm_data.runners.slurm import SlurmRunner

        return SlurmRunner(recipe.workers, options=recipe.slurm)
    if recipe.runner == "ray":
        from olm_data.runners.ray import RayRunner

        return RayRunner(recipe.workers, address=recipe.ray_address)
    from olm_data.runners.local import LocalRunner, granted_cpus

    return LocalRunner(recipe.workers or granted_cpus())


def print_plan(request: Request, plan: Plan, *, as_json: bool) -> None:
    """Print what `--dry-run` found: for people, or one JSON object."""
    from olm_data.tokenization.report import plan_lines
    from olm_data.tokenization.run import first_documents

    if as_json:
        click.echo(json.dumps({"output": request.output, **plan.stored()}))
    else:
        click.echo("\n".join(plan_lines(request, plan, first_documents(request, plan))))


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
