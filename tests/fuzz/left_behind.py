"""Targets for what runs and other projects leave: heartbeats, run logs, token files' indices.

Each writes the bytes where their reader looks, and reads. Only an `OlmError` may come of it.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from olm_data.errors import OlmError
from olm_data.extensions.importing.borders import HEAD, MAGIC, read_borders
from olm_data.extensions.importing.token_files import TokenFile
from olm_data.extensions.report.run_view import RunView
from olm_data.run_log.log import RunLog
from olm_data.run_log.run_folder import Run
from olm_data.runners.base import Count
from olm_data.runners.heartbeat import read_beats
from olm_data.select.selection import IdSet
from olm_data.storage.store import Store

TOKENS = np.arange(1, 21, dtype=np.uint16)


def heartbeat_seed() -> bytes:
    """Return a heartbeat as a worker writes it."""
    counts = [3] * len(Count)
    parts = {"kind": "InputError", "what": "x", "where": None, "why": "y", "fix": None}
    return json.dumps(
        {
            "format": "olm-heartbeat", "version": 1, "host": "h", "pid": 7, "started": 1.5,
            "time": 2.5, "state": "failed", "done": "0-3,5", "running": {"4": counts},
            "counts": counts, "error": parts,
        }
    ).encode()  # fmt: skip


METRICS = (
    b'{"step": 1, "tokens": 64, "rows": [0, 4], "train/CE loss": 2.5, "time": 1.0}\n'
    b'{"step": 2, "tokens": 128, "rows": [4, 8], "skipped": [[4, 5]], "train/CE loss": null}\n'
    b'{"step": 2, "eval": {"web": {"CE loss": 2.25}}, "time": 3.0}\n'
)
STARTS = (
    b'{"step":0,"rewound":0,"lock":"' + b"0" * 64 + b'","global_batch_size":64,"world_size":1,'
    b'"skip":[[4,5]],"batch_size_changes":[[2,64]]}\n'
)
CONFIG = b'{"data_loader": {"global_batch_size": 64, "skip": [[4, 5]]}, "train_module": {}}'


def megatron_seed() -> bytes:
    """Return a Megatron index of two documents over `TOKENS`."""
    sequences = np.array([8, 12], "<i4"), np.array([0, 16], "<i8"), np.array([0, 1, 2], "<i8")
    head = MAGIC + struct.pack("<QBQQ", 1, 8, 2, 3)
    assert len(head) == HEAD.size
    return head + b"".join(part.tobytes() for part in sequences)


def targets(folder: Path) -> dict[str, tuple[Callable[[bytes], None], list[bytes]]]:
    """Return name -> (run, seeds)."""
    for name in ("beats/run", "log", "tokens"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    log, tokens = folder / "log", folder / "tokens"

    def heartbeat(data: bytes) -> None:
        (folder / "beats/run/w.json").write_bytes(data)
        for beat in read_beats(Store(folder / "beats")):
            assert len(beat.counts) == len(Count)
            assert beat.age(0.0) >= 0

    def run_log(name: str) -> Callable[[bytes], None]:
        def run(data: bytes) -> None:
            for other, honest in (
                ("metrics.jsonl", METRICS), ("starts.jsonl", STARTS), ("config.json", CONFIG),
            ):  # fmt: skip
                (log / other).write_bytes(data if other == name else honest)
            with suppress(OlmError):
                RunLog.read(log)
            with suppress(OlmError):
                Run.read(str(log)).skip()
            with suppress(OlmError):
                RunView(log, "run").update()

        return run

    def borders(kind: str, suffix: str, beside: str) -> Callable[[bytes], None]:
        def run(data: bytes) -> None:
            (tokens / f"a{suffix}").write_bytes(TOKENS.tobytes())
            (tokens / beside).write_bytes(data)
            file = TokenFile(Store(tokens), f"a{suffix}", kind, TOKENS.nbytes)
            with suppress(OlmError):
                found = read_borders(file, TOKENS.dtype, 1)
                assert int(found.ends[-1]) == len(TOKENS)

        return run

    def ids(data: bytes) -> None:
        with suppress(ValueError):  # what callers expect
            IdSet.from_npy(data)

    rows = b"0,8,a,src,1\n8,20,b,src,2\n"
    packed = [gzip.compress(text, mtime=0) for text in (rows, b"0,8\n8,20\n", b"0,\n", b"0,20")]
    return {
        "heartbeat": (heartbeat, [heartbeat_seed()]),
        "metrics": (run_log("metrics.jsonl"), [METRICS]),
        "starts": (run_log("starts.jsonl"), [STARTS]),
        "run config": (run_log("config.json"), [CONFIG]),
        "csv.gz": (borders("olmo-core", ".npy", "a.csv.gz"), packed),
        "csv": (lambda data: borders("olmo-core", ".npy", "a.csv.gz")(gzip.compress(data)), [rows]),
        "datatrove": (
            borders("datatrove", ".ds", "a.ds.index"),
            [np.array([8, 20], "<u8").tobytes()],
        ),
        "megatron": (borders("megatron", ".bin", "a.idx"), [megatron_seed()]),
        "ids": (ids, [IdSet.of([bytes(range(32))]).to_npy()]),
    }
