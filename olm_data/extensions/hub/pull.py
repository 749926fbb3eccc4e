"""`olm-data pull`: a dataset or model out of a repository of the hub, into a folder, whole.

    repository at a commit -> what names the files -> names of the parts
                           -> .NAME.pulling/ beside the output --verified--> renamed to it

A killed pull leaves that folder, and the same command goes on in it: files that are whole are not
fetched again, one that was begun goes on where it stopped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path

import msgspec

from olm_data.errors import InputError, OlmError, UsageError, ValidationError
from olm_data.extensions.hub.content import ContentKind, Watch
from olm_data.extensions.hub.models import KINDS
from olm_data.storage.destination import LocalFolder, in_the_way
from olm_data.storage.disk import fsync_path, io_errors, make_folder
from olm_data.storage.hub import HubFile, Repository
from olm_data.storage.lease import acquire
from olm_data.storage.output_paths import refuse_output
from olm_data.storage.store import Store, is_remote
from olm_data.threads import in_order

_AT_ONCE = 8


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """What was fetched; its JSON is that of `--json`.

    Attributes:
        status: `pulled`, `already there` or `would pull`.
        kind: `dataset` or `model`.
        output: the folder.
        address: of the repository.
        commit: it was fetched at.
        digest: of the dataset; of a model sha256 of the file that names its files.
        files, bytes: of all of it.
        kept: files that an earlier pull had fetched.
    """

    status: str
    kind: str
    output: str
    address: str
    commit: str
    digest: str
    files: int
    bytes: int
    kept: int


def pull(
    address: str,
    output: str,
    *,
    dry_run: bool = False,
    watch: Watch = lambda what, done, total: None,
) -> Pulled:
    """Fetch a dataset or an exported model from a repository of the hub, and verify it.

    Args:
        address: `hf://datasets/ORG/NAME[@REVISION]`, or `hf://ORG/NAME[@REVISION]` of a model.
        output: local folder to make.
        dry_run: fetch what tells the names of its files, for a look.

    Raises:
        UsageError: no address of a repository, or an output that is no folder of its own.
        InputError: there is no such repository, or nothing of that kind in it.
        ValidationError: what was fetched is damaged.
        ConflictError: the output holds something else, or another process pulls to it.
        ResourceError: the disk is full, or the folder may not be written.
        StorageError: the hub cannot be reached, or refuses.
    """
    place = Repository.parse(address)
    refuse_output(output)
    if is_remote(output):
        raise UsageError(
            "a pull makes a local folder",
            where=output,
            fix=f"training reads {place.address} in place; or copy the folder to the bucket",
        )
    commit = place.required_commit()
    there, at = place.files(commit), f"{place.address}, commit {commit}"
    kind = KINDS[place.kind]
    if not kind.is_whole(there.__contains__):
        raise InputError(
            f"there is no {kind.name} in this repository",
            where=at,
            why="it has no manifest or configuration, or a push to it has not come to its end",
            fix="name another repository or revision, or let the push go on",
        )
    with tempfile.TemporaryDirectory(prefix="olm-pull-") as scratch:
        naming = {name: file for name, file in there.items() if kind.is_naming(name)}
        _fetch(place, commit, naming, Path(scratch))
        content = kind.read(Store(scratch), there.__contains__)
    absent = sorted(content.parts.keys() - there.keys())
    if absent:
        raise ValidationError(
            f"{len(absent):,} files of the {kind.name} are not in the repository: {absent[0]}",
            where=at,
            fix="push it again from a folder that verifies",
        )
    wanted = {name: there[name] for name in content.parts}
    target = Path(output.removeprefix("file://")).absolute()
    done = partial(
        Pulled,
        kind=kind.name,
        output=str(target),
        address=place.address,
        commit=commit,
        digest=content.digest,
        files=len(wanted),
        bytes=sum(file.size for file in wanted.values()),
    )
    if _is_there(kind, target, content.digest):
        return done(status="already there", kept=len(wanted))
    if dry_run:
        return done(status="would pull", kept=0)
    draft = target.parent / f".{target.name}.pulling"
    lease = acquire(
        Store(str(target.parent)),
        prefix=f"{draft.name}-lease-",
        busy="another process pulls to this place",
        fix="wait for it to finish, or choose another output",
    )
    try:
        with io_errors(str(draft), writing=True):
            make_folder(str(draft))
        kept = _fetch(place, commit, wanted, draft, watch)
        _remove_others(draft, wanted.keys())
        fetched = kind.read(Store(str(draft)), there.__contains__)
        damage = kind.damage(fetched, watch)
        if fetched.digest != content.digest:
            damage = "the hub gives other bytes each time"
        if damage is not None:
            raise ValidationError(
                f"the {kind.name} in the repository is damaged: {damage}",
                where=at,
                fix="run the same command again; if it says so again, tell whoever pushed it; "
                "nothing was put into the output",
            )
        lease.check()
        _put_in_place(draft, output)
        return done(status="pulled", kept=kept)
    finally:
        lease.release(keep=False)


def _fetch(
    place: Repository,
    commit: str,
    wanted: Mapping[str, HubFile],
    draft: Path,
    watch: Watch = lambda what, done, total: None,
) -> int:
    """Fetch files that are not there yet; return how many were."""
    total, done, kept = sum(file.size for file in wanted.values()), 0, 0

    def one(name: str) -> bool:
        if wanted[name].is_at(draft / name):
            return True
        with io_errors(str(draft / name), writing=True):
            (draft / name).unlink(missing_ok=True)
            place.fetch(name, commit, draft)
        return False

    for name, was_there in zip(wanted, in_order(one, wanted, _AT_ONCE), strict=True):
        kept += was_there
        done += wanted[name].size
        watch("fetch", done, total)
    return kept


def _is_there(kind: ContentKind, target: Path, digest: str) -> bool:
    """Whether the output is this dataset or model already.

    Raises:
        ConflictError: it is something else.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    store = Store(str(target))
    try:
        found = kind.read(store, store.exists)
        if found.digest == digest and kind.damage(found, lambda what, done, total: None) is None:
            return True
    except OlmError:
        pass
    raise in_the_way(str(target), f"it is no whole copy of {kind.name} {digest[:12]}")


def _remove_others(draft: Path, names: Set[str]) -> None:
    """Remove what an earlier pull of another commit, and the hub's client, left in the draft."""
    for path in sorted(draft.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(draft).as_posix() not in names:
            path.unlink()


def _put_in_place(draft: Path, output: str) -> None:
    """Make the fetched files durable, and the folder the output."""
    with io_errors(output, writing=True):
        for path in sorted(draft.rglob("*"), reverse=True):
            fsync_path(path)
        fsync_path(draft)
        LocalFolder(output).rename(draft)
