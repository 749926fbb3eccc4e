"""The code of a run, frozen in a folder that is named by the digest of what is in it.

    git checkouts of launch.yaml and of this package:            snapshots/DIGEST/
      tracked files, as they stand there now  --copied, hashed-->  code/CHECKOUT/...
      named files that git does not track                          train.yaml    options in it
    versions of packages, digest of the lock                       snapshot.json

Which scheduler it is for, and with how many nodes, is not in it. A job names the digest: each start
of it runs these bytes, or refuses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from olm_data.bounded_json import decode_object, sha256_file
from olm_data.decoding import convert
from olm_data.errors import InputError, ResourceError, UsageError, ValidationError, printable
from olm_data.mixture.lock import Lock
from olm_data.regular_files import MAX_DOCUMENT, read_regular
from olm_data.storage.disk import io_errors
from olm_train.callbacks.environment import packages

MANIFEST, TRAIN, CODE = "snapshot.json", "train.yaml", "code"
MOST_NAMED = 5
_LINK, _RUNS = "link ", "executable "


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `snapshot.json` says.

    Attributes:
        files: path -> sha256; of an executable file `executable SHA256`, of a link `link TARGET`.
        paths: folders whose modules the run imports, first ones first.
        packages: `NAME==VERSION` of what is installed, sorted; empty where the run has an image.
        mixture: the lock, which is not in the snapshot; its digest.
        lock: digest of the lock.
        save_folder, work_dir: of the run.
    """

    files: dict[str, str]
    paths: tuple[str, ...]
    packages: tuple[str, ...]
    mixture: str
    lock: str
    save_folder: str
    work_dir: str
    version: Literal[1] = 1

    def encoded(self) -> bytes:
        """Return the bytes of `snapshot.json`, the same for the same values."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=1)


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot and where it lies.

    Attributes:
        folder: of the snapshot, absolute.
        digest: 32 hex digits of its sha256.
        notes: what may be missing in it.
    """

    folder: str
    digest: str
    snapshot: Snapshot
    notes: tuple[str, ...] = ()


def installed() -> tuple[str, ...]:
    """Return `NAME==VERSION` of each installed package, sorted."""
    return tuple(f"{name}=={version}" for name, version in packages().items())


def checkout(folder: Path) -> Path | None:
    """Return the root of the git checkout that a folder is in, None: it is in none."""
    return next((each for each in (folder, *folder.parents) if (each / ".git").exists()), None)


