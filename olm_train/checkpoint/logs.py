"""The logs of a run whose save folder is remote: written locally, kept beside the checkpoints.

    work_dir/metrics.jsonl, starts.jsonl, config.json, ... --each save, before its manifest--> s3://...
                                                     <--each start, unless ahead of it--

So a checkpoint never outlives the lines of its steps, and a run that goes on upon another machine
finds them there. With a local save folder, work_dir is that folder and nothing is copied.
"""

from __future__ import annotations

import os
from pathlib import Path

from olm_data.run_log.log import METRICS, STARTS
from olm_data.storage.disk import write_durable
from olm_data.storage.store import Store, is_remote
from olm_train.checkpoint.manifest import CONFIG
from olm_train.distributed.world import World

ENVIRONMENT = "environment.json"
LOGS = (METRICS, STARTS, CONFIG, ENVIRONMENT)
DEFAULT_FOLDER = "~/.cache/olm/runs"


def default_work_dir(save_folder: str) -> str:
    """Return the save folder itself, or where the local files of a remote one lie."""
    if not is_remote(save_folder):
        return save_folder
    return os.path.join(os.path.expanduser(DEFAULT_FOLDER), save_folder.partition("://")[2])


def run_logs(work_dir: Path) -> tuple[Path, ...]:
    """Return the logs that there are."""
    return tuple(work_dir / name for name in LOGS if (work_dir / name).exists())


def fetch_logs(save_folder: str, work_dir: Path, world: World) -> None:
    """Bring the logs of a remote save folder here, unless those here go on from them.

    Every rank calls it; rank 0 does it, the one that writes them.
    """
    if is_remote(save_folder):
        world.on_main(lambda: _fetch(Store(save_folder), work_dir))


def _fetch(store: Store, work_dir: Path) -> None:
    for name in LOGS:
        try:
            data = store.read(name)
        except FileNotFoundError:
            continue
        path = work_dir / name
        if not path.exists() or not path.read_bytes().startswith(data):
            arriving = path.with_name(name + ".tmp")
            write_durable(arriving, data)
            os.replace(arriving, path)  # whoever still writes to the old file writes to no log
