"""Types are first looked at by one thread at a time."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
import threading

import msgspec
import pytest
from support import sources
from support.command import WITH_TESTS, environment

from olm_data import decoding
from olm_data.decoding import convert, decode_typed

RACE = textwrap.dedent("""
    import sys, threading
    import msgspec
    from olm_data.decoding import convert, decode_typed, decoder

    USES = {
        "decode_typed": lambda kind: decode_typed(b'{"a":1,"b":{"c":[2]}}', kind).b.c,
        "convert": lambda kind: convert({"a": 1, "b": {"c": [2]}}, kind).b.c,
        "decoder": lambda kind: decoder(kind).decode(b'{"a":1,"b":{"c":[2]}}').b.c,
    }
    sys.setswitchinterval(1e-6)
    use, wrong = USES[sys.argv[1]], []
    for _ in range(120):
        inner = msgspec.defstruct("Inner", [("c", list[int])])
        kind = msgspec.defstruct("Outer", [("a", int), ("b", inner)])
        begin = threading.Barrier(8)

        def look():
            begin.wait()
            try:
                wrong.extend(["differs"] * (use(kind) != [2]))
            except BaseException as error:
                wrong.append(repr(error))

        threads = [threading.Thread(target=look) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    sys.exit("; ".join(sorted(set(wrong))) or 0)
""")


@pytest.mark.parametrize("use", ["decode_typed", "convert", "decoder"])
def test_threads_that_decode_a_type_for_the_first_time_do_not_crash(use: str) -> None:
    """Without the lock, about every second such process ends with SIGSEGV or reads wrong values."""
    done = subprocess.run(
        [sys.executable, "-c", RACE, use],
        env=environment(WITH_TESTS),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_forked_in_the_middle_of_a_look_can_decode() -> None:
    kind = msgspec.defstruct("Forked", [("a", int)])
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with decoding._lock.held():
            held.set()
            free.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(decode_typed(b'{"a":7}', kind).a)
    free.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_attributes_and_constraints_are_converted_as_msgspec_does() -> None:
    class Given:
        a = 3

    kind = msgspec.defstruct("Kind", [("a", int)])
    assert convert(Given(), kind, from_attributes=True) == kind(3)
    with pytest.raises(msgspec.ValidationError):
        decode_typed(b'{"a": "3"}', kind)


@sources.together
def test_nobody_else_calls_msgspec_with_a_type() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path in sources.modules()
        if path.name != "decoding.py"
        for node in ast.walk(sources.tree(path))
        if isinstance(node, ast.Call)
        and (
            ast.unparse(node.func) in ("msgspec.convert", "msgspec.json.Decoder")
            or (
                ast.unparse(node.func) == "msgspec.json.decode"
                and (len(node.args) > 1 or node.keywords)
            )
        )
    ]
    assert not found, "decode by olm_data.decoding"
