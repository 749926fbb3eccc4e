"""Versions, device and driver: what a run is made with besides its configuration.

    packages, Python, device, driver -> environment.json <-compared at each start-> this start's

Other versions may give other numbers without any error, so a difference is said, and refused with
`strict`.
"""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, ClassVar

import torch

from olm_data.config.hints import Needs
from olm_data.config.values import differences
from olm_data.errors import ValidationError
from olm_data.run_log.run_folder import ENVIRONMENT, read_environment, write_environment
from olm_train.callbacks.base import Callback

DRIVER = Path("/proc/driver/nvidia/version")
MOST_SHOWN = 12


@dataclass(kw_only=True)
class EnvironmentCallback(Callback):
    """Versions of packages, Python, device and driver, saved with the run.

    Runs first: nothing of the run has been changed when it refuses.

    Attributes:
        enabled: save versions of packages, Python, device and driver in `environment.json`, and say
            at a resume what has changed; false: neither.
        strict: refuse to resume where something has changed; `--strict-env` sets it.
        snapshot: digest of the code that runs, saved there as `code`; [`olm-train
            launch`](../how-to/launch.md) sets it.
    """

    priority: ClassVar[int] = 9

    enabled: bool = True
    strict: Annotated[bool, Needs("enabled")] = False
    snapshot: Annotated[str | None, Needs("enabled")] = None

    def pre_train(self) -> None:
        self.trainer.world.on_main(self._compare)

    def _compare(self) -> None:
        folder, now = self.trainer.work_dir, describe(self.trainer.world.device)
        if self.snapshot is not None:
            now["code"] = self.snapshot
        before = read_environment(folder) if self.trainer.resumed else None
        if before is not None:
            changed = differences(before, now)
            if changed and self.strict:
                raise ValidationError(
                    f"the environment is not that of the run: {'; '.join(changed)}",
                    where=str(folder / ENVIRONMENT),
                    why="the numbers of the run may change, and --strict-env asks for the same",
                    fix="install the versions of the run, or go on without --strict-env",
                )
            if changed:
                shown = changed[:MOST_SHOWN]
                if len(changed) > MOST_SHOWN:
                    shown.append(f"{len(changed) - MOST_SHOWN:,} more")
                self.trainer.say(f"note: changed since the last start: {'; '.join(shown)}")
        write_environment(folder, now)


def describe(device: torch.device) -> dict[str, str]:
    """Return version or name by what it is of; packages as `package NAME`."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    found["device"] = device_name(device)
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        if DRIVER.exists():
            found["driver"] = DRIVER.read_text().partition("\n")[0]
    return found | {f"package {name}": version for name, version in packages().items()}


@cache  # what a process has imported does not change any more
def packages() -> dict[str, str]:
    """Return the version of each installed package by its name, sorted; of two that have a name,
    that of the one which is imported. Copies that a package keeps for itself do not count: whether
    their folder is on the path depends on what was imported (setuptools, Ray)."""
    installed = {"site-packages", "dist-packages"}
    folders = [f for f in sys.path if installed.isdisjoint(p.name for p in Path(f).parents)]
    found = map(_name_and_version, reversed([*metadata.distributions(path=folders)]))
    return dict(sorted(dict(found).items()))


def _name_and_version(package: metadata.Distribution) -> tuple[str, str]:
    """Read two lines of the file: ten times as fast as the library, which parses all of it."""
    head = (package.read_text("METADATA") or "").partition("\n\n")[0]
    lines = dict(re.findall(r"^(Name|Version): *(.*?) *$", head, re.MULTILINE))
    if len(lines) == 2:
        return lines["Name"], lines["Version"]
    return package.metadata["Name"], package.version


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the instructions of the CPU that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"