def _git(root: Path, *words: str) -> list[str]:
    """Return the paths that a command of git lists."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words, "-z"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise ResourceError("there is no git here", fix="install git") from error
    if done.returncode:
        raise InputError("git cannot list the files", where=str(root), why=done.stderr.strip())
    return [name for name in done.stdout.split("\0") if name]


def _roots(here: Path) -> list[tuple[Path, list[str]]]:
    """Return the folders whose files run, and these files: that of the user, and this package."""
    import olm_train

    own, package = checkout(here), Path(olm_train.__file__).resolve().parents[1]
    found = [own or here]
    if not {"site-packages", "dist-packages"} & {*package.parts}:
        ours = checkout(package)
        if ours is None:
            raise UsageError(
                "the package that would run is neither installed nor in a git checkout",
                where=str(package),
                why="nobody could say later what code has run",
                fix="pip install it, or clone its repository",
            )
        found += [ours] if ours != own else []
    return [
        (root, [] if root == here != own else _git(root, "ls-files", "--recurse-submodules"))
        for root in found
    ]


def _named(names: Iterable[str], here: Path) -> Iterable[Path]:
    """Yield the files that are named in `untracked`, folders as all that is in them."""
    for name in names:
        path = here / name
        if not path.resolve().is_relative_to(here.resolve()) or not path.exists():
            raise UsageError(
                f"untracked: {printable(name)} is not a file below launch.yaml",
                where=str(here),
                fix="name files and folders from the folder of launch.yaml",
            )
        yield from filter(Path.is_file, path.rglob("*")) if path.is_dir() else (path,)


def take(
    here: Path,
    *,
    train: str,
    facts: Snapshot,
    untracked: Iterable[str],
    snapshots: Path,
    keep: bool = True,
) -> Taken:
    """Copy the code of a run; return where it lies.

    Args:
        here: folder of launch.yaml, absolute.
        train: text of the configuration of the run; its paths are absolute.
        facts: what is no file: packages, lock, folders of the run.
        untracked: files below `here` that git does not track.
        snapshots: folder of snapshots; made.
        keep: leave it there; else only its digest is wanted.

    Raises:
        UsageError, InputError: a named file is not there; the package is in no checkout.
        ValidationError: the folder of this digest has other bytes.
        ResourceError: a file cannot be copied.
    """
    place = snapshots if keep else Path(tempfile.gettempdir())
    with io_errors(str(place), writing=True):
        place.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".snapshot-", dir=place))
        try:
            paths, notes = _copy(here, untracked, staging / CODE)
            (staging / TRAIN).write_text(train)
            snapshot = msgspec.structs.replace(facts, files=_hashes(staging), paths=tuple(paths))
            text = snapshot.encoded()
            (staging / MANIFEST).write_bytes(text)
            digest = _digest(staging)
            target = snapshots / digest
            if keep and not target.exists():
                staging.chmod(0o755)
                staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    if keep:
        verify(target, digest)
    return Taken(folder=str(target), digest=digest, snapshot=snapshot, notes=tuple(notes))


def _copy(here: Path, untracked: Iterable[str], code: Path) -> tuple[list[str], list[str]]:
    """Copy the files; return the folders that modules are imported from, and notes."""
    paths, notes = list[str](), list[str]()
    for number, (root, files) in enumerate(_roots(here)):
        target = code / f"{number}-{root.name}"
        mine = here.is_relative_to(root)
        more = [str(path.relative_to(root)) for path in _named(untracked, here)] if mine else []
        for name in dict.fromkeys([*files, *more]):
            if os.path.lexists(root / name) and not (root / name).is_dir():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, target / name, follow_symlinks=False)
        base = f"{CODE}/{target.name}"
        inner = here.relative_to(root).as_posix() if mine else "."
        paths += [base] if inner == "." else [f"{base}/{inner}", base]
        if files:
            left = [
                name
                for name in _git(root, "ls-files", "--others", "--exclude-standard", "*.py")
                if name not in more
            ]
            if left:
                shown = ", ".join(map(printable, left[:MOST_NAMED]))
                also = f", and {len(left) - MOST_NAMED:,} more" * (len(left) > MOST_NAMED)
                notes.append(f"not in the snapshot, as git does not track them: {shown}{also}")
    return paths, notes


def _hashes(folder: Path) -> dict[str, str]:
    """Return what `Snapshot.files` says of a folder; what Python compiled is left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name == MANIFEST or "__pycache__" in path.parts:
            continue
        if path.is_symlink():
            found[name] = _LINK + os.readlink(path)
        elif path.is_file():
            executable = _RUNS if path.stat().st_mode & 0o100 else ""
            found[name] = executable + sha256_file(path)
    return found


def _digest(folder: Path) -> str:
    return sha256_file(folder / MANIFEST)[:32]


def verify(folder: Path, digest: str) -> Snapshot:
    """Return what a snapshot says, once each of its files has its digest.

    Raises:
        ValidationError: it is not the snapshot of this digest, or a file was changed.
    """
    fix = "launch the job again: it takes a new snapshot"
    try:
        text = read_regular(folder / MANIFEST, MAX_DOCUMENT)
    except OSError as error:
        raise ValidationError(
            "the snapshot of the job is gone", where=str(folder), why=error.strerror, fix=fix
        ) from error
    if _digest(folder) != digest:
        raise ValidationError(f"this is not the snapshot {digest}", where=str(folder), fix=fix)
    snapshot = convert(decode_object(text), Snapshot)
    there = _hashes(folder)
    if there != snapshot.files:
        changed = sorted(dict(there.items() ^ snapshot.files.items()))
        raise ValidationError(
            f"the snapshot was changed: {', '.join(map(printable, changed[:MOST_NAMED]))}",
            where=str(folder),
            why="other code would run than what was submitted",
            fix=fix,
        )
    return snapshot


def verify_surroundings(snapshot: Snapshot) -> None:
    """Refuse packages or a lock that are not those of the snapshot.

    Raises:
        ValidationError: they are not.
        InputError: the lock is not there.
    """
    here = installed() if snapshot.packages else ()
    changed = sorted({*here} ^ {*snapshot.packages})
    if changed:
        raise ValidationError(
            f"{len(changed):,} packages are not those of the snapshot: "
            + ", ".join(map(printable, changed[: 2 * MOST_NAMED])),
            why="other code would run than what was submitted",
            fix="install the versions of the snapshot, or launch the job again",
        )
    lock = Lock.read(snapshot.mixture).digest
    if lock != snapshot.lock:
        raise ValidationError(
            "the mixture lock is not that of the snapshot",
            where=snapshot.mixture,
            why=f"its digest is {lock}, and was {snapshot.lock}",
            fix="restore the lock, or launch the job again",
        )
