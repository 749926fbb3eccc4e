"""Files that the W&B client writes without a server: how far they go, and how to shorten them.

    run-ID.wandb: 7 bytes, then blocks of 32 KiB with records in pieces (the log format of LevelDB)
        piece: CRC-32C, length (2 bytes), kind: 1 whole, 2 first, 3 middle, 4 last; then its bytes
        record: protobuf `Record`; a `history` record is a step

A start makes a file of its own, in a folder named for its time. Never: a file still being written.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from olm_data.regular_files import open_regular

HEADER, BLOCK, PIECE = 7, 32768, struct.Struct("<IHB")
WHOLE, LAST = 1, 4
LAST_RECORDS = 64
"""Of a file, among which its last step is looked for first: what ends a run comes after it."""


def files_of(folder: Path, key: str) -> list[Path]:
    """Return the files of the earlier starts of a run, oldest first."""
    return sorted(folder.glob(f"wandb/offline-run-*-{key}/run-{key}.wandb"))


def keep_until(files: list[Path], step: int) -> int:
    """Cut off the history beyond `step`, and what follows a damaged record.

    Returns:
        The last step that the files then have.
    """
    for path in reversed(files):
        last = 0
        for place, found in list(history(path)):
            if found is None or found > step:
                os.truncate(path, place)
                break
            last = found
        if last:
            return last
    return 0


def last_step(path: Path) -> int:
    """Return the last step that a file has, 0 for none; its last records are looked at first."""
    from google.protobuf.message import DecodeError

    with suppress(DecodeError):
        for _, data in reversed(deque(_records(path), maxlen=LAST_RECORDS)):
            if (step := _step_of(data)) is not None:
                return step
    return max((step for _, step in history(path) if step is not None), default=0)


def history(path: Path) -> Iterator[tuple[int, int | None]]:
    """Yield where each record of a step begins in a file, and the step; None: it is damaged.

    What follows a damaged record is not looked at.
    """
    from google.protobuf.message import DecodeError

    for place, data in _records(path):
        try:
            step = _step_of(data)
        except DecodeError:
            yield place, None
            return
        if step is not None:
            yield place, step


def _step_of(data: bytes) -> int | None:
    """Return the step that a record is the history of; None: it is another one."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    record = Record()
    record.ParseFromString(data)
    kind = record.WhichOneof("record_type")
    return int(record.history.step.num) if kind == "history" else None


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the place and the bytes of each whole record; one that is cut off ends the file."""
    with open_regular(path) as file:
        place = file.seek(HEADER)
        begin, data = place, b""
        while True:
            if (left := BLOCK - place % BLOCK) < PIECE.size:
                place = file.seek(place + left)
            head = file.read(PIECE.size)
            if len(head) < PIECE.size:
                return
            _, size, kind = PIECE.unpack(head)
            piece = file.read(size)
            if len(piece) < size or not kind:
                return
            data += piece
            place += PIECE.size + size
            if kind in (WHOLE, LAST):
                yield begin, data
                begin, data = place, b""
