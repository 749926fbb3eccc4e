"""What options of tokenising may be: the words that plans, manifests and recipes share."""

from __future__ import annotations

from typing import Literal

Container = Literal["npy", "raw"]
OnInvalid = Literal["skip", "replace", "error"]
OnUnknown = Literal["keep", "drop"]
SpecialPolicy = Literal["plain", "allow", "error"]
