"""Where text comes from: files of every format, local or remote, hub datasets, the Python library.

    SourceRequest --resolve_source--> SourcePlan
    plan_units(index, input, options, target_bytes) -> [Unit]
    read_units(inputs, units, options)              -> DocumentBatch, ...
    current_revision(input)                         -> compare with input.revision: has it changed?

Nothing outside this package knows formats.
"""

from __future__ import annotations

from olm_data.dataset.inputs import SourceRequest
from olm_data.sources.base import DocumentBatch, Drop, SourcePlan
from olm_data.sources.files import current_revision
from olm_data.sources.readers import plan_units, read_units
from olm_data.sources.resolve import resolve_source

__all__ = [
    "DocumentBatch",
    "Drop",
    "SourcePlan",
    "SourceRequest",
    "current_revision",
    "plan_units",
    "read_units",
    "resolve_source",
]
