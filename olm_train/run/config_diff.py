"""What differs between this configuration and that of a run: `olm-train config --diff RUN`.

RUN/config.json --defaults filled in--> plain values --+
train.yaml + options --resolve--> RunConfig ----------> differences, one line each
"""

from __future__ import annotations

from pathlib import Path

from olm_data.bounded_json import decode
from olm_data.config.convert import parse
from olm_data.config.dump import differences
from olm_data.config.values import Values
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.kinds import nearest
from olm_data.regular_files import read_regular
from olm_data.storage.store import Store
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manifest import CONFIG, MANIFEST, Manifest
from olm_train.checkpoint.merged import folder_of_paths
from olm_train.distributed.world import local_device
from olm_train.estimate.device_defaults import Capability
from olm_train.model.flat_form import from_flat
from olm_train.run.config import RunConfig


def config_diff(run: str, config: RunConfig) -> list[str]:
    """Return one line for each field that differs, `a.b: value of the run -> value here`.

    `auto` counts as what it is on this machine. Fields that the run's release did not know count
    with the default of this one. If the saved configuration no longer fits, its values are compared
    as they are, and the first line says so.

    Args:
        run: folder of a run or of one of its checkpoints, or a config.json.
        config: the configuration to compare it with.

    Raises:
        InputError: there is no saved configuration.
        ValidationError: what is there is no JSON object.
    """
    here = Capability.of(local_device())
    path = Path(run) / CONFIG if Path(run).is_dir() else Path(run)
    try:
        saved = decode(read_regular(path))
    except OSError as error:
        raise InputError(
            f"no saved configuration: {error.strerror}",
            where=str(path),
            fix=nearest(run, f"give the folder of a run or of a checkpoint; it holds {CONFIG}"),
        ) from error
    except ValueError as error:
        raise ValidationError("the saved configuration is not JSON", where=str(path)) from error
    if not isinstance(saved, dict):
        raise ValidationError("the saved configuration is not JSON object", where=str(path))
    try:
        if isinstance(saved.get("model"), dict):
            saved["model"] = from_flat(saved["model"])
        there = parse(RunConfig, Values(saved, file=str(path), folder=_folder_of_paths(path)))
        old, notes = there.on_device(here)[0].as_dict(), []
    except UsageError as error:
        old, notes = saved, [f"(saved by another release: {error.what})"]
    return notes + differences(old, config.on_device(here)[0].as_dict())


def _folder_of_paths(config: Path) -> Path:
    """Return what the paths in the `config.json` of a run or of a checkpoint count from."""
    folder = config.absolute().parent
    if not (folder / MANIFEST).exists():
        return folder
    store = Store(str(folder))
    return Path(folder_of_paths(Checkpoint(store, Manifest.read(store))))
