"""The mixture lock: a manifest compiled against real datasets, the only thing training takes.

    mixture.MixPlan.compile --> Lock --.write--> mixture.lock.json --Lock.read--> Lock
                                                      Lock --.schedule()------> order.Schedule
                                                           --.open_datasets()-> checked datasets

A lock holds integers and strings only. Its `digest` is the sha256 of its canonical JSON without the
keys `digest`, `tools` and `locations`, so that data may be moved and the run stays the same run.
docs/reference/mixture.md is the specification.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.bounded_json import JsonObject, MalformedJson, decode_object
from olm_data.bounded_json import digest as canonical_digest
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import decode_manifest, read_manifest
from olm_data.dataset.shard import Verify
from olm_data.decoding import convert
from olm_data.errors import ConflictError, InputError, OlmError, ValidationError, quoted
from olm_data.mixture.lock_format import LockFile, is_consistent, strange_name, take_order
from olm_data.order.base import Order
from olm_data.order.orders import lock_key
from olm_data.order.schedule import VERSION as ORDER
from olm_data.order.schedule import RowOrigin, Schedule, ScheduleStage
from olm_data.order.steps import order_digest
from olm_data.packing.base import Packing
from olm_data.packing.concat import StreamRows
from olm_data.packing.packings import from_lock as packing_from_lock
from olm_data.packing.row_plan import RowPlan
from olm_data.path_kinds import kind_of, nearest, wrong_kind
from olm_data.redaction import names_credentials
from olm_data.storage.objects import LOCATIONS
from olm_data.storage.store import Store, create_json, is_remote, read_json, write_json
from olm_data.threads import in_order

FORMAT, VERSION = "olm-mixture-lock", 1
UNDIGESTED = ("digest", "tools", "locations")


class Lock(LockFile, frozen=True, kw_only=True):
    """A compiled mixture. The fields are the keys of the file, and `folder`, where the file lies.

    Attributes:
        sources: in order of their names.
        stages: in the order of the run.
        locations: source name -> path of the dataset relative to `folder`, absolute path or URL.
        extends: older locks whose first rows are those of this, the oldest first.
        digest: names this mixture everywhere else.
        order: of the rows of each source in an epoch.
        packing: how documents became rows.
        folder: local path or URL that relative locations start from.
    """

    order: Order
    packing: Packing
    folder: str

    def __repr__(self) -> str:
        return (
            f"<Lock {self.digest[:12]}: {self.total_rows:,} rows of {self.sequence_length:,} "
            f"tokens, {len(self.sources):,} sources, {len(self.stages):,} stages, "
            f"{self.packing.name}>"
        )

    def _repr_html_(self) -> str:
        """Return what notebooks show: its facts."""
        from olm_data.printing import as_html  # of no use to a run

        facts = {
            "digest": self.digest,
            "seed": self.seed,
            "sequence length": self.sequence_length,
            "rows": self.total_rows,
            "order": self.order.name,
            "packing": self.packing.name,
            "stages": [stage.label for stage in self.stages],
            "sources": [f"{one.name}: {one.tokens:,} tokens" for one in self.sources],
        }
        return as_html(facts)

    @property
    def total_rows(self) -> int:
        """Rows of the run."""
        return sum(stage.rows for stage in self.stages)

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of a row as trained, for each stage: its own sequence length or the lock's."""
        return tuple(stage.sequence_length or self.sequence_length for stage in self.stages)

    @property
    def complete(self) -> bool:
        """Whether all rows are known; not while text is still to arrive (`order: arriving`)."""
        return all(map(self.order.is_complete, range(len(self.sources))))

    def rows_there(self) -> int:
        """Return how many first rows of the run need no text that is still to arrive."""
        if self.complete:
            return self.total_rows
        limits = [
            source.rows if not self.order.is_complete(index) else self.total_rows
            for index, source in enumerate(self.sources)
        ]
        return self.schedule().rows_within(np.array(limits))

    def digests(self, rows: int) -> list[str]:
        """Return the digests of the locks whose first `rows` rows are those of this one.

        That is its own and those of older locks. What was trained on these rows may go on with this
        lock: the one place that decides it.
        """
        ends = {older.digest: older.rows for older in self.extends}
        ends[self.digest] = self.total_rows
        return [digest for digest, end in ends.items() if rows <= end]

    def gave(self, order: str, rows: NDArray[np.int64]) -> bool:
        """Return whether a logged `order_digest` is that of these rows, of this or an older lock.

        Args:
            rows: int64 [m].
        """
        known = self.digests(rows.max(initial=-1) + 1)
        return any(order == order_digest(digest, rows) for digest in known)

    def rows_drawn(self, source: int) -> int:
        """Return the rows that the run draws of the source of this index."""
        return sum(stage.rows_by_source[source] for stage in self.stages)

    def tally(self, places: RowOrigin) -> dict[tuple[str, str], int]:
        """Return how many rows are of each stage of the manifest and source, by their names."""
        names = [stage.name for stage in self.stages]
        whole = np.array([names.index(name) for name in names])  # its parts are one stage
        pairs = zip(whole[places.stage].tolist(), places.source.tolist(), strict=True)
        return {
            (names[stage], self.sources[source].name): count
            for (stage, source), count in sorted(Counter(pairs).items())
        }

    def schedule(self) -> Schedule:
        """Return the order of all rows; slot tables are built when a stage is first touched."""
        return Schedule(
            self.seed,
            [(source.name, source.rows) for source in self.sources],
            [
                ScheduleStage(stage.rows, stage.counts, stage.rows_by_source)
                for stage in self.stages
            ],
            self.order,
        )

    def refuse_far(self, near: str) -> None:
        """Refuse a lock with a source elsewhere than on this machine or in the bucket of `near`.

        Of a lock that a run folder names: nobody has chosen the addresses in it.

        Raises:
            InputError: it has one.
        """
        for source in self.sources:
            _refuse_far(self.location(source.name), near, f"source {source.name!r} of its lock")

    def location(self, name: str) -> str:
        """Return the path or URL of a source's dataset, resolved against the lock's folder.

        Raises:
            ValidationError: the location is of a kind that `mix` never writes: the digest of a lock
                does not cover its locations.
        """
        location = self.locations[name]
        scheme = location.partition("://")[0] if "://" in location else ""
        relative = is_remote(self.folder) and not scheme
        if (
            not location.isprintable()
            or not location
            or scheme not in ("", *LOCATIONS)
            or (scheme and names_credentials(location))
            or (relative and ".." in location.split("/"))
        ):
            raise ValidationError(
                f"the lock leads to a place that olm-data mix never writes, for source {name!r}",
                where=location,
                why="a lock may come from elsewhere, and its digest does not cover its locations",
                fix="correct `locations` in the lock, or run olm-data mix again",
            )
        if is_remote(location) or os.path.isabs(location):
            return location
        if is_remote(self.folder):
            return f"{self.folder}/{location}"
        return os.path.normpath(os.path.join(self.folder, location))

    def open_plans(self, *, verify: Verify = "lazy") -> list[RowPlan | None]:
        """Open each source's row plan, in the order of `sources`; None where it needs none.

        A local plan is memory-mapped; one beside a remote lock is first copied to a local folder.

        Args:
            verify: `off` leaves out the digest of a local plan.

        Raises:
            ValidationError: a plan is missing, or not the locked one.
        """
        return [self.open_plan(index, verify=verify) for index in range(len(self.sources))]

    def open_plan(self, index: int, *, verify: Verify = "lazy") -> RowPlan | None:
        """Open the row plan of one source, as `open_plans` does all of them."""
        plan = self.sources[index].plan
        if plan is None:
            return None
        return RowPlan.open(Store(self.folder).child(plan.folder), plan, verify=verify)

    def open_rows(self, index: int, *, verify: Verify = "lazy") -> RowPlan | StreamRows:
        """Open what says which tokens the rows of one source hold."""
        plan = self.open_plan(index, verify=verify)
        return StreamRows(self.sources[index].rows, self.sequence_length) if plan is None else plan

    def open_datasets(self, *, verify: Verify = "lazy") -> list[Dataset]:
        """Open each source's dataset, in the order of `sources`, and check it is the locked one.

        Where inputs were added since, the version that the lock names is opened. Remote manifests
        are fetched several at a time.

        Raises:
            InputError: there is no dataset at a source's location.
            ValidationError: another dataset lies there than the lock was made from.
        """
        open_one = partial(self.open_dataset, verify=verify)
        if not any(map(is_remote, (self.folder, *self.locations.values()))):
            return [*map(open_one, range(len(self.sources)))]  # one thread hashes as fast
        return [*in_order(open_one, range(len(self.sources)))]

    def open_dataset(
        self, index: int, *, verify: Verify = "lazy", max_open: int | None = None
    ) -> Dataset:
        """Open the dataset of one source, as `open_datasets` does all of them."""
        source = self.sources[index]
        location = self.location(source.name)
        store = Store(location)
        if self.order.is_complete(index):
            manifest = read_manifest(store, source.dataset, or_newest=True)
        else:
            name, beside = arrived_name(source.dataset), Store(self.folder)
            manifest = decode_manifest(read_json(beside, name), beside.url(name), source.dataset)
        dataset = Dataset(store, manifest, verify=verify, max_open=max_open)
        differences = [
            f"{what} {there}, in the lock {locked}"
            for what, there, locked in (
                ("digest", dataset.digest, source.dataset),
                ("tokens", f"{dataset.tokens:,}", f"{source.tokens:,}"),
                ("documents", f"{dataset.documents:,}", f"{source.documents:,}"),
                ("dtype", dataset.dtype.name, source.dtype),
            )
            if there != locked
        ]
        if differences:
            raise ValidationError(
                f"the dataset of source {source.name!r} is not the one in the lock: "
                + "; ".join(differences),
                where=location,
                why="training would see other tokens than the lock promises",
                fix="restore the dataset, or run olm-data mix again for a new lock",
            )
        return dataset

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        content = self._content()
        return msgspec.json.format(msgspec.json.encode(content, order="sorted"), indent=1) + b"\n"

    def compute_digest(self) -> str:
        """Return the sha256 that `digest` must be."""
        content = self._content()
        for key in UNDIGESTED:
            del content[key]
        return canonical_digest(content)

    def _content(self) -> JsonObject:
        """Return the object of the file."""
        content: JsonObject = msgspec.to_builtins(self)
        del content["folder"]
        content |= {"order": ORDER, "packing": self.packing.name}
        if (key := lock_key(self.order)) is not None:
            content[key] = msgspec.to_builtins(self.order)
        return content

    def write(
        self, path: str | os.PathLike[str], *, overwrite: bool = False
    ) -> Literal["written", "unchanged"]:
        """Write the lock, whole or not at all; a lock that is there already is left alone.

        A lock with the same digest but other locations is replaced: the run stays the same run.

        Raises:
            ConflictError: another lock, or another file, is there and `overwrite` is not set.
        """
        folder, name = split(path)
        store = Store(folder)
        try:
            there = _read(path)
        except (FileNotFoundError, NotADirectoryError):
            create_json(store, name, self.encode())
            return "written"
        try:
            old = Lock.decode(there, os.fspath(path))
        except (MalformedJson, ValidationError):
            old = None
        behind = old is not None and not self.complete and self.digest in old.digests(0)
        same = old is not None and old.locations == self.locations
        if old is not None and same and (behind or old.digest == self.digest):
            return "unchanged"
        arriving = old is not None and not old.complete and old.digest in self.digests(0)
        if not overwrite and not arriving and (old is None or old.digest != self.digest):
            raise ConflictError(
                "another lock is here" if old else "a file that is not a lock is here",
                where=os.fspath(path),
                why="a run may depend on it" + (f" (its digest is {old.digest})" if old else ""),
                fix="choose another --output, or replace it with --overwrite",
            )
        write_json(store, name, self.encode())
        return "written"

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Lock:
        """Read and check a lock file, local or remote.

        Raises:
            InputError: there is no such file, or it is something else.
            ValidationError: malformed, edited, or of another version.
        """
        try:
            return cls.decode(_read(path), os.fspath(path))
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                "there is no mixture lock here",
                where=os.fspath(path),
                fix=nearest(path, "make one: olm-data mix manifest.yaml"),
            ) from None
        except (MalformedJson, OlmError) as error:
            found = kind_of(os.fspath(path))
            damaged = found == "text" and os.fspath(path).endswith(".json")
            if found not in (None, "lock", "file") and not damaged:
                raise wrong_kind(os.fspath(path), str(found), "lock") from None
            if isinstance(error, MalformedJson):
                raise _no_lock(os.fspath(path), str(error)) from None
            raise

    @classmethod
    def decode(cls, data: bytes, path: str) -> Lock:
        """Check the bytes of a lock file; `path` is where they lie.

        Raises:
            ValidationError: malformed, edited, or of another version.
        """
        try:
            head = decode_object(data)
            known = (head.get("format"), head.get("version"), head.get("order"))
            if known != (FORMAT, VERSION, ORDER):
                raise ValidationError(
                    f"this is {known[0]} version {known[1]} with order {known[2]}; this release "
                    f"reads {FORMAT} version {VERSION} with order {ORDER}",
                    where=path,
                    fix="give the lock that olm-data mix wrote, or use the release that wrote it",
                )
            del head["order"]
            order = take_order(head)
            packing = packing_from_lock(head.pop("packing", None), order)
            content = convert(head, LockFile)
        except (MalformedJson, msgspec.ValidationError) as error:
            raise _no_lock(path, str(error)) from None
        fields = {name: getattr(content, name) for name in content.__struct_fields__}
        lock = cls(folder=split(path)[0], order=order, packing=packing, **fields)
        wrong = None
        if (name := strange_name(lock)) is not None:
            wrong = f"the lock has a name that no mixture has: {quoted(name)}"
        elif lock.digest != lock.compute_digest():
            wrong = "the lock was changed after it was written: its digest does not match"
        elif not is_consistent(lock, order, packing):
            wrong = "the lock was not written by olm-data mix: its numbers do not fit each other"
        if wrong is not None:
            raise ValidationError(
                wrong,
                where=path,
                why="the order of the run would not be the recorded one",
                fix="restore it, or change the manifest and run olm-data mix again",
            )
        return lock


