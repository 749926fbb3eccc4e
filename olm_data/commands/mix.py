"""`olm-data mix`: options and what is printed."""

from __future__ import annotations

import json
import sys

import click


@click.command()
@click.argument("manifest", type=click.Path(dir_okay=False))
@click.option("--output", help="Lock file to write.  [default: NAME.lock.json beside it]")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace another lock at the output.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def mix(manifest: str, output: str | None, dry_run: bool, overwrite: bool, as_json: bool) -> None:
    """Compile a mixture manifest into the lock that training takes.

    \b
    olm-data mix manifest.yaml                  writes manifest.lock.json
    olm-data mix manifest.yaml --dry-run        prints the plan only
    """
    from rich.console import Console

    from olm_data.mixture import mix as verb

    done = verb.mix(manifest, output, dry_run=dry_run, overwrite=overwrite)
    if as_json:
        result = {"lock": done.path, "status": done.status, **verb.plan(done.lock)}
        click.echo(json.dumps(result, indent=1))
    else:
        verb.print_plan(done.lock, Console(width=None if sys.stdout.isatty() else 140))
    for warning in verb.warnings(done.lock):
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"{done.status}: {done.path} (digest {done.lock.digest[:12]})", err=True)
    following = (
        f"olm-data mix {manifest}"
        if dry_run
        else f"torchrun -m olm_train.run train.yaml --data_loader.mixture={done.path}"
    )
    click.echo(f"next: {following}", err=True)
