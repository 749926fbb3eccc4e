"""How a command ends that fails: a message, an exit code, and a traceback only with --debug."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from olm_data.errors import OlmError, shown
from olm_data.extras import missing_extra
from olm_data.sinks import print_traceback


@contextmanager
def reported(*, debug: bool) -> Iterator[None]:
    """Turn an error of the body that a user can act on into a message and an exit code."""
    try:
        yield
    except (OlmError, ImportError) as error:
        known = missing_extra(error) if isinstance(error, ImportError) else error
        if not isinstance(known, OlmError):
            raise
        if debug:
            print_traceback(type(error), error, error.__traceback__)
        else:
            print(f"error: {shown(str(known))}", file=sys.stderr, flush=True)
        raise SystemExit(known.exit_code) from None
