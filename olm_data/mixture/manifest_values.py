"""Values that keys of a mixture manifest share: exact numbers, names, weights.

    manifest.yaml --strict_yaml--> Document --values_of--> Values --config.convert.parse--> keys

Numbers are integers and fractions, never text; null stands for nothing. Never: know what a key
means (manifest.py, stage_spec.py).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any

from msgspec import Meta

from olm_data.config.convert import parse
from olm_data.config.hints import Reader
from olm_data.config.strict_yaml import Document
from olm_data.config.values import Values
from olm_data.counts import MAX_SEQUENCE_LENGTH
from olm_data.errors import UsageError, quoted

SequenceLength = Annotated[int, Meta(ge=1, le=MAX_SEQUENCE_LENGTH)]
Weights = Annotated[dict[str, Annotated[Fraction, Meta(ge=0)]], Meta(min_length=1)]
"""A share of each source or group, of any sum."""
Epochs = Annotated[dict[str, Annotated[Fraction, Meta(gt=0)]], Meta(min_length=1)]
"""How often the rows of each source are drawn."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def name_of(kind: str) -> Reader:
    """Return the annotation of the name of a source, stage or group (`kind`)."""

    def read(name: Any) -> str:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                f"{quoted(name)} is not a {kind} name",
                fix="use up to 64 letters, digits, `.`, `_` and `-`, a letter or digit first",
            )
        return name

    return Reader(read, f"a {kind} name", {"type": "string", "pattern": f"^{_NAME.pattern}$"})


def values_of(document: Document, folder: str = ".") -> Values:
    """Return the values of a parsed file, which is a mixture of ours or of another project."""
    return Values(
        document.value,
        file=document.path,
        folder=folder,
        lines=document.lines,
        numbers="exact",
        digits_only=True,
    )


def weights_of(values: Values) -> dict[str, Fraction]:
    """Return the numbers by name."""
    found: dict[str, Fraction] = parse(Weights, values)
    return found
