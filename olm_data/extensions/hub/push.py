"""`olm-data push`: a dataset or a model to a repository of the hub, whole or not seen as whole.

    folder --verified--> parts --which are there?--> one commit, or several of COMMIT_FILES each
                                   last commit: manifest.json, or config.json and the receipt; card
                              --> files of that commit compared with ours

The hub's client sends what the hub does not have: neither what is in a commit already, nor large
files that an earlier push came to send. Until the last commit nobody takes what is there so far for
the whole. Commits name their parent, so that two pushes never mix.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec

from olm_data.bounded_json import sha256_file
from olm_data.errors import ConflictError, InputError, UsageError, ValidationError, printable
from olm_data.extensions.hub.content import CARD, Branch, Content, ContentKind, Watch, some
from olm_data.extensions.hub.models import KINDS
from olm_data.printing import Columns
from olm_data.regular_files import MAX_DOCUMENT
from olm_data.storage.hub import HubFile, Repository, is_commit
from olm_data.storage.names import is_working
from olm_data.storage.store import Store, is_remote
from olm_data.threads import in_order

COMMIT_FILES = 1000
"""Files of one commit; the hub wants no more than some thousands. Progress is shown between two."""

_HUBS_OWN = ".gitattributes"
_NAMED = 8


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent; its JSON is that of `--json`.

    Attributes:
        status: `pushed`, `already there` or `would push`.
        kind: `dataset` or `model`.
        address: of the repository, at the branch.
        commit: that has it all; None for `would push`.
        digest: of the dataset; of a model sha256 of the file that names its files.
        sent, kept: files that were sent, and that were there already.
        sent_bytes: of the files that were sent.
        not_sent: files of the folder that are no part of it.
        notes: sentences about what was left as it is.
    """

    status: str
    kind: str
    address: str
    commit: str | None
    digest: str
    sent: int
    kept: int
    sent_bytes: int
    not_sent: list[str]
    notes: list[str]

    COLUMNS: ClassVar = {"not_sent": Columns(most=3)}


def push(
    target: str,
    address: str,
    *,
    private: bool = False,
    revision: str | None = None,
    licence: str | None = None,
    dry_run: bool = False,
    watch: Watch = lambda what, done, total: None,
) -> Pushed:
    """Send a dataset or an exported model to a repository of the hub.

    Args:
        target: local folder.
        address: `hf://datasets/ORG/NAME` of a dataset, `hf://ORG/NAME` of a model; the repository
            is made if it is not there.
        private: make it so that others do not see it.
        revision: branch, made if it is not there, from `main` or empty; None: the hub's default.
        licence: of the texts of a dataset, for a card that is written anew.
        dry_run: look only.

    Raises:
        UsageError: an address of another kind, a remote target, `private` where others see it, or a
            licence of a model.
        InputError: there is nothing of that kind.
        ValidationError: the folder is damaged, or the hub has other bytes than were sent.
        ConflictError: the repository holds something else, or changes in the meantime.
        StorageError: the hub cannot be reached, or refuses.
    """
    place = _place(target, address, revision)
    kind = KINDS[place.kind]
    if licence is not None and kind.name == "model":
        raise UsageError(
            "the licence of a model stands in its card",
            where="--licence",
            fix="write `license: ID` between the first two lines `---` of README.md in the folder",
        )
    content = _verified(kind, Store(kind.target(target)), watch)
    names = {entry.name for entry in content.store.entries() if not is_working(entry.name)}
    not_sent = sorted(names - content.parts.keys())
    if private:
        _refuse_public(place)
    with tempfile.TemporaryDirectory(prefix="olm-push-") as scratch:
        notes = list[str]()
        content, branch = _settled(kind, content, place, Path(scratch), notes)
        head = branch.head
        missing = _differing(content, branch.files)
        rest = [name for name in missing if name not in content.last]
        sent = [*rest, *content.last] if missing else []
        others = sorted(branch.files.keys() - content.parts.keys() - {CARD, _HUBS_OWN})
        if others:
            notes.append(
                f"{len(others):,} other files of the repository are left as they are: "
                f"{some(others, _NAMED)}"
            )
        done = partial(
            Pushed,
            kind=kind.name,
            address=place.address,
            digest=content.digest,
            sent=len(sent),
            kept=len(content.parts) - len(sent),
            sent_bytes=sum(content.path(name).stat().st_size for name in sent),
            not_sent=not_sent,
            notes=notes,
        )
        if dry_run:
            return done(status="would push", commit=None)
        if missing or revision is not None:  # the branch may be new
            place.create(private=private, start=head)
        if not missing:
            return done(status="already there", commit=head)
        before = head or place.required_commit()
        if head is None:  # the hub may put files into a new repository
            branch = replace(branch, head=before, files=place.files(before))
        card = kind.card(content, branch, licence, notes)
        commit = _send(kind, content, place, rest, before, card, watch)
        _refuse_damage(place, commit, content)
    return done(status="pushed", commit=commit)


