"""Imported by the fork server alone: it ends at once when its parent does.

Without it the server takes the interpreter apart, and whoever reads the command's output to its end
waits 0.15 s for that. Workers are not concerned: they never run the exit functions of the server.
"""

from __future__ import annotations

import atexit
import os

atexit.register(os._exit, 0)
