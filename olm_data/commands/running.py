"""What `tokenize` and `add` share: from a recipe to a finished run, and what is printed of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import click

from olm_data import plugins
from olm_data.commands.said import note, show_progress
from olm_data.errors import UsageError, printable, typed
from olm_data.printing import emit
from olm_data.storage.objects import scheme_of

if TYPE_CHECKING:
    from olm_data.progress import Progress
    from olm_data.runners.base import NamedRunner
    from olm_data.tokenization.recipe import Recipe
    from olm_data.tokenization.request import Request
    from olm_data.tokenization.summary import Summary

WORKER_MODULES = ("olm_data.runners.local", "olm_data.tokenization.job", "tokenizers")
FAST_MODULES = ("awkward", "gigatoken")
"""What a worker needs, imported once for all of them."""


class Planned(NamedTuple):
    """What a dry run found; `runner` says in words where it would run."""

    request: Request
    runner: str


class Done(NamedTuple):
    """What a run made, `workers` tasks at a time."""

    request: Request
    summary: Summary
    workers: int
    progress: Progress


def run_and_print(
    recipe: Recipe, verb: str, *, dataset: str | None = None, dry_run: bool, as_json: bool
) -> None:
    """Do what a recipe says, and print what was planned or made: for people, or JSON.

    Args:
        verb: the command, for the display of progress.
        dataset: add to this one.
        dry_run: plan it, and write nothing.
    """
    begin = partial(show_progress, verb, as_json=as_json)
    done = run(recipe, dataset=dataset, dry_run=dry_run, begin=begin, alone=True)
    import msgspec

    from olm_data.tokenization.summary import RunResult, plan_lines

    if isinstance(done, Planned):
        request, runner = done
        if as_json:
            click.echo(json.dumps({"output": request.output, **msgspec.to_builtins(request.plan)}))
            return
        emit(request.plan, as_json, plan_lines(request, next(request.documents(), None), runner))
        return
    result = RunResult.of(done.summary, done.workers)
    if as_json:
        done.progress.event("done", **msgspec.to_builtins(result))
        return
    emit(result, as_json)
    note(f"next: olm-data verify {typed(result.output)}")


def run(
    recipe: Recipe,
    *,
    dataset: str | None = None,
    dry_run: bool = False,
    begin: Callable[[], Progress],
    alone: bool = False,
) -> Planned | Done:
    """Do what a recipe says.

    Args:
        dataset: add to this one.
        dry_run: plan it, and write nothing.
        begin: called at the start, returns what shows how far the work is.
        alone: this process does nothing else, so that workers may be forked from it.

    Raises:
        OlmError: see `tokenization.tokenize.tokenize`; fields that do not go together.
    """
    named = (*recipe.inputs, recipe.output or "", dataset or "")
    # a client of remote storage has a thread; and the second pass over a plan begins beside others
    fork = alone and not recipe.source and not recipe.dedup and not any(map(scheme_of, named))
    fork = fork and recipe.like is None
    if recipe.runner == "local" and not dry_run:
        from olm_data.runners import fork_server

        # before all else is imported: on another core, the server of the workers imports the same
        if fork:
            os.environ.update(fork_server.ONE_THREAD)
        else:
            fast = () if recipe.encoder == "hf" else FAST_MODULES
            fork_server.start(WORKER_MODULES + fast)
    progress = begin()
    from olm_data.dataset.folder import refuse_place
    from olm_data.sources.standard_input import spooled
    from olm_data.storage.store import Store
    from olm_data.tokenization.base_dataset import BaseDataset
    from olm_data.tokenization.like import request_like
    from olm_data.tokenization.request import prepare, refuse_identical, require_own

    single = recipe.single_writer
    if dataset is None and recipe.like is None:
        require_own(recipe)
    base = None if dataset is None else BaseDataset.open(dataset, single_writer=single)
    spool = spooled(recipe.inputs, recipe.format, recipe.runner, note)
    inputs: Sequence[str] = click.get_current_context().with_resource(spool)
    request = prepare(recipe, inputs, base) if recipe.like is None else request_like(recipe)
    if base is None and (recipe.tokenizer is None or recipe.output is None):
        name = printable(request.tokenizer.name)
        note(f"tokenizer {name}, output {printable(request.output)}")
    if dry_run:
        runner = make_runner(recipe, _places(request))
        if base is None:
            refuse_place(Store(request.output, single_writer=single))
        if not recipe.allow_duplicates:
            refuse_identical(request.source)
        return Planned(request, runner.planned(len(request.plan.tasks)))
    from olm_data.tokenization.tokenize import tokenize

    runner = make_runner(recipe, _places(request), fork=fork)
    summary = tokenize(request, runner=runner, progress=progress)
    return Done(request, summary, runner.workers, progress)


def _places(request: Request) -> list[str]:
    return [request.output, *(file.url for file in request.source.inputs)]


def make_runner(recipe: Recipe, places: Sequence[str] = (), *, fork: bool = False) -> NamedRunner:
    """Return the runner that a recipe names.

    Args:
        places: of inputs and output; the runner is this process where it holds one itself.
        fork: see `LocalRunner`.

    Raises:
        UsageError: options that do not go together, or are none.
    """
    from olm_data.runners.local import HereRunner, LocalRunner, granted_cpus

    if any(scheme_of(place) == "memory" for place in places):
        if recipe.runner != "local":
            raise UsageError(
                "what this process holds at memory:// no other machine sees",
                where=f"--runner {recipe.runner}",
                fix="leave out --runner, or name a folder or bucket that all machines share",
            )
        return HereRunner()
    if recipe.runner != "local":
        runner: Callable[..., NamedRunner] = plugins.load("olm_data.runners", recipe.runner)
        own: dict[str, dict[str, object]] = {
            "slurm": {"options": recipe.slurm},
            "ray": {"address": recipe.ray_address},
        }
        return runner(recipe.workers, **own[recipe.runner])
    return LocalRunner(recipe.workers or granted_cpus(), fork=fork)
