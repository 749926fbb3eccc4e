"""The options in a manifest: free in what they say of sources, checked where they are used.

manifest.options --option_fault--> None | what is wrong with them
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from olm_data.storage.names import is_column_name

_SHARE = re.compile(r"[0-9]{1,18}(?:/[0-9]{1,18})?")


def option_fault(options: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the options of a manifest, None where they can be used."""
    holdout = options.get("holdout", "0")
    if not isinstance(holdout, str) or not _SHARE.fullmatch(holdout) or holdout.endswith("/0"):
        return "`holdout` is not a share"
    if options.get("split", "train") not in ("train", "validation"):
        return "`split` is neither train nor validation"
    kept = options.get("keep", [])
    if not isinstance(kept, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
        for pair in kept
    ):
        return "`keep` is not a list of columns and types"
    named = [options.get("text_column"), options.get("id_column"), *(name for name, _ in kept)]
    for name in named:
        if name is not None and not (isinstance(name, str) and is_column_name(name)):
            return "a column has a name with control characters, or one that is too long"
    return None
