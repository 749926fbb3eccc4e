"""The views that a manifest asks for: `where` and `exclude_ids` of its sources.

Mixture --open_views--> View, one for each source that has one
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from olm_data.dataset.view import View
from olm_data.errors import InputError, OlmError, UsageError, printable
from olm_data.mixture.manifest import Mixture, SourceSpec

if TYPE_CHECKING:
    from olm_data.select.selection import IdSet


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
    from olm_data.sources.selected import read_ids  # loads pyarrow

    path = mixture.resolve(spec.exclude_ids)
    try:
        return read_ids(path)
    except (InputError, UsageError) as error:
        raise _at(error, line, path) from error


def _at(error: OlmError, line: str, path: str) -> OlmError:
    return type(error)(
        f"exclude_ids: {error.what}",
        where=f"{printable(path)} (from {line})",
        why=error.why,
        fix=error.fix,
    )
