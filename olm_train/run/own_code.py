"""Which errors come from code of one's own: parts that a configuration names by import path."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import olm_data
import olm_train


def place_in_own_code(error: BaseException) -> str | None:
    """Return `FILE:LINE, in FUNCTION` of the innermost call outside of what is installed.

    Returns:
        None, if all calls are of this package, of installed packages or of Python itself.
    """
    installed = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    installed |= {place for package in (olm_data, olm_train) for place in package.__path__}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_absolute() and not any(file.is_relative_to(place) for place in installed):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None
