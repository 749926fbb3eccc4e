"""The configuration under a name of one's own, and the list of the run's data files.

    pre_train  -> the run's folder, local or remote
    checkpoint -> the same files in each

`config.json` is in both always: a checkpoint is read by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from olm_data.config.hints import Needs
from olm_data.dataset.dataset import Dataset
from olm_data.errors import ResourceError, StorageError, UsageError
from olm_data.storage.store import Store
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.documents import LOGS, encoded
from olm_train.checkpoint.manifest import CONFIG
from olm_train.data.base import require_lock

DATA_PATHS = "data_paths.txt"
FileName = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*\.(json|txt)$", description="a .json or .txt file"),
]


@dataclass(kw_only=True)
class ConfigSaverCallback(Callback):
    """Writes the configuration under another name too, and lists the data files.

    Attributes:
        enabled: write them, where `config_saver` is given at all.
        fname: name under which the configuration lies there; `config.json` lies there always.
        save_data_paths: also write the addresses of the token files of the mixture, one a line;
            default: no.
        data_paths_fname: name of that file; default: `data_paths.txt`.
    """

    enabled: bool = True
    fname: FileName = CONFIG
    save_data_paths: bool | None = None
    data_paths_fname: Annotated[FileName | None, Needs("save_data_paths")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, given in (("fname", self.fname), ("data_paths_fname", self.data_paths_fname)):
            if given in LOGS and (name, given) != ("fname", CONFIG):
                raise UsageError(
                    f"{given} is a file of each run", where=name, fix="give it another name"
                )
        self._paths: bytes | None = None

    def post_attach(self) -> None:
        if self.save_data_paths:
            require_lock(self.trainer.data_loader, "config_saver.save_data_paths")

    def pre_train(self) -> None:
        if not self.trainer.world.main:
            return
        for name, data in self.documents().items():
            try:
                Store(self.trainer.save_folder).put(name, data)
            except (ResourceError, StorageError, OSError) as error:
                self.trainer.say(f"warning: {name} could not be written: {error}")

    def documents(self) -> Mapping[str, bytes]:
        files = {} if self.fname == CONFIG else {self.fname: encoded(self.trainer.config)}
        if self.save_data_paths:
            if self._paths is None:
                paths = data_paths(self.trainer.data_loader.datasets)
                self._paths = "".join(f"{path}\n" for path in paths).encode()
            files[self.data_paths_fname or DATA_PATHS] = self._paths
        return files


def data_paths(datasets: Sequence[Dataset]) -> list[str]:
    """Return the addresses of the token files of a mixture, source by source, shard by shard."""
    found = []
    for dataset in datasets:
        names = map(dataset.manifest.tokens_name, dataset.manifest.shards)
        found += [dataset.store.url(name) for name in names]
    return found
