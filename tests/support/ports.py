"""Free ports of loopback, for programs that are told where to listen and take a while to do so.

A port that the system chose may have another owner by then: it hands out the same ones to every
connection and server of this machine. So these lie outside of that range (32768 and up on Linux).
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterable

_ANY = random.SystemRandom()  # the other generator may be seeded alike in several processes


def free_port() -> int:
    """Return a port that nothing listens at."""
    return _free(range(26_600, 32_700), lambda port: [port])


def free_block(size: int) -> int:
    """Return a port P such that P to P + size - 1 and the same + 10,000 are free."""
    offsets = [n + more for n in range(size) for more in (0, 10_000)]
    return _free(range(11_000, 16_500), lambda base: [base + n for n in offsets])


def _free(bases: range, ports: Callable[[int], Iterable[int]]) -> int:
    for _ in range(1000):
        base = _ANY.choice(bases)
        with contextlib.ExitStack() as stack:
            try:
                for port in ports(base):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise RuntimeError("no free ports on loopback")
