"""A stranger's tokenizer.json, tried in a child process before it is loaded in this one.

    bytes -> probed before (user's cache)?                                -> nothing to do
          -> child, with limits, loads it and encodes and decodes hard texts -> fine, or refused

The library loads and encodes in compiled code that nothing can interrupt: a pattern that backtracks
for ever, or rules that multiply text, would take this process with them. A probe is no proof: a
file may still fail on a text that the probe does not have, which is caught where it is encoded.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from olm_data.errors import InputError, printable
from olm_data.tokenizer.definition import Definition
from olm_data.user_cache import read_private, write_private

PROBE = 1
"""Of what the child does: a change makes old results void."""

MOST_BYTES = 256 << 20
CPU_SECONDS = 4
WALL_SECONDS = 60  # for where other work leaves the child little of the processor
MEMORY_BASE, MEMORY_FACTOR = 1 << 30, 40  # bytes of address space: as such, and a byte of the file
CHILD = Path(__file__).with_name("probe_child.py")
REFUSED = 3

_GOOD = b"good\n"


def probe(data: bytes, name: str) -> None:
    """Refuse a tokenizer file that a child process cannot load and use within its limits.

    Args:
        data: the `tokenizer.json`.
        name: what to call it in messages.

    Raises:
        InputError: it is too large, its rules multiply text, or the child failed.
    """
    if len(data) > MOST_BYTES:
        raise InputError(
            f"the tokenizer file has {len(data):,} bytes, more than {MOST_BYTES:,}", where=name
        )
    from importlib.metadata import version  # half of this module's import

    key = f"{PROBE} {version('tokenizers')} {sha256(data).hexdigest()}"
    place = f"tokenizers/{sha256(key.encode()).hexdigest()}"
    if read_private(place, len(_GOOD)) == _GOOD:
        return
    Definition(data, name)
    why = _failure(data)
    if why:
        raise InputError(
            "the tokenizer file is not safe to use",
            where=name,
            why=why,
            fix="take a tokenizer.json from a source you trust",
        )
    write_private(place, _GOOD)


def _failure(data: bytes) -> str:
    """Try the file in a child; return why that failed, or ""."""
    found = find_spec("tokenizers")
    assert found is not None
    assert found.origin is not None
    memory = MEMORY_BASE + MEMORY_FACTOR * len(data)
    arguments = [str(CPU_SECONDS), str(memory), str(Path(found.origin).parents[1])]
    try:
        child = subprocess.run(
            [sys.executable, "-I", str(CHILD), *arguments],
            input=data,
            capture_output=True,
            env={"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            timeout=WALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"a trial of it was not done after {WALL_SECONDS} seconds"
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"a trial took more than {CPU_SECONDS} seconds to load it and encode short texts"
    if child.returncode == REFUSED:
        return printable(child.stdout.decode(errors="replace").strip()[:300])
    if child.returncode:
        return f"a trial failed, or needed more than {memory >> 20:,} MiB of memory"
    return ""
