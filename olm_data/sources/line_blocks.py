"""Files of lines, in blocks of whole lines: bounded memory, and no line is cut.

    byte range of a plain file       -> plain_blocks  -> (block, byte offset), ...
    whole file, plain or compressed  -> stream_blocks -> (block, number of its first line), ...

The lines that begin in a range are its lines, so ranges need not know where lines begin. A block is
given up as soon as it is handed on: it may be one very long line.
"""

from __future__ import annotations

from collections.abc import Iterator

from olm_data.dataset.inputs import InputFile
from olm_data.decompress import ByteStream
from olm_data.sources.files import open_binary, open_stream, reading
from olm_data.sources.limits import check_record

CHUNK = 4 << 20
_BOM = b"\xef\xbb\xbf"


def plain_blocks(input: InputFile, start: int, stop: int) -> Iterator[tuple[bytes, int]]:
    """Yield (whole lines, byte offset of the first) of the lines that begin in [start, stop).

    Raises:
        InputError: the file cannot be read, or a line is longer than any can be.
        StorageError: remote storage fails.
    """
    with open_binary(input) as file, reading(input, file):
        if start:
            # The line that holds byte start - 1 belongs to the range before, up to its line break.
            file.seek(start - 1)
            while chunk := file.read(CHUNK):
                cut = chunk.find(b"\n")
                if cut >= 0:
                    start = start - 1 + cut + 1
                    break
                start += len(chunk)
            else:
                return
        if start >= stop:
            return
        file.seek(start)
        yield from _blocks(file, input, start, stop)


def stream_blocks(input: InputFile) -> Iterator[tuple[bytes, int]]:
    """Yield (whole lines, number of the first) of a file, decompressed.

    Raises as `plain_blocks`.
    """
    line = 0
    with open_stream(input) as stream:
        for block, _ in _blocks(stream, input, 0, 1 << 62):
            held, lines = [block], block.count(b"\n")
            del block
            yield held.pop(), line
            line += lines


def _blocks(
    file: ByteStream, input: InputFile, start: int, stop: int
) -> Iterator[tuple[bytes, int]]:
    """Yield blocks of whole lines from `start` to the end of the line that holds byte stop - 1."""
    pending: list[bytes | memoryview] = []
    place = at = start
    while at < stop:
        check_record(at - place, input, place)
        chunk = file.read(min(_chunk(at - place), stop - at))
        if not chunk:
            break
        if at == 0:
            chunk = _without_bom(chunk)
        at += len(chunk)
        cut = chunk.rfind(b"\n") + 1
        if cut:
            parts, pending = [*pending, memoryview(chunk)[:cut]], [chunk[cut:]]
            size = sum(map(len, parts))
            del chunk  # nothing is kept while the block is worked on: it may be a very long line
            yield _joined(parts), place
            place += size
        else:
            pending.append(chunk)
    # The last line goes on past `stop`, up to its line break or the end of the file.
    while any(pending):
        check_record(at - place, input, place)
        chunk = file.read(_chunk(at - place))
        cut = chunk.find(b"\n") + 1
        pending.append(chunk[:cut] if cut else chunk)
        at += len(chunk)
        if cut or not chunk:
            del chunk
            yield _joined(pending), place
            return


def _joined(parts: list[bytes | memoryview]) -> bytes:
    """Join byte strings and forget them."""
    whole = b"".join(parts)
    parts.clear()
    return whole


def _chunk(line_so_far: int) -> int:
    """Bytes to read next: a batch's worth, and more in a very long line so joining stays linear."""
    return max(CHUNK, line_so_far)


def _without_bom(chunk: bytes) -> bytes:
    """Blank out a byte order mark at the start of a file, so that offsets stay true."""
    return b"   " + chunk[3:] if chunk.startswith(_BOM) else chunk
