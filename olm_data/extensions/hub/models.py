"""An exported model as it is pushed and pulled: what names its files, and what they must be.

    olm-export.json         of a folder for transformers: size and sha256 of each file -> Content
    config.json (ours)      of a folder in our own format: likewise                    -> Content
    README.md               the model card: of whoever writes it, whatever was exported

`config.json` and the receipt come last: without them it is no model to any reader.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping

import msgspec

from olm_data.bounded_json import MalformedJson, decode_object
from olm_data.dataset.manifest import MANIFEST
from olm_data.errors import ConflictError, InputError, UsageError, ValidationError
from olm_data.extensions.hub.content import (
    CARD,
    MOST_CARD,
    Branch,
    Content,
    ContentKind,
    Watch,
    some,
)
from olm_data.extensions.hub.datasets import Datasets
from olm_data.model_folder import CONFIG, FORMAT, FolderConfig, read_about
from olm_data.model_receipt import FileProof, ModelClaim, ModelReceipt
from olm_data.regular_files import MAX_WHOLE
from olm_data.storage.destination import RECORD
from olm_data.storage.names import refuse_escape
from olm_data.storage.store import Store
from olm_data.threads import in_order

_TAKEN = re.compile(
    r"([^/]*\.safetensors|pytorch_model[^/]*\.bin)(\.index\.json)?|adapter_config\.json"
)
"""What readers take for weights of the model, or put on top of it, wherever it came from."""


class _Named(msgspec.Struct, frozen=True, kw_only=True):
    """What the naming file says: which model it is, and what its files are."""

    model: ModelClaim | FolderConfig
    digest: str
    files: Mapping[str, FileProof]
    last: tuple[str, ...]


class Models:
    """See `ContentKind`."""

    name = "model"

    def target(self, target: str) -> str:
        """Return the folder; refuse that of a dataset."""
        store = Store(target)
        if store.exists(MANIFEST) and not store.exists(RECORD):
            raise UsageError(
                "this is the address of a model; a dataset goes to hf://datasets/ORG/NAME",
                where=target,
                fix="put datasets/ into the address",
            )
        return target

    def is_naming(self, name: str) -> bool:
        """Whether it is the receipt or the configuration."""
        return name in (RECORD, CONFIG)

    def is_whole(self, has: Callable[[str], bool]) -> bool:
        """Whether there is a configuration, which comes last."""
        return has(CONFIG)

    def read(self, store: Store, has: Callable[[str], bool]) -> Content:
        """Return what the receipt names, or a configuration of our own format."""
        named = _named(store, has)
        for name in named.files:
            refuse_escape(name)
        parts = {name: file.sha256 for name, file in named.files.items()}
        parts |= {name: parts.get(name, "") for name in named.last}
        parts.pop(CARD, None)
        if has(CARD):
            parts[CARD] = ""
        return Content(store, named.digest, parts, named.last)

    def damage(self, content: Content, watch: Watch) -> str | None:
        """Return which files are not those that were exported."""
        store = content.store
        files = {k: v for k, v in _named(store, store.exists).files.items() if k != CARD}
        total, done, wrong = sum(file.bytes for file in files.values()), 0, []
        found = in_order(lambda name: _is(store, name, files[name]), files)
        for name, right in zip(files, found, strict=True):
            done += files[name].bytes
            watch("verify", done, total)
            wrong += [] if right else [name]
        if not wrong:
            return None
        return f"{len(wrong):,} files are not those that were exported: {some(wrong)}"

    def settled(self, content: Content, branch: Branch, notes: list[str]) -> Content:
        """Refuse a branch with another model; leave a card there that somebody wrote."""
        mine = _named(content.store, content.store.exists)
        theirs = _at(branch)
        known = theirs is not None and theirs.model == mine.model
        if theirs is not None and not known:
            raise _other(branch, f"its digest is {theirs.digest[:12]}")
        if theirs is None and CONFIG in branch.files:
            raise _other(branch, f"its {CONFIG} is of another program")
        foreign = [n for n in branch.files if n not in content.parts and _TAKEN.fullmatch(n)]
        if foreign:
            raise _other(branch, f"readers would take {some(foreign)} for weights of this one")
        if not known:
            rest = [n for n in content.parts if n in branch.files and n != CARD]
            changed = [n for n in rest if not branch.files[n].is_at(content.path(n))]
            if changed:
                raise _other(branch, f"{some(changed)} would be replaced")
        return self._with_card(content, branch, theirs or mine, notes)

    def card(
        self, content: Content, branch: Branch, licence: str | None, notes: list[str]
    ) -> bytes | None:
        """Return None: the card is README.md of the folder."""
        return None

    def _with_card(
        self, content: Content, branch: Branch, exported: _Named, notes: list[str]
    ) -> Content:
        """Leave the card of the repository as it is where it is not the one that was exported."""
        if CARD not in content.parts or CARD not in branch.files:
            return content
        if branch.files[CARD].is_at(content.path(CARD)):
            return content
        data = branch.read(CARD, MOST_CARD) or b""
        as_exported = exported.files.get(CARD)
        if as_exported and hashlib.sha256(data).hexdigest() == as_exported.sha256:
            return content
        notes.append(
            f"{CARD} of the repository is another one than was exported and stays as it is"
        )
        parts = {name: sha256 for name, sha256 in content.parts.items() if name != CARD}
        return Content(content.store, content.digest, parts, content.last)


def _named(store: Store, has: Callable[[str], bool]) -> _Named:
    """Return what the naming file of a folder says.

    Raises:
        InputError: there is none of ours.
        ValidationError: it is damaged.
    """
    if has(RECORD):
        return _of_receipt(store.read(RECORD), store.url(RECORD))
    if has(CONFIG) and _is_ours(store.read(CONFIG)):
        return _of_config(store)
    raise InputError(
        "there is no exported model",
        where=store.root,
        why=f"it has neither {RECORD} nor a {CONFIG} of our own format",
        fix="olm-train export CHECKPOINT --to hf --output FOLDER",
    )


def _is_ours(config: bytes) -> bool:
    try:
        return decode_object(config).get("format") == FORMAT
    except MalformedJson:
        return False


def _of_receipt(data: bytes, where: str) -> _Named:
    receipt = ModelReceipt.decode(data, where)
    digest = hashlib.sha256(data).hexdigest()
    return _Named(model=receipt.claim, digest=digest, files=receipt.files, last=(CONFIG, RECORD))


def _of_config(store: Store) -> _Named:
    about, digest = read_about(store), hashlib.sha256(store.read(CONFIG)).hexdigest()
    files = {entry.file: FileProof(entry.bytes, entry.sha256) for entry in about.files}
    return _Named(model=about, digest=digest, files=files, last=(CONFIG,))


def _at(branch: Branch) -> _Named | None:
    """Return what a branch holds; None: no model of ours.

    Raises:
        ConflictError: a receipt of something else.
    """
    data = branch.read(RECORD, MAX_WHOLE)
    try:
        if data is not None:
            return _of_receipt(data, f"{branch.place.address}/{RECORD}")
        config = branch.read(CONFIG, MAX_WHOLE)
        if config is not None and _is_ours(config):
            return _of_config(Store(str(branch.scratch)))
    except ValidationError as error:
        raise _other(branch, error.what) from error
    return None


def _is(store: Store, name: str, file: FileProof) -> bool:
    """Whether a file is there, with the size and sha256 that it must have."""
    return store.size(name) == file.bytes and store.sha256(name) == file.sha256


def _other(branch: Branch, why: str) -> ConflictError:
    return ConflictError(
        "the repository holds another model",
        where=branch.place.address,
        why=f"{why}, and its readers would get another model under the same name",
        fix="push to another repository, or to a new branch of this one: --revision NAME",
    )


KINDS: Mapping[str, ContentKind] = {kind.name: kind for kind in (Datasets(), Models())}
