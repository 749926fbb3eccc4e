"""From a command line to a `SourcePlan`: which files, which columns, which types.

INPUT...  |  --source NAME [--subset] [--root]  |  --source hf:ORG/NAME  |  --source pylib
    -> inputs -> look into the first one: is the text column there? an id? what types are kept?
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple, cast

import msgspec

from olm_data.dataset.docs import docs_schema
from olm_data.dataset.inputs import (
    KEEP_TYPES,
    ChatOptions,
    InputFile,
    KeepType,
    ReadOptions,
    SourceRequest,
)
from olm_data.errors import InputError, UsageError, printable, suggest
from olm_data.select.where import columns
from olm_data.sources import hub, named, own, own_filter, pylib
from olm_data.sources.base import ColumnKinds, SourcePlan
from olm_data.sources.columns import common_kind
from olm_data.sources.listing import Listing, list_files
from olm_data.sources.passed import tally
from olm_data.sources.readers import CHAT, libraries_of, reader_of
from olm_data.storage.names import is_column_name
from olm_data.threads import in_order

UNKNOWN_CHAT = ChatOptions(
    template="",
    special={},
    train="",
    thinking="keep",
    ends="turn",
    max_tokens=None,
    too_long="drop",
)
"""Says that chats are read, before the tokenizer and its template are."""

HEADS = 16
"""Files, about, whose beginning decides the types of the kept columns."""


def resolve_source(request: SourceRequest) -> SourcePlan:
    """Find the inputs and how to read them.

    Raises:
        UsageError: fields that do not go together, or an unknown name.
        InputError: no such file, or no such column.
        StorageError: remote storage fails.
    """
    source = request.source
    if bool(request.inputs) == bool(source):
        raise UsageError(
            "name either input files or a source" + (", not both" if source else ""),
            fix="olm-data tokenize INPUT... or olm-data tokenize --source NAME",
        )
    path = _own_path(source)
    hf = source is not None and source.startswith("hf:")
    allowed = {
        "subset": source is not None and not hf,
        "root": source is not None and source != "pylib" and not hf,
        "split": hf or path is not None,
    }
    for name, fits in allowed.items():
        value = getattr(request, name)
        if value is not None and not fits:
            raise UsageError(f"--{name} has no meaning here", where=f"--{name} {value}")
    found = _find(request, path)
    return SourcePlan(
        name=found.name,
        inputs=found.listing.files,
        options=_options(found, request),
        passed=tally(found.listing.passed),
    )


class _Found(NamedTuple):
    """Files, the name of the source, and how it is read where nothing is said."""

    listing: Listing
    name: str
    text: str = "text"
    id: str = "id"
    keep: Sequence[str] = ()


def _find(request: SourceRequest, own_path: str | None) -> _Found:
    """Return the files of a source.

    Args:
        own_path: import path of a source of one's own.
    """
    inputs, source, subset, root = request.inputs, request.source, request.subset, request.root
    if source is None:
        return _Found(list_files(inputs), _name_of(inputs))
    if own_path is not None:
        options = {"subset": subset, "root": root, "split": request.split}
        given = {name: value for name, value in options.items() if value is not None}
        listing = Listing(own.list_inputs(own_path, given))
        return _Found(listing, _fit_name(f"{source}-{subset}" if subset else source))
    if source == "pylib":
        subset = subset or pylib.SUBSETS[0]
        return _Found(pylib.list_inputs(subset), f"pylib-{subset}")
    if source.startswith("hf:"):
        dataset, split = _hub_dataset(source), request.split or "train"
        return _Found(Listing(hub.list_inputs(dataset, split)), _fit_name(f"{dataset}-{split}"))
    entry = named.find(source)
    subset, listing = named.list_inputs(source, subset, root)
    name = _fit_name(f"{source}-{subset}")
    return _Found(listing, name, entry.text, entry.id or "id", entry.keep)


def _own_path(source: str | None) -> str | None:
    """Return the import path that a source's name stands for; None: it is a name of ours."""
    if source is None or source == "pylib" or source in named.CATALOGUE or source[:3] == "hf:":
        return None
    return own.own_path(source)


def _hub_dataset(source: str) -> str:
    """Return `ORG/NAME[:CONFIG]` of `hf:ORG/NAME[:CONFIG]`."""
    dataset = source.removeprefix("hf:").removeprefix("//")
    repository = dataset.partition(":")[0]
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", repository):
        return dataset
    raise UsageError(
        "this is not the name of a dataset on the hub",
        where=f"--source {printable(source)}",
        fix="write --source hf:ORG/NAME or hf:ORG/NAME:CONFIG; name files, folders and addresses "
        "without --source",
    )


