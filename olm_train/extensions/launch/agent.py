"""The agent of a node: starts its ranks, and ends with the code of the rank that failed first.

    python -m olm_train.extensions.launch.agent SNAPSHOT --digest=... --nodes=2 --meet=HOST:PORT

    snapshot verified -> preflight ranks -> training ranks -> one code for all nodes (exit_codes.py)
                            '-- the agents meet in the store that the ranks meet in --'

It takes torchrun's place, whose exit code is 1 whatever its ranks ended with, and gives the ranks
torchrun's environment. Signals go on to the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from olm_data.bounded_json import decode_object
from olm_data.command import Command, run_process, say
from olm_data.errors import OlmError, UsageError
from olm_data.extras import needs
from olm_data.storage.store import Store
from olm_train.extensions.launch.exit_codes import LOST_RANK, ends_with, exit_code, first

with needs("training"):
    import torch.distributed as dist

    from olm_train.checkpoint.manifest import CheckpointManifest, candidates, step_of
    from olm_train.distributed.preempt import REQUEUE_EXIT_CODE, SIGNALS, name_of
    from olm_train.distributed.world import FAREWELL, START_TIMEOUT, meeting_place
    from olm_train.extensions.launch.snapshot import TRAIN, verify, verify_surroundings

POLL = 0.2
"""Seconds between two looks at the ranks."""
PATIENCE = 30.0
"""Seconds that ranks have to end after another one failed, as those of torchrun."""
_VERDICT, _STOPPED, _END = "verdict", "stopped", "end"


def node_name() -> str:
    """Return what the scheduler calls this node, else its host's name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(kw_only=True)
