"""Where an error comes from that may be one of the parts that a configuration names."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import olm_data
import olm_train

_PACKAGES = {"site-packages", "dist-packages"}
"""Folders of packages, also of those that a user or a system installed."""


def place_outside(error: BaseException) -> str | None:
    """Return `FILE:LINE, in FUNCTION` of the innermost call outside of what is installed.

    Returns:
        None, if all calls are of this package, of installed packages or of Python itself.
    """
    places = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    places += [place for package in (olm_data, olm_train) for place in package.__path__]
    installed = [Path(place).resolve() for place in places]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if not file.is_absolute() or _PACKAGES.intersection(file.parts):
            continue
        if not any(file.resolve().is_relative_to(place) for place in installed):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None