def _options(found: _Found, request: SourceRequest) -> ReadOptions:
    files, separator, where = found.listing.files, request.separator, request.where
    chat = UNKNOWN_CHAT if request.format == CHAT else None
    text_column, id_column = request.text_column, request.id_column
    text_column = text_column or (found.text if chat is None else "messages")
    options = ReadOptions(
        text_column=text_column,
        separator=separator,
        delimiter=_delimiter(request.delimiter, files),
        where=None if where is None else str(where),
        filter=None if request.filter is None else own_filter.find_filter(request.filter),
        on_invalid=request.on_invalid,
        on_unknown=request.on_unknown,
        chat=chat,
        libraries=libraries_of(files),
    )
    if separator is not None and (not separator or all(f.format != "txt" for f in files)):
        raise UsageError(
            "a separator is for text files and is not empty", where=f"--separator {separator!r}"
        )
    table = next((file for file in files if file.format != "txt"), None)
    if table is None:
        if request.keep or id_column not in (None, "none") or where is not None:
            raise UsageError(
                "text files have no columns",
                where="--keep, --id-column, --where",
                fix="leave them out",
            )
        return options
    kinds = _kinds(files, options)
    if where is not None:
        for name in columns(where):
            _require(name, kinds, "--where", table)
        if any(file.format == "txt" for file in files):
            raise UsageError(
                "--where needs columns, and some inputs are text files",
                fix="tokenize the text files without it, into a dataset of their own",
            )
    if id_column is None:
        id_column = found.id if found.id in kinds else None
    elif id_column == "none":
        id_column = None
    else:
        _require(id_column, kinds, "--id-column", table)
    keep = request.keep
    if keep is None:
        keep = tuple(name for name in found.keep if name in kinds)
    kept = _kept(keep, kinds, text_column, table)
    _refuse_unreadable_names((text_column, id_column, *kept), table)
    return msgspec.structs.replace(
        options,
        id_column=id_column,
        keep=tuple((name, cast("KeepType", kind)) for name, kind in kept.items()),
    )


def _kept(
    keep: Sequence[str], kinds: dict[str, str], text_column: str, table: InputFile
) -> dict[str, str]:
    """Return the type of each column that is kept, by its name.

    Raises:
        InputError, UsageError: there is no such column, or it cannot be kept.
    """
    kept: dict[str, str] = {}
    for item in keep:
        name, kind = _named_kind(item, kinds)
        _require(name, kinds, "--keep", table)
        if name == text_column:
            raise UsageError("the text itself cannot be kept beside its tokens", where="--keep")
        if name in docs_schema().names:
            raise UsageError(
                f"--keep {name} has the name of a column that each document has already",
                where=f"--keep {item}",
                why=f"docs.parquet holds {', '.join(docs_schema().names)}, whatever is kept",
                fix="leave it out, or rename it in the inputs",
            )
        kept[name] = kind
    return kept


def _refuse_unreadable_names(columns: Iterable[str | None], table: InputFile) -> None:
    for column in columns:
        if column is not None and not is_column_name(column):
            raise InputError(
                "the name of a column holds control characters, or is too long",
                where=f"{column[:80]!r}, {table.path}",
                why="it would stand in the dataset, and act wherever it is shown",
                fix="rename the column, or leave it out of --keep",
            )


def _kinds(files: Sequence[InputFile], options: ReadOptions) -> dict[str, str]:
    """Return column -> kept type: that of its values at the start of some of the files.

    The first file is looked into first, and has to have what the condition asks for.
    """
    tables = [file for file in files if file.format != "txt"]
    some = {file.format: file for file in reversed(tables)}  # the first of each format
    step = -(-len(tables) // HEADS)
    asked = list(dict.fromkeys([tables[0], *some.values(), *tables[::step]]))
    found = _columns(tables[0], options)
    rest = partial(_columns, options=msgspec.structs.replace(options, where=None))
    for more in in_order(rest, asked[1:], len(asked)):
        for name, kinds in more.items():
            found.setdefault(name, set()).update(kinds)
    return {name: common_kind(kinds) for name, kinds in found.items()}


def _columns(input: InputFile, options: ReadOptions) -> ColumnKinds:
    return reader_of(input, options).columns(input, options)


def _named_kind(item: str, kinds: Mapping[str, str]) -> tuple[str, str]:
    """Return the column and the type that `score` or `score:double` asks for."""
    name, _, kind = item.rpartition(":")
    if item not in kinds and name and kind in KEEP_TYPES:
        return name, kind
    return item, kinds.get(item, "string")


def _delimiter(delimiter: str | None, files: Sequence[InputFile]) -> str | None:
    """Return the delimiter of CSV files, `\\t` spelled out.

    Raises:
        UsageError: it is none, or there are no CSV files.
    """
    if delimiter is None:
        return None
    character = "\t" if delimiter == r"\t" else delimiter
    if len(character) != 1 or character in '"\r\n' or not any(f.format == "csv" for f in files):
        raise UsageError(
            "a delimiter is one character, for CSV files",
            where=f"--delimiter {delimiter!r}",
            fix="--delimiter ';'",
        )
    return character


def _require(name: str, kinds: dict[str, str], option: str, table: InputFile) -> None:
    if name not in kinds:
        known = [printable(column) for column in list(kinds)[:40]]
        raise InputError(
            f"there is no column {name!r}",
            where=f"{option} {name}, {table.path}",
            why=f"its columns are: {', '.join(known)}",
            fix=suggest(name, known),
        )


def _name_of(inputs: Sequence[str]) -> str:
    """Return a short name for inputs: of the first file or folder, without its endings."""
    path = PurePosixPath(inputs[0].partition("://")[2] or inputs[0])
    parts = [part for part in path.parts if not re.search(r"[*?\[]", part) and part not in "/."]
    name = parts[-1] if parts else "text"
    return _fit_name(name.partition(".")[0] or "text")


def _fit_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "text"
