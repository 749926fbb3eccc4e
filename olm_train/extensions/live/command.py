"""The command that shows runs while they train: `olm-train watch runs/first`.

    s3://... --RemoteRun--.
    run folders ----------+-RunView--> page on loopback, in a browser; redrawn as the logs grow

Reads the folders only; imports no torch.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from olm_data.command import Command, CountParam
from olm_data.extras import needs
from olm_data.storage.store import is_remote


@click.command(cls=Command)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--port", type=CountParam(0, 65535), default=8765, show_default=True, help="0: a free one."
)
@click.option("--lock", help="Mixture lock of the runs, where it no longer lies where it did.")
def main(runs: tuple[str, ...], port: int, lock: str | None) -> None:
    """Serve one page on this machine that shows runs as they train, several in one chart.

    \b
    olm-train watch runs/first
    olm-train watch runs/first runs/second --port 9000

    Loss, held-out losses, rates, throughput, mixture drawn so far, spikes, checkpoints, starts and
    ends; a click on the loss curve shows the documents of that step. Ctrl-C ends it. From another
    machine: ssh -L 8765:127.0.0.1:8765 HOST

    A folder is looked at each second, a remote one (s3://...) every 30 seconds: its log is there as
    of the last checkpoint, and that of now in the trainer.work_dir of the run.
    """
    with needs("the page"):
        from olm_data.extensions.report.remote_run import RemoteRun
        from olm_data.extensions.report.run_view import open_views
        from olm_data.extensions.report.serve import PageServer
    addresses = list(dict.fromkeys(runs))
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="olm-watch-")))
        folders, notes = list[Path](), dict[Path, Callable[[], str]]()
        for number, address in enumerate(addresses):
            folder = Path(address)
            if is_remote(address):
                folder = place / str(number) / address.rstrip("/").rpartition("/")[2]
                notes[folder] = stack.enter_context(RemoteRun(address, folder)).note
            folders.append(folder)
        server = stack.enter_context(PageServer(open_views(folders, lock, notes), port))
        click.echo(f"watching {', '.join(addresses)} at {server.url}")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)
