"""Ways in which a file of the product can be false, and digests made good as a stranger would.

change(place, name, choose) -> another file, kind of file or value -> make_good -> true digests
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fuzz.mutate import mutated
from support.seal import seal

from olm_data.bounded_json import digest, sha256_file

ODD: list[Callable[[random.Random], Any]] = [
    lambda r: r.choice([-1, 0, 1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]),
    lambda r: r.choice([1e308, -1e308, 0.5, 1e-320, 5e18]),
    lambda r: r.choice(["", "a", "../../x", "/etc/passwd", "s3://b/k", "\ud800", "$x_{1$", "%s"]),
    lambda r: r.choice(["\x1b[2J\x07", "\u202e\u2066abc", "a\nerror: b", "\x9b31m", "\u2028"]),
    lambda r: r.choice([None, True, False, [], {}, [[]], [None], {"": None}, {"$float": "x"}]),
    lambda r: "9" * r.choice([5, 4400]) if r.random() < 0.5 else "x" * 1_000_000,
    lambda r: [0] * 100_000,
]
RAW = ["NaN", "Infinity", "1e999", "[" * 5000 + "]" * 5000, '{"a":' * 900 + "1" + "}" * 900]
RAW += ["9" * 5000, "1e-99999", '"\\ud800"', "-0", "0.0"]


class Payload:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def change(place: Path, name: str, choose: random.Random) -> str:
    """Change a file in one of many ways; return which."""
    path = place / name
    data = path.read_bytes()
    if path.suffix in (".json", ".jsonl") and choose.random() < 0.6:
        return _change_json(path, choose)
    kind = choose.randrange(13)
    path.unlink()
    if kind == 0:
        path.write_bytes(b"")
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        path.symlink_to("/dev/zero")
    elif kind == 4:
        path.write_bytes(pickle.dumps(Payload(place / "canary")))
    elif kind == 5:
        saved = io.BytesIO()
        torch.save(Payload(place / "canary"), saved)
        path.write_bytes(saved.getvalue())
    elif kind == 6:
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    elif kind == 7:
        path.write_bytes(b"[" * 3_000_000)
    elif kind == 8:
        path.write_bytes(data[: choose.randrange(len(data) + 1)])
    elif kind == 9:
        path.write_bytes(b"\xff\xfe" + data)
    elif kind == 10:
        path.write_bytes(data + data)
    else:
        number = choose.randrange(1 << 30)
        path.write_bytes(mutated(data, number))
        return f"mutation {number}"
    return f"kind {kind}"


def _change_json(path: Path, choose: random.Random) -> str:
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    at = choose.randrange(len(lines))
    value = json.loads(lines[at])
    nodes = list(_nodes(value))
    holder, key = choose.choice(nodes)
    before = holder[key]
    mark = "@@RAW@@"
    raw = None
    way = choose.randrange(5)
    if way == 0:
        raw = choose.choice(RAW)
        holder[key] = mark
    elif way == 1 and isinstance(holder, dict):
        del holder[key]
    elif way == 2 and isinstance(holder, dict):
        holder[choose.choice(["\x1b[31mx", "a/../b", "x" * 3000, "", "\u202ex"])] = before
    elif way == 3 and isinstance(before, (int, float)) and not isinstance(before, bool):
        holder[key] = choose.choice([before + 1, before - 1, -before, before * 2, float(before)])
    else:
        holder[key] = choose.choice(ODD)(choose)
    indent = 1 if text.startswith("{\n") else None
    separators = None if indent or '": ' in text[:200] else (",", ":")
    out = json.dumps(value, indent=indent, separators=separators)
    if raw is not None:
        out = out.replace(f'"{mark}"', raw)
    lines[at] = out
    path.write_text("\n".join(lines) + ("\n" if text.endswith("\n") else ""))
    shown = (
        raw if raw is not None else repr(holder.get(key) if isinstance(holder, dict) else "item")
    )
    return f"json way {way} {key!r}: {str(before)[:60]} -> {shown[:60]}"


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(items):
        yield value, key
        if isinstance(child, (dict, list)):
            yield from _nodes(child)


def make_good(place: Path, name: str) -> None:
    """Make the digests true that lie above a changed file, as whoever changed it would."""
    path = place / name
    with suppress(ValueError, KeyError, OSError, TypeError, AttributeError, RecursionError):
        if not path.is_file() or path.is_symlink() or path.stat().st_size > 1 << 27:
            return
        if path.name in ("manifest.json",) and "step" not in name:
            _digest(path, ("digest", "tools"))
        elif path.name.endswith("lock.json") and "step" not in name:
            from olm_data.mixture.lock import UNDIGESTED

            _digest(path, UNDIGESTED)
        elif "/step" in name:
            seal(place / "/".join(name.split("/")[:2]), listed=path.name != "manifest.json")
        elif name.startswith("exported/") and path.name != "config.json":
            about = json.loads((path.parent / "config.json").read_text())
            for entry in (about["weights"], *about["carried"]):
                if entry["file"] == path.name:
                    entry |= {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            (path.parent / "config.json").write_text(json.dumps(about, indent=1) + "\n")
        elif name.startswith("prose/shard"):
            _reseal_shard(path)


def _digest(path: Path, left_out: tuple[str, ...]) -> None:
    value = json.loads(path.read_bytes())
    body = {key: item for key, item in value.items() if key not in left_out}
    path.write_text(json.dumps(value | {"digest": digest(body)}))


def _reseal_shard(path: Path) -> None:
    """Record and manifest of a dataset say what a changed shard file is."""
    kind = path.name.split(".")[1]
    manifest = path.parent / "manifest.json"
    text = manifest.read_text()
    value = json.loads(text)
    shard = value["shards"][0]
    if kind != "json":
        record = path.parent / "shard-00000.json"
        before = shard["sha256"][kind]
        record.write_text(record.read_text().replace(before, sha256_file(path)))
        shard["sha256"][kind] = sha256_file(path)
        shard["sha256"]["record"] = sha256_file(record)
    else:
        shard["sha256"]["record"] = sha256_file(path)
    body = {key: item for key, item in value.items() if key not in ("digest", "tools")}
    manifest.write_text(json.dumps(value | {"digest": digest(body)}))
