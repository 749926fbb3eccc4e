"""What a mixture draws on: the datasets of its sources, and what of them, opened by a manifest.

Mixture --open_sources--> Dataset of each source
        --open_views----> View of each source with `where` or `exclude_ids`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.view import View
from olm_data.errors import InputError, OlmError, UsageError, printable
from olm_data.mixture.manifest import Mixture, SourceSpec

if TYPE_CHECKING:
    from olm_data.select.selection import IdSet


def open_sources(mixture: Mixture) -> dict[str, Dataset]:
    """Open the dataset of each source of a manifest: source name -> dataset.

    Raises:
        InputError: there is no dataset at a source's `data`; the message has the manifest's line.
    """
    datasets = {}
    for source in mixture.sources:
        try:
            datasets[source.name] = Dataset.open(mixture.location(source))
        except InputError as error:
            line = mixture.where("sources", source.name, "data")
            raise InputError(
                error.what, where=f"{error.where} (from {line})", why=error.why, fix=error.fix
            ) from None
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
        raise _at(error, line, path) from error


def _at(error: OlmError, line: str, path: str) -> OlmError:
    return type(error)(
        f"exclude_ids: {error.what}",
        where=f"{printable(path)} (from {line})",
        why=error.why,
        fix=error.fix,
    )
