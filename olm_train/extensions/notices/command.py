"""Tells people of a run that is gone without a word: `olm-train notify RUN --url https://...`.

    lease of the run, every few seconds -> given back? how it ended is in ends.jsonl
                                        -> its process is dead, or no sign of life for `--after`
                                           -> webhook, once (RUN/watched.json)

A process that is killed, by SIGKILL or for memory, or whose machine is down, says nothing itself.
Runs on any machine that sees the run's folder; without torch.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import click

from olm_data.command import Command, say
from olm_data.counts import duration
from olm_data.errors import InputError, UsageError, printable
from olm_data.extensions.watching.follow import last_step
from olm_data.path_kinds import nearest
from olm_data.run_log.log import End, read_ends
from olm_data.run_log.run_folder import LEASE
from olm_data.storage.lease import Record, newest
from olm_data.storage.process import ProcessState, state_of
from olm_data.storage.store import Store, is_remote
from olm_train.callbacks.notice import Event, Notice, address
from olm_train.extensions.notices.sender import WATCHED, Sender, SentLog

LOOKS = 8
"""How often in `--after` it looks."""
MOST_BETWEEN = 5.0
"""Seconds between two looks, at most."""
MAX_PER_HOUR = 20
AFTER = "Seconds without a sign of life; never less than the run's trainer.takeover_seconds."
WHY = "killed (SIGKILL, out of memory), or its machine is down; run the same command again"


@dataclass
class LeaseWatch:
    """What was seen of the lease of a run.

    Attributes:
        after: seconds without a change after which its holder is gone; those after which the lease
            itself may be taken over, where they are more: between two signs of life nobody is gone.
        told: number of the lease whose holder was found gone.
    """

    after: float
    told: int = 0
    _seen: Record | None = None
    _since: float = 0.0

    def look(self, lease: Record | None, now: float) -> str | None:
        """Return why the holder of a lease is gone, once for each; None: it is not.

        Args:
            lease: as it is now.
            now: by the monotonic clock of this machine, which alone is asked.
        """
        if lease != self._seen:
            self._seen, self._since = lease, now
        if lease is None or lease.released or lease.fence <= self.told:
            return None
        dead = state_of(lease.process) is ProcessState.dead
        silence = max(self.after, lease.takeover)
        if not dead and now - self._since < silence:
            return None
        self.told = lease.fence
        who = f"process {lease.pid} on {printable(lease.host[:100])}"
        return f"{who} is gone" if dead else f"no sign of life of {who} for {duration(silence)}"


def ended(folder: Path, lease: Record | None) -> End | None:
    """Return how a run ended that nobody needs to go on with; None: it runs, or will again."""
    if lease is None or not lease.released:
        return None
    ends = read_ends(folder)
    return ends[-1] if ends and ends[-1].reason in ("finished", "cancelled") else None


def watch(folder: Path, sender: Sender, after: float) -> End:
    """Watch a run until it has finished or was cancelled; return how it ended."""
    store, seen = Store(folder), LeaseWatch(after)
    while True:
        lease = newest(store, LEASE) or newest(store, f".{LEASE}")
        end = ended(folder, lease)
        if end is not None:
            return end
        why = seen.look(lease, time.monotonic())
        if why is not None:
            step, name = last_step(folder), folder.absolute().name
            text = f"{why}; last logged step {step:,}\n{WHY}"
            say(f"{name}: {text}")
            now = round(time.time(), 3)
            sender.put(Notice(event=Event.lost, run=name, step=step, text=text, time=now))
        threading.Event().wait(min(after / LOOKS, MOST_BETWEEN))


@click.command(cls=Command)
@click.argument("run")
@click.option("--url", help="Webhook; default: the environment variable SLACK_WEBHOOK_URL.")
@click.option("--after", default=120.0, show_default=True, help=AFTER)
def main(run: str, url: str | None, after: float) -> None:
    """Watch a run, and tell a webhook when its process is gone without a word.

    \b
    olm-train notify runs/first --url https://hooks.slack.com/services/...

    Ends when the run has finished or was cancelled. A run that failed, or was stopped to go on
    later, has said so itself, and is watched on.
    """
    if is_remote(run):
        raise UsageError(
            "the folder to watch is a local one",
            where=run,
            fix="give the trainer.work_dir of the run",
        )
    if not Path(run).is_dir():
        raise InputError(
            "there is no folder of a run", where=run, fix=nearest(run, "check the path")
        )
    if not after > 0:
        raise UsageError(f"--after is above 0 seconds, not {after:g}", where="--after")
    found = address(url, "--url")
    sent = SentLog(Path(run) / WATCHED)
    if sent.note:
        say(f"warning: {sent.note}")
    sender = Sender(found, sent, say, max_per_hour=MAX_PER_HOUR)
    try:
        end = watch(Path(run), sender, after)
    finally:
        sender.close()
    click.echo(f"{end.reason} at step {end.step:,}")
