"""JSON is read within bounds: depth, digits, control bytes, keys that stand once; by any thread."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import sources
from support.command import WITH_TESTS, environment
from support.deep_json import DEEP

from olm_data import bounded_json, decoding
from olm_data.bounded_json import MAX_DEPTH, MalformedJson, check, decode
from olm_data.decoding import convert, decode_typed
from olm_data.storage.store import Store, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2**64 - 1) | st.text(max_size=8) | st.floats(-9, 9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)


@given(value=VALUES, piece=st.integers(1, 40), small=st.sampled_from([0, 1 << 16]))
def test_what_json_writes_is_read_back_however_it_is_cut(
    value: object, piece: int, small: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_json, "PIECE", piece)
        patch.setattr(bounded_json, "_SMALL", small)
        for ascii in (True, False):
            assert decode(json.dumps(value, ensure_ascii=ascii).encode()) == value


@pytest.mark.parametrize("name", DEEP)
def test_malformed_json_is_one_error(name: str) -> None:
    with pytest.raises(MalformedJson):
        decode(DEEP[name])


@pytest.mark.parametrize("piece", [1, 7, MAX_DEPTH, bounded_json.PIECE])
def test_depth_is_bounded_at_the_limit_and_not_before(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_json, "PIECE", piece)
    decode(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(MalformedJson, match="levels of nesting"):
        decode(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_value_or_malformed(data: bytes) -> None:
    with contextlib.suppress(MalformedJson):
        decode(data)


def test_a_large_file_of_brackets_is_refused_at_the_cost_of_a_piece(tmp_path: Path) -> None:
    with open(tmp_path / "x.json", "wb") as file:
        file.write(b"[" * (16 << 20))
    with open(tmp_path / "z.json", "wb") as file:
        file.truncate(200 << 20)
    for name in ("x.json", "z.json"):
        tracemalloc.start()
        with pytest.raises(MalformedJson):
            check([read_json(Store(tmp_path), name)])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 50 << 20


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