def arrived_name(digest: str) -> str:
    """Return where beside a lock the manifest of an unfinished dataset lies, as far as it goes."""
    return f"arrived/{digest}.json"


def split(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Split a local path or URL into its folder, absolute if local, and the file's name."""
    text = os.fspath(path)
    if is_remote(text):
        folder, _, name = text.rpartition("/")
        return folder, name
    absolute = os.path.abspath(text.removeprefix("file://"))
    return os.path.dirname(absolute), os.path.basename(absolute)


def _read(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a lock where the user says it is; a link of the user's is followed."""
    folder, name = split(path)
    if not is_remote(folder):
        folder, name = os.path.split(os.path.realpath(os.path.join(folder, name)))
    return read_json(Store(folder), name)


def _no_lock(path: str, why: str) -> ValidationError:
    return ValidationError(
        f"this is not a mixture lock: {why}",
        where=path,
        fix="give the lock that olm-data mix wrote (NAME.lock.json), not its manifest",
    )


def lock_of_run(config: JsonObject, folder: str) -> str:
    """Return where the lock is that the `config.json` of a run names: here, or in the run's bucket.

    A run folder may come from elsewhere: no address in it is asked.

    Args:
        folder: that local paths in the configuration count from.

    Raises:
        InputError: it names none, or one elsewhere.
    """
    loader = config.get("data_loader")
    path = loader.get("mixture") if isinstance(loader, dict) else None
    if not isinstance(path, str):
        raise InputError("the configuration of the run names no mixture lock")
    if is_remote(folder):
        path = path if is_remote(path) else f"{folder}/{path}"
    elif not is_remote(path):
        path = os.path.realpath(os.path.join(folder, path.removeprefix("file://")))
    _refuse_far(path, folder, "its mixture lock")
    return path


def _refuse_far(place: str, near: str, what: str) -> None:
    if is_remote(place) and place.split("/")[:3] != near.split("/")[:3]:
        raise InputError(
            f"the run names an address for {what}, which only you may open: "
            f"give the lock yourself (--lock), or copy what it names beside the run",
            where=place,
        )
