"""How many CPU threads a rank computes with: chosen from what the machine leaves, and said.

    affinity, SMT, cgroup quota --> cores --less the load of others, shared by the ranks--> threads

Threads that wait for one another on a core that others use cost more than they bring: a barrier
of two threads on a busy core takes as long as the others' turn. A run that goes on keeps the number
it had, since sums are made in another order with another one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from olm_data.bounded_json import decode_object
from olm_data.regular_files import read_regular
from olm_data.threads import SYSTEM, cgroup_quota


@dataclass(frozen=True, kw_only=True)
class Processors:
    """What a machine leaves to this process.

    Attributes:
        cores: that it may run on, two threads of one counted once.
        quota: cores' worth of time its cgroup allows; None: no limit.
        load: processes that ran or waited for a processor in the last minute, on all of them.
    """

    cores: int
    quota: float | None = None
    load: float = 0.0

    @classmethod
    def here(cls) -> Processors:
        """Look at this machine."""
        return cls(cores=_cores(), quota=cgroup_quota(), load=os.getloadavg()[0])

    def threads(self, ranks: int) -> tuple[int, str]:
        """Return the threads of each of `ranks` ranks on this machine, and why."""
        cores = self.cores if self.quota is None else min(self.cores, self.quota)
        others = max(0.0, self.load - ranks)  # the ranks themselves start up at this time
        # a quarter in any case: the load of others may end, and this run may take long
        free = max(cores - others, cores / 4)
        count = max(1, math.floor(free / ranks + 1e-9))
        why = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        if self.quota is not None and self.quota < self.cores:
            why += f", a quota of {self.quota:g}"
        if ranks > 1:
            why += f", {ranks} ranks here"
        if others >= 0.5:
            why += f", load {others:.1f} of others"
        return count, why


def choose(
    given: int | None, processors: Processors, environment: Mapping[str, str], recorded: int | None
) -> tuple[int, str]:
    """Return the threads of this rank, and why.

    Args:
        given: by the configuration; None: nothing is.
        environment: torchrun's variables, and OMP_NUM_THREADS, which counts unless torchrun set it.
        recorded: number the run began with.
    """
    if given is not None:
        return given, "as configured"
    ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    ours = environment.get("OMP_NUM_THREADS", "")
    by_torchrun = ours == "1" and ranks > 1 and "TORCHELASTIC_RUN_ID" in environment
    if ours.isdigit() and int(ours) and not by_torchrun:
        return int(ours), "OMP_NUM_THREADS"
    count, why = processors.threads(ranks)
    if recorded is not None and recorded * ranks <= max(processors.cores, ranks):
        return recorded, "as the run began"
    return count, why


def recorded_threads(config: Path) -> int | None:
    """Return the number that the last start of a run wrote into its `config.json`."""
    try:
        found = decode_object(read_regular(config))["threads"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if type(found) is int and found > 0 else None


def _cores(root: Path = SYSTEM) -> int:
    """Return the cores of this process's affinity; threads of one core count once."""
    allowed = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = set()
    for number in allowed:
        siblings = root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(number))
    return max(1, len(cores))
