"""The verb behind `olm-data mix`: from a manifest to the lock that training takes.

    manifest.yaml --read_mixture--> Mixture --open_sources, open_views--> datasets, views
      --pack_source, of each that needs it--> row plans --compile_lock--> Lock
      --warnings_of_sources--> what they share
      --publish_plan, Lock.write--> row-plans/, NAME.lock.json

`summary.py` says what a lock holds, `extend.py` makes a longer one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.view import View
from olm_data.errors import UsageError
from olm_data.mixture.compile import PackedSource, compile_lock
from olm_data.mixture.lock import Lock, split
from olm_data.mixture.manifest import Mixture, read_mixture
from olm_data.mixture.shared import warnings_of_sources
from olm_data.mixture.sources import open_sources, open_views
from olm_data.packing.row_plan import PlanInfo
from olm_data.packing.write_plan import write_plan
from olm_data.storage.disk import io_errors, make_folder
from olm_data.storage.output_paths import refuse_output
from olm_data.storage.scratch import abandoned, scratch
from olm_data.storage.store import Store, is_remote

MANIFESTS = (".yaml", ".yml")


@dataclass(frozen=True)
class MixResult:
    """What `mix` did: the lock, where it is (or would be), and written | unchanged | dry run.

    `warnings` is what the datasets tell and the lock cannot: documents that sources share.
    """

    lock: Lock
    path: str
    status: str
    warnings: tuple[str, ...] = ()


def mix(
    manifest: str, output: str | None = None, *, dry_run: bool = False, overwrite: bool = False
) -> MixResult:
    """Compile `manifest` and write the lock to `output` (default: NAME.lock.json beside it).

    Raises:
        UsageError, InputError, ValidationError: the manifest or its data are refused.
        ConflictError: another lock is at `output` and `overwrite` is not set.
    """
    if output is not None:
        refuse_output(output, "--output", "file")
    path = output or os.path.splitext(manifest)[0] + ".lock.json"
    if not path.endswith(".json"):
        raise UsageError(
            "the output must be a .json file", where=path, fix=f"--output {path}.lock.json"
        )
    folder = split(path)[0]
    mixture = read_mixture(manifest)
    datasets = open_sources(mixture)
    views = open_views(mixture)
    planned = [name for name in datasets if mixture.packing.planned or name in views]
    with _staging(folder, here=not dry_run) if planned else nullcontext(Path()) as staging:
        packed = {
            name: pack_source(name, mixture, datasets[name], views.get(name), staging / name)
            for name in planned
        }
        lock = compile_lock(mixture, datasets, folder, packed)
        drawn = {s.name for i, s in enumerate(lock.sources) if lock.rows_drawn(i)}
        warned = tuple(
            warnings_of_sources({n: d for n, d in datasets.items() if n in drawn}, views)
        )
        if dry_run:
            return MixResult(lock, path, "dry run", warned)
        for name, source in packed.items():  # before the lock that needs them
            publish_plan(source.plan, staging / name, Store(folder))
    return MixResult(lock, path, lock.write(path, overwrite=overwrite), warned)


def pack_source(
    name: str, mixture: Mixture, dataset: Dataset, view: View | None, folder: Path
) -> PackedSource:
    """Write the row plan of a source into a new local folder.

    Raises:
        InputError: its view keeps no document.
    """
    folder.mkdir()
    scan = None if view is None else view.over(dataset)
    plan = write_plan(dataset, mixture.packing, mixture.sequence_length, folder, scan)
    if scan is None:
        return PackedSource(plan)
    scan.refuse_nothing(f"source {name!r}")
    return PackedSource(plan, scan.info())


def publish_plan(plan: PlanInfo, folder: Path, beside: Store) -> None:
    """Publish the files of a row plan where a lock in `beside` looks for them, if not there yet."""
    store = beside.child(plan.folder)
    for file, sha256 in plan.sha256.items():
        if store.size(file) != (folder / file).stat().st_size or store.sha256(file) != sha256:
            store.publish(file, folder / file, sha256)


@contextmanager
def _staging(folder: str, *, here: bool) -> Iterator[Path]:
    """Yield a folder for unfinished row plans; what killed runs left is removed first.

    Args:
        folder: of the lock.
        here: the plans will be renamed into `folder`, if it is a local one.
    """
    parent = None
    if here and not is_remote(folder):
        parent = Path(Store(folder).root)
        with io_errors(folder, writing=True):
            make_folder(str(parent))
            abandoned(parent, remove=True)
    abandoned(remove=True)
    with io_errors(folder, writing=True), scratch(parent) as staging:
        yield staging


def read_or_compile(path: str) -> Lock:
    """Return the lock at `path`, or that of the manifest there, compiled without being written."""
    if os.path.splitext(path)[1] in MANIFESTS:
        return mix(path, dry_run=True).lock
    return Lock.read(path)
