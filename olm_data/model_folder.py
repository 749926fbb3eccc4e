"""`config.json` of a folder of weights in our own format: what its files are, and their digests.

    config.json -> FolderConfig: classes and shape of the model; size and sha256 of each other file

`olm_train/model/weights_folder.py` writes and loads such a folder.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from olm_data.bounded_json import JsonObject, decode_object
from olm_data.decoding import convert
from olm_data.errors import ValidationError, printable
from olm_data.storage.store import Store

CONFIG = "config.json"
FORMAT, VERSION = "olm-model", 3
READABLE = (1, 2, 3)
"""Version 1 had neither tokenizer, lock nor configuration; 2 had no classes."""

OWN_MODEL = "olm_train.model.decoder:Decoder"
OWN_CONFIG = "olm_train.model.config:DecoderConfig"


class ExportedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of an export: name, size and sha256."""

    file: str
    bytes: int
    sha256: str


class FolderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `config.json`.

    Attributes:
        model: shape of the model.
        model_class, config_class: import paths of the classes of the model and of its shape.
        step: of the checkpoint; None: it is of none.
        parameters: how many there are.
        lock_digest: of the mixture, where it was made from a checkpoint.
        weights: the safetensors file.
        carried: the other files.
    """

    format: str = FORMAT
    version: int = VERSION
    model: JsonObject
    model_class: str = OWN_MODEL
    config_class: str = OWN_CONFIG
    step: int | None = None
    parameters: int
    lock_digest: str | None = None
    weights: ExportedFile
    carried: tuple[ExportedFile, ...] = ()

    COLUMNS: ClassVar = {"format": None, "version": None, "model": None, "config_class": None}

    @property
    def files(self) -> tuple[ExportedFile, ...]:
        """All files but `config.json`."""
        return (self.weights, *self.carried)


def read_about(store: Store) -> FolderConfig:
    """Return the `config.json` of a folder.

    Raises:
        FileNotFoundError: there is none.
        ValidationError: it is another one, or of another version.
    """
    where = store.url(CONFIG)
    try:
        value = decode_object(store.read(CONFIG))
        found, version = value["format"], value["version"]
        if found == FORMAT and version in READABLE:
            return convert(value, FolderConfig)
    except (ValueError, KeyError, TypeError) as error:  # msgspec's are ValueErrors
        if isinstance(error, ValidationError):
            raise
        raise ValidationError("this is not an exported model", where=where) from error
    known = ", ".join(str(number) for number in READABLE)
    raise ValidationError(
        f"these weights are {printable(str(found))} version {printable(str(version))}; "
        f"this program reads {FORMAT} versions {known}",
        where=where,
        fix="use the program that wrote them, or a newer one",
    )