def _place(target: str, address: str, revision: str | None) -> Repository:
    place = Repository.parse(address)
    if place.revision is not None or is_commit(revision):
        raise UsageError(
            "a commit goes to a branch",
            where=address,
            fix="leave @REVISION out, and say --revision BRANCH for another branch than main",
        )
    if is_remote(target):
        raise UsageError(
            "only a local folder can be pushed",
            where=target,
            fix="copy it to a disk first, or run this where it lies on one",
        )
    return place.at(revision)


def _verified(kind: ContentKind, store: Store, watch: Watch) -> Content:
    content = kind.read(store, store.exists)
    # what is sent last is what was verified, whatever is written to the folder meanwhile
    paths = {name: content.path(name) for name in content.last}
    seen = {name: sha256_file(path) for name, path in paths.items() if path.is_file()}
    content = replace(content, parts={**content.parts, **seen})
    damage = kind.damage(content, watch)
    if damage is not None:
        checks = kind.name == "dataset"
        raise ValidationError(
            f"the {kind.name} is damaged: {damage}",
            where=store.root,
            why="others would train on it" if checks else "others would use it",
            fix=f"olm-data verify {store.root} lists them; restore the files from a copy"
            if checks
            else "restore the files from a copy, or export it again",
        )
    return content


def _refuse_public(place: Repository) -> None:
    if place.is_private() is False:
        raise UsageError(
            "the repository is there already, and public",
            where=f"--private {place.at(None).address}",
            why="its files would be seen by everybody",
            fix="make it private in its settings, or leave --private out",
        )


def _settled(
    kind: ContentKind, content: Content, place: Repository, scratch: Path, notes: list[str]
) -> tuple[Content, Branch]:
    """Return what goes to a branch, and the branch.

    One that is not there yet begins where `main` is; at the first commit, which is empty, where
    `main` holds something else, as with a branch for each of several checkpoints.

    Raises:
        ConflictError: the branch holds something else.
    """
    head, new = _head(place)
    branch = Branch(place, head, place.files(head) if head else {}, scratch / "here")
    try:
        return kind.settled(content, branch, notes), branch
    except ConflictError:
        if not new:
            raise
    first = place.first_commit()
    branch = Branch(place, first, place.files(first), scratch / "first")
    return kind.settled(content, branch, notes), branch


def _head(place: Repository) -> tuple[str | None, bool]:
    """Return the commit that a push begins at, and whether that is `main` for a new branch.

    The commit is None where there is no repository yet.
    """
    main = place.at(None).commit()
    if main is None or place.revision is None:
        return main, False
    try:
        return place.commit(), False
    except InputError:  # there is no such branch yet
        return main, True


def _differing(content: Content, there: Mapping[str, HubFile]) -> list[str]:
    """Return the parts that are not there, or with another content."""

    def same(name: str) -> bool:
        return name in there and there[name].is_at(content.path(name), content.parts[name])

    names = sorted(content.parts)
    return [n for n, kept in zip(names, in_order(same, names), strict=True) if not kept]


def _send(
    kind: ContentKind,
    content: Content,
    place: Repository,
    rest: Sequence[str],
    head: str,
    card: bytes | None,
    watch: Watch,
) -> str:
    """Send parts in commits, what makes them whole in the last one; return that."""
    sizes = {name: content.path(name).stat().st_size for name in rest}
    total, done = sum(sizes.values()), 0
    watch("send", done, total)
    while len(rest) > COMMIT_FILES:
        group, rest = rest[:COMMIT_FILES], rest[COMMIT_FILES:]
        message = f"Parts of a {kind.name}; {content.last[-1]} follows"
        head = place.send({name: content.path(name) for name in group}, message, head)
        done += sum(sizes[name] for name in group)
        watch("send", done, total)
    last: dict[str, Path | bytes] = {name: content.path(name) for name in rest}
    last |= {name: _as_verified(content, name) for name in content.last}
    if card is not None:
        last[CARD] = card
    return place.send(last, f"{kind.name.capitalize()}, whole", head)


def _as_verified(content: Content, name: str) -> bytes:
    """Return the bytes of a file that names others, if they are those that were verified."""
    data = content.store.read(name, limit=MAX_DOCUMENT)
    if hashlib.sha256(data).hexdigest() != content.parts[name]:
        raise ConflictError(
            f"{printable(name)} changed while this was running",
            where=content.store.root,
            why="it may name files that were not sent; the repository is as it was, but for parts",
            fix="run the same command again, once nobody writes to the folder",
        )
    return data


def _refuse_damage(place: Repository, commit: str, content: Content) -> None:
    """Compare what the hub says it has now with what was sent.

    Raises:
        ValidationError: a file is not there, or is another one.
    """
    found = _differing(content, place.files(commit))
    if found:
        raise ValidationError(
            f"{len(found):,} files of the repository are not those that were sent: {some(found)}",
            where=f"{place.address}, commit {commit}",
            why="a .gitignore of the repository leaves files out, or a file changed meanwhile",
            fix="run the same command again",
        )
