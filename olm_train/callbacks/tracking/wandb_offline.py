"""Files that the W&B client writes without a server: how far they go, and how to shorten them.

    run-ID.wandb: 7 bytes, then blocks of 32 KiB with records in pieces (the log format of LevelDB)
        piece: CRC-32C, length (2 bytes), kind: 1 whole, 2 first, 3 middle, 4 last; then its bytes
        record: protobuf `Record`; a `history` record is a step

A start makes a file of its own, in a folder named for its time. Never: a file still being written.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from olm_data.regular_files import open_regular

HEADER, BLOCK, PIECE = 7, 32768, struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def files_of(folder: Path, key: str) -> list[Path]:
    """Return the files of the earlier starts of a run, oldest first."""
    return sorted(folder.glob(f"wandb/offline-run-*-{key}/run-{key}.wandb"))


def keep_until(files: list[Path], step: int) -> int:
    """Cut off the history beyond `step`; return the last step that the files then have."""
    for path in reversed(files):
        last = 0
        for place, found in list(history(path)):
            if found > step:
                os.truncate(path, place)
                break
            last = found
        if last:
            return last
    return 0


def history(path: Path) -> Iterator[tuple[int, int]]:
    """Yield where each record of a step begins in a file, and the step."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for place, data in _records(path):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            yield place, record.history.step.num


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
