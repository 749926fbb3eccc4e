"""`olm-train ladder`: options, and what is printed."""

from __future__ import annotations

from pathlib import Path

import click

from olm_data.command import CommandGroup, say
from olm_data.errors import UsageError
from olm_data.extras import needs
from olm_data.printing import emit

with needs("a ladder"):
    from olm_train.extensions.ladder import forecast, run
    from olm_train.extensions.ladder.best import answer
    from olm_train.extensions.ladder.config import LadderConfig
    from olm_train.extensions.ladder.fit import fitted
    from olm_train.extensions.ladder.mixtures import Search, SearchConfig
    from olm_train.extensions.ladder.plan import plan as planned
    from olm_train.extensions.ladder.points import RESULTS, read_points
    from olm_train.extensions.ladder.report import write_report
    from olm_train.extensions.ladder.submit import submit
    from olm_train.extensions.launch.command import read_launch

_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
_TO = click.option("--to", type=click.Choice(["slurm"]), help="Submit a job a point: where to.")
_LAUNCH = click.argument("launch", metavar="[LAUNCH.yaml]", required=False)
_LADDER = click.argument("ladder", metavar="LADDER.yaml")
_AS_TYPED = {"ignore_unknown_options": True}


@click.group(cls=CommandGroup)
def main() -> None:
    """Say from small runs what the loss of a large one will be.

    \b
    olm-train ladder plan ladder.yaml
    olm-train ladder run ladder.yaml
    olm-train ladder fit ladder.yaml
    olm-train ladder predict ladder.yaml train.yaml
    olm-train ladder grade ladder.yaml runs/large
    olm-train ladder mix mix-search.yaml
    olm-train ladder report ladder.yaml mix-search.yaml --output ladder.html
    """


@main.command()
@_LADDER
@_AS_JSON
def plan(ladder: str, as_json: bool) -> None:
    """Print the points, what each costs, and how well all of them determine the exponents.

    \b
    olm-train ladder plan ladder.yaml
    """
    emit(planned(LadderConfig.read(ladder)), as_json)


@main.command("run")
@_LADDER
@_LAUNCH
@_TO
@click.option("--dry-run", is_flag=True, help="Print the plan, or the jobs; train nothing.")
@click.pass_context
def run_points(
    context: click.Context, ladder: str, launch: str | None, to: str | None, dry_run: bool
) -> None:
    """Train the points that are not trained yet, one after the other, or a job each.

    \b
    olm-train ladder run ladder.yaml
    olm-train ladder run ladder.yaml --to slurm launch.yaml
    """
    read = LadderConfig.read(ladder)
    points = planned(read)
    batch = run.batch_of(read, points)
    if dry_run and not (to or launch):
        emit(points, as_json=False)
    elif _trained(context, batch, to, launch, dry_run):
        say(f"all {len(points.points)} points are trained: {batch.results}")


def _trained(
    context: click.Context, batch: run.LadderRuns, to: str | None, launch: str | None, dry_run: bool
) -> bool:
    """Train points here, or submit them; return whether all are trained."""
    if bool(to) != bool(launch):
        raise UsageError("jobs need both --to and LAUNCH.yaml", fix="... --to slurm launch.yaml")
    if launch:
        here = Path(launch).absolute().parent
        return not submit(batch, read_launch(launch), here, say, dry_run=dry_run) and not dry_run
    if code := run.train(batch, say):
        context.exit(code)
    return True


@main.command()
@_LADDER
@_AS_JSON
def fit(ladder: str, as_json: bool) -> None:
    """Fit the law to the points; first is its error at the largest size, which was held out.

    \b
    olm-train ladder fit ladder.yaml
    """
    emit(fitted(read_points(Path(LadderConfig.read(ladder).folder) / RESULTS)), as_json)


@main.command(context_settings=_AS_TYPED)
@_LADDER
@click.argument("config", metavar="TRAIN.yaml")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--far", is_flag=True, help="Also beyond 10 times the ladder's largest compute.")
@_AS_JSON
def predict(ladder: str, config: str, options: tuple[str, ...], far: bool, as_json: bool) -> None:
    """Say the loss of a run before it is trained; keep it in the run's folder as forecast.json.

    \b
    olm-train ladder predict ladder.yaml train.yaml --model.depth=12
    """
    emit(forecast.forecast(LadderConfig.read(ladder), config, options, far), as_json)


@main.command()
@_LADDER
@click.argument("run")
@_AS_JSON
def grade(ladder: str, run: str, as_json: bool) -> None:
    """Compare a run with its forecast, also while it trains; keep the score once it has ended.

    \b
    olm-train ladder grade ladder.yaml runs/large
    """
    emit(forecast.grade(LadderConfig.read(ladder), run), as_json)


@main.command("mix")
@click.argument("search", metavar="MIX-SEARCH.yaml")
@_LAUNCH
@_TO
@click.option(
    "--dry-run", is_flag=True, help="Print mixtures and cost, or the jobs; train nothing."
)
@_AS_JSON
@click.pass_context
def mix_search(
    context: click.Context,
    search: str,
    launch: str | None,
    to: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train small runs of several mixtures; write the manifest of the best one, and how sure it is.

    \b
    olm-train ladder mix mix-search.yaml
    olm-train ladder mix mix-search.yaml --to slurm launch.yaml
    """
    read = Search.open(SearchConfig.read(search))
    points = read.plan()
    if dry_run and not (to or launch):
        emit(points, as_json)
    elif _trained(context, read.batch(points), to, launch, dry_run):
        emit(answer(read), as_json)


@main.command()
@click.argument("files", metavar="LADDER.yaml|MIX-SEARCH.yaml...", nargs=-1, required=True)
@click.option("--output", default="ladder.html", show_default=True, help="HTML file to write.")
def report(files: tuple[str, ...], output: str) -> None:
    """Draw what ladders and mixture searches found, on one page.

    \b
    olm-train ladder report ladder.yaml mix-search.yaml --output ladder.html
    """
    say(f"written: {write_report(files, output)}")
