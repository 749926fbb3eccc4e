"""The verb behind `olm-data mix`: from a manifest to the lock that training takes.

    manifest.yaml --read_mixture--> Mixture --open_sources, open_views--> MixPlan
      --write, of each source that needs it--> row plans --compile--> Lock
      --warnings--> what the sources share
      --publish_plan, Lock.write--> row-plans/, NAME.lock.json

`summary.py` says what a lock holds; `revise.py` makes one that goes on, longer or with other
sources and stages, `like.py` one that draws the documents of another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict

from olm_data import __version__
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import read_manifest
from olm_data.dataset.target import dataset_root
from olm_data.dataset.tokenizer import TokenizerInfo, TokenizerRules
from olm_data.dataset.view import View, ViewInfo
from olm_data.decoding import convert
from olm_data.errors import InputError, UsageError, ValidationError, printable
from olm_data.mixture.arriving import (
    as_far_as_there,
    begun,
    first_group,
    publish_arrived,
    refuse_counted,
)
from olm_data.mixture.compile_stages import compile_stages, ratio, refuse_exhausted
from olm_data.mixture.lock import FORMAT, VERSION, Lock, split
from olm_data.mixture.lock_format import LockSource
from olm_data.mixture.manifest import Mixture, SourceSpec, located, read_mixture
from olm_data.mixture.shared import warnings_of_sources
from olm_data.order.arriving import ArrivingKeys
from olm_data.order.base import Order, SourceSize
from olm_data.packing.compare import Comparison, compare
from olm_data.packing.concat import rows_in
from olm_data.packing.packings import PACKINGS, from_lock
from olm_data.packing.row_plan import PlanInfo, write_plan
from olm_data.redaction import redacted
from olm_data.storage.disk import abandoned, io_errors, make_folder, scratch
from olm_data.storage.output_paths import refuse_output
from olm_data.storage.store import Store, is_remote

if TYPE_CHECKING:
    from olm_data.select.selection import IdSet


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
    path = lock_path(manifest, output)
    plan = MixPlan.open(manifest, split(path)[0])
    return plan.write(path, MixPlan.compile, dry_run=dry_run, overwrite=overwrite)


def lock_path(manifest: str, output: str | None) -> str:
    """Return where the lock of a manifest is written: `output`, or NAME.lock.json beside it.

    Raises:
        UsageError: it is no place for one.
    """
    if output is not None:
        refuse_output(output, "--output", "file")
    path = output or os.path.splitext(manifest)[0] + ".lock.json"
    if not path.endswith(".json"):
        raise UsageError(
            "the output must be a .json file", where=path, fix=f"--output {path}.lock.json"
        )
    return path


@dataclass(frozen=True)
class PackedSource:
    """The row plan of a source, and what its view keeps; None where it draws on all documents."""

    plan: PlanInfo
    view: ViewInfo | None = None


@dataclass(frozen=True)
class MixPlan:
    """A manifest and what it draws on, opened once: what each step to the lock goes by.

    Attributes:
        mixture: the parsed manifest.
        datasets: one for each source, by name; after a run, those that it drew on, too.
        folder: where the lock will lie; "" for the manifest's folder.
        views: of the sources with `where` or `exclude_ids`, by name.
        packed: the row plan of each source that needs one, for its packing or view, by name.
    """

    mixture: Mixture
    datasets: Mapping[str, Dataset]
    folder: str = ""
    views: Mapping[str, View] = field(default_factory=dict)
    packed: Mapping[str, PackedSource] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        manifest: str,
        folder: str = "",
        after: Lock | None = None,
        locked: Mapping[str, str] = MappingProxyType({}),
    ) -> MixPlan:
        """Read a manifest and open what it names. Raises as `open_sources` and `open_views`.

        Args:
            after: lock of a run that goes on with it.
            locked: digests of the datasets of sources that it drew on, by name.
        """
        mixture = read_mixture(manifest, after)
        return cls(mixture, open_sources(mixture, locked), folder, open_views(mixture))

    @property
    def planned(self) -> list[str]:
        """Names of the sources that need a row plan."""
        names = [source.name for source in self.mixture.sources]
        return names if self.mixture.packing.planned else [n for n in names if n in self.views]

    def write(
        self, path: str, compiled: Callable[[MixPlan], Lock], *, dry_run: bool, overwrite: bool
    ) -> MixResult:
        """Pack the rows, compile the lock and write it to `path`, unless it is a dry run.

        Raises:
            UsageError, InputError, ValidationError: the manifest or its data are refused.
            ConflictError: another lock is there and `overwrite` is not set.
        """
        with self.staging(here=not dry_run) as staging:
            packed = {name: self._pack(name, staging / name) for name in self.planned}
            plan = replace(self, packed=packed)
            lock = compiled(plan)
            warned = tuple(plan.warnings(lock))
            if dry_run:
                return MixResult(lock, path, "dry run", warned)
            publish_arrived(lock)  # before the lock that needs them, as are row plans
            for name, source in plan.packed.items():
                publish_plan(source.plan, staging / name, Store(plan.folder))
        return MixResult(lock, path, lock.write(path, overwrite=overwrite), warned)

    @contextmanager
    def staging(self, *, here: bool) -> Iterator[Path]:
        """Yield a folder for unfinished row plans; what killed runs left is removed first.

        Args:
            here: the plans will be renamed into the lock's folder, if it is a local one.
        """
        if not self.planned:
            yield Path()
            return
        parent = None
        if here and not is_remote(self.folder):
            parent = Path(Store(self.folder).root)
            with io_errors(self.folder, writing=True):
                make_folder(str(parent))
                abandoned(parent, remove=True)
        abandoned(remove=True)
        with io_errors(self.folder, writing=True), scratch(parent) as staging:
            yield staging

    def _pack(self, name: str, folder: Path) -> PackedSource:
        folder.mkdir()
        dataset, view, mixture = self.datasets[name], self.views.get(name), self.mixture
        scan = None if view is None else view.over(dataset)
        plan = write_plan(dataset, mixture.packing, mixture.sequence_length, folder, scan)
        if scan is None:
            return PackedSource(plan)
        scan.refuse_nothing(f"source {name!r}")
        return PackedSource(plan, scan.info())

    def warnings(self, lock: Lock) -> list[str]:
        """Return what the datasets tell of the sources that a lock draws on."""
        drawn = [
            s.name
            for i, s in enumerate(lock.sources)
            if lock.rows_drawn(i) and (s.view is None or s.name in self.views)
        ]
        return warnings_of_sources({name: self.datasets[name] for name in drawn}, self.views)

    def compile(self) -> Lock:
        """Compile the manifest against its datasets.

        Raises:
            ValidationError: the sources were made by different tokenizers.
            InputError: a source has no whole row.
            UsageError: a stage without a row, or a source drawn beyond its `max_epochs`.
        """
        refuse_counted(self.mixture)
        lock = self.without_stages()
        stages = compile_stages(self.mixture, lock.sources)
        lock = begun(msgspec.structs.replace(lock, stages=stages))
        if not isinstance(self.mixture.order, ArrivingKeys):
            refuse_exhausted(self.mixture, lock.sources, stages)
        lock = msgspec.structs.replace(lock, digest=lock.compute_digest())
        return as_far_as_there(lock)

    def without_stages(self) -> Lock:
        """Compile the sources alone; raises as `compile`."""
        mixture = self.mixture
        tokenizer = self._tokenizer()
        sources = tuple(map(self._source, mixture.sources))
        folder = self.folder or mixture.folder
        order = self._order(sources)
        return Lock(
            format=FORMAT,
            version=VERSION,
            seed=mixture.seed,
            sequence_length=mixture.sequence_length,
            packing=from_lock(mixture.packing.name, order),
            tokenizer=convert(tokenizer, TokenizerRules, from_attributes=True),
            sources=sources,
            stages=(),
            locations={
                source.name: _relative(source.data, mixture.folder, folder)
                for source in mixture.sources
            },
            tools={"olm": __version__},
            digest="",
            folder=folder,
            order=order,
        )

    def _tokenizer(self) -> TokenizerInfo:
        """Return the tokenizer of all sources; chats end as their template says, and not by it."""
        datasets = self.datasets
        chats = {
            name
            for name, dataset in datasets.items()
            if dataset.manifest.trained is not None and not dataset.manifest.tokenizer.delimiters
        }
        names = [source.name for source in self.mixture.sources]
        first, *others = sorted(names, key=chats.__contains__)
        ours = datasets[first].manifest.tokenizer
        for name in others:
            theirs = datasets[name].manifest.tokenizer
            if what := ours.difference(theirs, ends=name not in chats):
                raise ValidationError(
                    f"sources {first!r} and {name!r} were made by different tokenizers: {what} is "
                    f"{getattr(ours, what)} ({datasets[first].tokenizer_name}) and "
                    f"{getattr(theirs, what)} ({datasets[name].tokenizer_name})",
                    where=self.mixture.where("sources", name),
                    why="the same id would mean different text in the two sources",
                    fix="tokenise both with the same tokenizer and options",
                )
        return ours

    def _source(self, spec: SourceSpec) -> LockSource:
        mixture, dataset = self.mixture, self.datasets[spec.name]
        packed = self.packed.get(spec.name)
        length, tokens = mixture.sequence_length, dataset.tokens
        plan, view = (None, None) if packed is None else (packed.plan, packed.view)
        bound = dataset.manifest.documents_bound(length) if plan is None else plan.most_pieces
        rows = rows_in(tokens, length) if plan is None else plan.rows
        if not rows:
            left, kept = (tokens, "") if view is None else (view.tokens, " in its view")
            needed = mixture.packing.none_because(length)
            raise InputError(
                f"source {spec.name!r} has {left:,} tokens{kept}; {needed}",
                where=mixture.where("sources", spec.name),
                fix="tokenise more text for it, or lower sequence_length, or remove the source",
            )
        return LockSource(
            name=spec.name,
            dataset=dataset.digest,
            tokens=tokens,
            documents=dataset.documents,
            rows=rows,
            dtype=dataset.dtype.name,
            max_documents_per_row=bound,
            max_epochs=ratio(spec.max_epochs),
            plan=plan,
            view=view,
            trained=dataset.manifest.trained,
            loss_weight=None if spec.loss_weight == 1 else ratio(spec.loss_weight),
        )

    def _order(self, sources: Sequence[LockSource]) -> Order:
        shards = {name: len(dataset.manifest.shards) for name, dataset in self.datasets.items()}
        sizes = [SourceSize(rows=s.rows, tokens=s.tokens, shards=shards[s.name]) for s in sources]
        with located(self.mixture.values, "order"):
            return self.mixture.order.compile(sizes)


def publish_plan(plan: PlanInfo, folder: Path, beside: Store) -> None:
    """Publish the files of a row plan where a lock in `beside` looks for them, if not there yet."""
    store = beside.child(plan.folder)
    for file, sha256 in plan.sha256.items():
        if store.size(file) != (folder / file).stat().st_size or store.sha256(file) != sha256:
            store.publish(file, folder / file, sha256)


def read_or_compile(path: str) -> Lock:
    """Return the lock at `path`, or that of the manifest there, compiled without being written."""
    if os.path.splitext(path)[1] in MANIFESTS:
        return mix(path, dry_run=True).lock
    return Lock.read(path)


def _relative(data: str, manifest_folder: str, lock_folder: str) -> str:
    """Return the location that the lock records for `data` as written in the manifest."""
    if is_remote(data) or os.path.isabs(data):
        return data
    absolute = os.path.join(manifest_folder, data)
    if is_remote(lock_folder):
        return os.path.abspath(absolute)
    return Path(os.path.relpath(absolute, lock_folder)).as_posix()


def open_sources(
    mixture: Mixture, locked: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Dataset]:
    """Open the dataset of each source of a manifest: source name -> dataset.

    Args:
        locked: source name -> digest of the version of it that is opened, where there is such a
            version; of other sources it is the newest.

    Raises:
        InputError: there is no dataset at a source's `data`; the message has the manifest's line.
    """
    datasets = {}
    for source in mixture.sources:
        try:
            store = Store(mixture.resolve(source.data))
            if isinstance(mixture.order, ArrivingKeys):
                found = first_group(store).manifest
            else:
                found = read_manifest(store, locked.get(source.name), or_newest=True)
            datasets[source.name] = Dataset(store, found)
        except InputError as error:
            line = mixture.where("sources", source.name, "data")
            error.where = f"{error.where} (from {line})"
            raise
    return datasets


def open_views(mixture: Mixture) -> dict[str, View]:
    """Return the view of each source that has one; reads the files of ids.

    Raises:
        InputError, UsageError: a file of ids cannot be read; the message has the manifest's line.
        StorageError: remote storage fails.
    """
    views = {}
    for spec in mixture.sources:
        if not spec.view:
            continue
        keys = "where" if spec.exclude_ids is None else "exclude_ids"
        line = mixture.where("sources", spec.name, keys)
        views[spec.name] = View(spec.where, _ids(mixture, spec, line), line)
    return views


def _ids(mixture: Mixture, spec: SourceSpec, line: str) -> IdSet | None:
    if spec.exclude_ids is None:
        return None
    from olm_data.sources.id_file import read_ids  # loads pyarrow

    path = mixture.resolve(spec.exclude_ids)
    try:
        return read_ids(path)
    except (InputError, UsageError) as error:
        error.what = f"exclude_ids: {error.what}"
        error.where = f"{printable(redacted(path))} (from {line})"
        raise


SEQUENCE_LENGTH = 2048
"""Of a dataset by itself."""


def compare_packing(
    target: str, lengths: Sequence[int] = (), *, most_documents: int | None
) -> list[Comparison]:
    """Pack a dataset, or each source of a mixture as its manifest asks for it, in every way.

    Args:
        target: a manifest, or the folder or URL of a dataset.
        lengths: sequence lengths; by default the manifest's, 2,048 for a dataset.
        most_documents: look at so many documents of each dataset, its first; None for all.

    Raises:
        UsageError: the manifest is refused.
        InputError, ValidationError: there is no sound dataset, or nothing of it is left.
    """
    views: Mapping[str, View] = {}
    keys: dict[str, Any] = {}
    datasets: Mapping[str, Dataset]
    if target.endswith(MANIFESTS):
        plan = MixPlan.open(target)
        datasets, views, keys = plan.datasets, plan.views, asdict(plan.mixture.packing)
        lengths = lengths or (plan.mixture.sequence_length,)
    else:
        datasets = {target: Dataset.open(dataset_root(target))}
    packings = [
        kind(**{key: value for key, value in keys.items() if key in kind.__struct_fields__})
        for kind in PACKINGS.values()
    ]
    return [
        compare(dataset, name, packing, length, most_documents=most_documents, view=views.get(name))
        for name, dataset in datasets.items()
        for length in lengths or (SEQUENCE_LENGTH,)
        for packing in packings
    ]
