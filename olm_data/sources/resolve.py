"""From a command line to a `SourcePlan`: which files, which columns, which types.

INPUT...  |  --source NAME [--subset] [--root]  |  --source hf:ORG/NAME  |  --source pylib
    -> inputs -> look into the first one: is the text column there? an id? what types are kept?
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import cast, get_args

from olm_data.errors import InputError, UsageError, printable, suggest
from olm_data.select.evaluate import check_types, mismatch
from olm_data.select.where import Node, columns, leaves, parse, wanted_kinds
from olm_data.sources import arrow, hub, jsonl, named, parquet, pylib
from olm_data.sources.base import InputFile, OnInvalid, ReadOptions, SourcePlan
from olm_data.sources.columns import require_text
from olm_data.sources.files import list_files
from olm_data.sources.values import kind_of


def resolve_source(
    inputs: Sequence[str] = (),
    *,
    source: str | None = None,
    subset: str | None = None,
    root: str | None = None,
    split: str | None = None,
    text_column: str | None = None,
    id_column: str | None = None,
    keep: Sequence[str] | None = None,
    separator: str | None = None,
    where: str | None = None,
    on_invalid: str | None = None,
) -> SourcePlan:
    """Find the inputs and how to read them.

    Args:
        inputs: paths, globs, folders, `s3://` and `hf://` URLs; empty with `source`.
        source: a name of the catalogue, `pylib`, or `hf:ORG/NAME[:CONFIG]`.
        subset, root: for named sources and `pylib`.
        split: for `hf:`; "train" by default.
        text_column: None for the source's own, else "text".
        id_column: None for the source's own, else "id" where there is one; "none" for no ids.
        keep: columns to keep; None for the source's own.
        separator: for text files; see `ReadOptions`.
        where: the condition a record must meet; see `where.py`.
        on_invalid: see `ReadOptions`; None for "skip".

    Raises:
        UsageError: arguments that do not go together, or an unknown name.
        InputError: no such file, or no such column.
        StorageError: remote storage fails.
    """
    if bool(inputs) == bool(source):
        raise UsageError(
            "name either input files or a source" + (", not both" if inputs else ""),
            fix="olm-data tokenize INPUT... or olm-data tokenize --source NAME",
        )
    allowed = {
        "--subset": (subset, source is not None and not source.startswith("hf:")),
        "--root": (root, source is not None and source != "pylib" and not source.startswith("hf:")),
        "--split": (split, source is not None and source.startswith("hf:")),
    }
    for option, (value, fits) in allowed.items():
        if value is not None and not fits:
            raise UsageError(f"{option} has no meaning here", where=f"{option} {value}")
    text, identifier, kept = "text", None, []
    if source is None:
        files, name = list_files(inputs), _name_of(inputs)
    elif source == "pylib":
        subset = subset or pylib.SUBSETS[0]
        files, name = pylib.list_inputs(subset), f"pylib-{subset}"
    elif source.startswith("hf:"):
        dataset = source.removeprefix("hf:").removeprefix("//")
        files = hub.list_inputs(dataset, split or "train")
        name = _fit_name(f"{dataset}-{split or 'train'}")
    else:
        entry = named.find(source)
        subset, files = named.list_inputs(source, subset, root)
        name, text, identifier = _fit_name(f"{source}-{subset}"), entry.text, entry.id
        kept = list(entry.keep)
    policy = on_invalid or "skip"
    if policy not in get_args(OnInvalid):
        raise UsageError(
            f"--on-invalid {policy!r} is no policy", fix=suggest(policy, get_args(OnInvalid))
        )
    options = _options(
        files,
        text_column=text_column or text,
        id_column=id_column,
        own_id=identifier,
        keep=keep,
        own_keep=kept,
        separator=separator,
        where=where,
    )
    return SourcePlan(
        name=name, inputs=tuple(files), options=replace(options, on_invalid=cast(OnInvalid, policy))
    )


def _options(
    files: Sequence[InputFile],
    *,
    text_column: str,
    id_column: str | None,
    own_id: str | None,
    keep: Sequence[str] | None,
    own_keep: Sequence[str],
    separator: str | None,
    where: str | None,
) -> ReadOptions:
    if separator is not None and (not separator or all(f.format != "txt" for f in files)):
        raise UsageError(
            "a separator is for text files and is not empty", where=f"--separator {separator!r}"
        )
    table = next((file for file in files if file.format != "txt"), None)
    if table is None:
        if keep or id_column not in (None, "none") or where is not None:
            raise UsageError(
                "text files have no columns",
                where="--keep, --id-column, --where",
                fix="leave them out",
            )
        return ReadOptions(text_column=text_column, separator=separator)
    condition = None if where is None else parse(where)
    kinds = _kinds(table, text_column, condition)
    if condition is not None:
        for name in columns(condition):
            _require(name, kinds, "--where", table)
        if any(file.format == "txt" for file in files):
            raise UsageError(
                "--where needs columns, and some inputs are text files",
                fix="tokenize the text files without it, into a dataset of their own",
            )
    if id_column is None:
        wanted = own_id or "id"
        id_column = wanted if wanted in kinds else None
    elif id_column == "none":
        id_column = None
    else:
        _require(id_column, kinds, "--id-column", table)
    if keep is None:
        keep = [name for name in own_keep if name in kinds]
    for name in keep:
        _require(name, kinds, "--keep", table)
        if name == text_column:
            raise UsageError("the text itself cannot be kept beside its tokens", where="--keep")
    return ReadOptions(
        text_column=text_column,
        id_column=id_column,
        keep=tuple((name, kinds[name]) for name in dict.fromkeys(keep)),
        separator=separator,
        where=None if condition is None else str(condition),
    )


def _kinds(table: InputFile, text_column: str, condition: Node | None) -> dict[str, str]:
    """Return column -> kept type of an input; JSON fields are kept as strings."""
    options = ReadOptions(text_column=text_column)
    if table.format == "jsonl":
        found = jsonl.check(table, options)
        for leaf in () if condition is None else leaves(condition):
            kinds = found.get(leaf.column, set()) - {None}
            if kinds and wanted_kinds(leaf) and not kinds & wanted_kinds(leaf):
                held = " and ".join(sorted(f"{kind}s" for kind in kinds if kind))
                raise mismatch(leaf, f"{held} at the start of the file", table.path)
        return dict.fromkeys(found, "string")
    module = {"parquet": parquet, "arrow": arrow, "hub": hub}[table.format]
    schema = module.schema(table)
    require_text(schema.names, table, options)
    if condition is not None:
        check_types(condition, schema, table.path)
    return {field.name: kind_of(field.type) for field in schema}


def _require(name: str, kinds: dict[str, str], option: str, table: InputFile) -> None:
    if name not in kinds:
        known = [printable(column) for column in list(kinds)[:40]]
        raise InputError(
            f"there is no column {name!r}",
            where=f"{option} {printable(name)}, {table.path}",
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