class Agent:
    """One node of a job.

    Args:
        node: its number, from 0; the first one hosts the store.
        nodes: of the job.
        ranks: processes that each node starts.
        margin: seconds that ranks have to save in once one has ended with 75.
    """

    node: int
    nodes: int
    ranks: int
    margin: float
    store: dist.Store = field(init=False)
    signalled: int = field(init=False, default=0)
    attempts: int = field(init=False, default=0)
    _running: list[subprocess.Popen[bytes]] = field(init=False, default_factory=list)

    def meet(self, timeout: timedelta = START_TIMEOUT) -> None:
        """Open the store at `MASTER_ADDR`, `MASTER_PORT`, or wait for the first node's.

        Raises:
            ResourceError: it cannot be opened or reached.
        """
        if self.node == 0 and os.environ["MASTER_PORT"] == "0":
            with socket.create_server(("127.0.0.1", 0)) as free:
                os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        who = f"node {self.node}"
        self.store = meeting_place(who, timeout, hosts=self.node == 0)

    def supervise(self, command: Sequence[str], *, failed: int = 0) -> int:
        """Run a command as each rank of this node; return the first failure of any node, else 0.

        Args:
            command: of a rank.
            failed: a code that this node fails with before it has ranks.
        """
        met = dist.PrefixStore(f"agents {self.attempts}", self.store)
        lowest = self.node * self.ranks
        environment = {
            **os.environ,
            "WORLD_SIZE": str(self.nodes * self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_RANK": str(self.node),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self.attempts),
        }
        self.attempts += 1
        if failed:
            met.compare_set(_VERDICT, "", f"{failed} {lowest}")
        for n in range(0 if failed else self.ranks):
            own = {"LOCAL_RANK": str(n), "RANK": str(lowest + n)}
            self._running.append(subprocess.Popen(command, env=environment | own))
        if self.signalled:  # perhaps before there were all of them
            self._send(self.signalled)
        try:
            verdict = self._watch(met, lowest)
        except (dist.DistNetworkError, dist.DistStoreError):
            say(f"node {self.node} lost the first node, which holds the meeting place")
            verdict = LOST_RANK
        self._stop(verdict)
        return verdict

    def _watch(self, met: dist.Store, lowest: int) -> int:
        """Wait until the ranks of all nodes have ended, or one has failed; return its code."""
        done = False
        while not met.check([_VERDICT]):
            codes = [rank.poll() for rank in self._running]
            if self.signalled:  # said before what it may have ended
                self.store.set(_STOPPED, "")
            failed = {n: self._code(code) for n, code in enumerate(codes) if code}
            if failed:
                n = first(failed)
                met.compare_set(_VERDICT, "", f"{failed[n]} {lowest + n}")
                continue
            if not done and None not in codes:
                met.add("done", 1)
                done = True
            if done and met.add("done", 0) == self.nodes:
                return 0
            threading.Event().wait(POLL)
        code, rank = (int(word) for word in bytes(met.get(_VERDICT)).split())
        if self.node == 0:
            say(f"rank {rank} of node {rank // self.ranks} ended first, with exit code {code}")
        return code

    def _code(self, returncode: int) -> int:
        """Return a rank's exit code; of one that the job's signal ended before it could save, that
        it is to be started again."""
        unheard = returncode == -self.signalled and self.signalled != signal.SIGINT
        return REQUEUE_EXIT_CODE if unheard else exit_code(returncode)

    def _stop(self, verdict: int) -> None:
        """Let the ranks that still run end: those that save have `margin` seconds."""
        saves = verdict in (0, REQUEUE_EXIT_CODE)
        deadline = time.monotonic() + (self.margin if saves else PATIENCE)
        if not saves:
            self._send(signal.SIGTERM)
        for rank in self._running:
            try:
                rank.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
        self._running = []

    def _send(self, number: int) -> None:
        for rank in self._running:
            rank.send_signal(number)

    def signal(self, number: int, _: Any) -> None:
        """Hand a signal on to the ranks."""
        self.signalled = number
        self._send(number)

    def agree(self, code: int, *, gained: bool) -> tuple[int, bool]:
        """Return what all nodes end with, as the first node says, and whether one was signalled."""
        said = dist.PrefixStore(f"end {self.attempts}", self.store)
        mine = ends_with(code, gained=gained)
        try:
            if self.signalled:
                self.store.set(_STOPPED, "")
            if self.node == 0:
                stopped = int(self.store.check([_STOPPED]))
                said.set(_END, f"{mine} {stopped}")
            said.wait([_END], timedelta(seconds=2 * PATIENCE))
            end, stopped = (int(word) for word in bytes(said.get(_END)).split())
            if said.add("left", 1) < self.nodes and self.node == 0:
                self._farewell(said)
            return end, bool(stopped)
        except (dist.DistNetworkError, dist.DistStoreError):
            return mine, True

    def _farewell(self, said: dist.Store) -> None:
        """Keep the store until the others have read it, or are gone."""
        deadline = time.monotonic() + FAREWELL.total_seconds()
        while said.add("left", 0) < self.nodes and time.monotonic() < deadline:
            threading.Event().wait(POLL)


def newest_step(save_folder: str) -> int:
    """Return the step of the newest checkpoint that is whole by its manifest, 0 without one."""
    for name in candidates(save_folder):
        try:
            CheckpointManifest.read(Store(save_folder).child(name))
        except OlmError:
            continue
        return step_of(name) or 0
    return 0


@click.command(cls=Command)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--digest", required=True, help="Of the snapshot.")
@click.option("--nodes", default=1, help="Nodes of the job.")
@click.option("--ranks", default=1, help="Ranks of each node.")
@click.option("--gpus", default=0, help="GPUs that each node must have.")
@click.option("--meet", required=True, help="HOST:PORT of the first node; port 0: a free one.")
@click.option("--node-from", help="Variable that holds the number of this node. [default: 0]")
@click.option("--margin", default=300.0, help="Seconds that ranks have to save in.")
@click.option("--preflight", help="What is looked at before the first step, as JSON.")
@click.option("--again", is_flag=True, help="Start again by itself where the code is 75.")
@click.pass_context
def main(
    context: click.Context,
    folder: Path,
    options: tuple[str, ...],
    digest: str,
    nodes: int,
    ranks: int,
    gpus: int,
    meet: str,
    node_from: str | None,
    margin: float,
    preflight: str | None,
    again: bool,
) -> None:
    """Run the ranks of one node; what `olm-train launch` writes calls it.

    \b
    python -m olm_train.extensions.launch.agent snapshots/3f... --digest=3f... --meet=n1:29500
    """
    number = os.environ.get(node_from, "") if node_from else "0"
    if not number.isdecimal() or int(number) >= nodes:
        raise UsageError(
            f"{node_from} is not the number of one of {nodes} nodes, but {number!r}",
            where="--node-from",
            fix="start the agent in a job of that scheduler",
        )
    os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = meet.rpartition(":")
    agent = Agent(node=int(number), nodes=nodes, ranks=ranks, margin=margin)
    for each in SIGNALS:
        signal.signal(each, agent.signal)
    agent.meet()
    while True:
        code, gained = _start(agent, folder.absolute(), digest, gpus, preflight, options)
        end, stopped = agent.agree(code, gained=gained)
        if end != REQUEUE_EXIT_CODE or stopped or not again:
            break
        say("starting again from the newest checkpoint")
    if agent.signalled:
        say(f"stopped by {name_of(agent.signalled)}")
    context.exit(end)


def _start(
    agent: Agent,
    folder: Path,
    digest: str,
    gpus: int,
    preflight: str | None,
    options: Sequence[str],
) -> tuple[int, bool]:
    """Run what each rank runs, one command after the other; return the first failure, and whether
    a step was gained."""
    try:
        snapshot = verify(folder, digest)
        verify_surroundings(snapshot)
        before = newest_step(snapshot.save_folder)
    except OlmError as error:
        say(f"error: {error}")
        return agent.supervise([], failed=error.exit_code), False
    code_of = f"--trainer.callbacks.environment.snapshot={digest}"
    commands = [[sys.executable, "-m", "olm_train.run", str(folder / TRAIN), code_of, *options]]
    if preflight:
        wanted, work_dir = decode_object(preflight.encode()), snapshot.work_dir
        given = {"name": node_name(), "gpus": gpus, "digest": digest, "work_dir": work_dir}
        module = "olm_train.extensions.launch.preflight"
        commands.insert(0, [sys.executable, "-m", module, json.dumps({**given, "wanted": wanted})])
    for command in commands:
        code = agent.supervise(command, failed=REQUEUE_EXIT_CODE if agent.signalled else 0)
        if code:
            break
    return code, code != 0 and agent.node == 0 and newest_step(snapshot.save_folder) > before


if __name__ == "__main__":
    run_process(lambda: main(prog_name="olm-train agent"))
