"""What one attempt at each request must do, whichever store it goes to."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest

from olm_data.storage.objects import Upload
from olm_data.storage.service import Condition, FileSlice, Refusal, Service


def check_service(service: Service, bucket: str, folder: Path) -> None:
    """Write, read, list and delete objects of a bucket; conditions hold or are refused."""
    prefix = f"checked-{uuid.uuid4().hex}/"
    key = prefix + "a b\u00e9.bin"
    create = Condition(replaces="", writer="me")
    assert service.put(bucket, key, b"0123456789", create)
    with pytest.raises((Refusal, FileExistsError)) as refused:
        service.put(bucket, key, b"another", create)
    assert getattr(refused.value, "status", 412) in (409, 412)
    found = service.head(bucket, key)
    assert (found.key, found.size) == (key, 10)
    assert service.writer(bucket, key) == "me"
    got = service.get(bucket, key, 2, 5, found.etag)
    assert (got.data, got.etag, got.size) == (b"234", found.etag, 10)
    service.put(bucket, key, b"new", Condition(replaces=found.etag, writer="you"))
    with pytest.raises(Refusal) as late:
        service.put(bucket, key, b"x", Condition(replaces=found.etag, writer="me"))
    assert late.value.status == 412
    with pytest.raises(Refusal) as other:
        service.get(bucket, key, 0, 3, found.etag)
    assert other.value.status in (304, 412)
    path = folder / "file"
    path.write_bytes(bytes(range(256)) * 100)
    service.put_file(bucket, prefix + "file", path)
    assert service.get(bucket, prefix + "file", 0, 25_600, "").data == path.read_bytes()
    if service.parts_at_a_time > 1:  # in any order
        check_parts(service, bucket, prefix, path)
    objects, more = service.page(bucket, prefix, None)
    assert not more
    assert {item.key for item in objects} >= {key, prefix + "file"}
    with pytest.raises(Refusal) as kept:
        service.delete(bucket, key, found.etag)
    assert kept.value.status == 412
    service.delete(bucket, key, service.head(bucket, key).etag)
    for item in objects:
        if item.key != key:
            service.delete(bucket, item.key, "")
    with pytest.raises(FileNotFoundError):
        service.head(bucket, key)
    assert abs(service.now(bucket).timestamp() - found.modified.timestamp()) < 3600


def check_parts(service: Service, bucket: str, prefix: str, path: Path) -> None:
    """Send a file in parts: nothing is there before the end, and a part may be sent again."""
    key, half = prefix + "parts", 5 << 20
    path.write_bytes(b"x" * half + b"the end")
    upload = Upload(key, service.begin(bucket, key, path), datetime.now(UTC))
    told = []
    for number, (start, stop) in enumerate([(0, half), (0, half), (half, half + 7)]):
        with open(path, "rb") as file:
            part = service.send(
                upload, bucket, max(number, 1), FileSlice(file.fileno(), start, stop)
            )
        told = [*told[: max(number, 1) - 1], part.told]
    with pytest.raises(FileNotFoundError):
        service.head(bucket, key)
    service.complete(upload, bucket, told)
    assert service.head(bucket, key).size == half + 7
    assert service.get(bucket, key, half, half + 7, "").data == b"the end"
