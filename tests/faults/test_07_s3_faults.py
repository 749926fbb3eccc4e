"""FAULTS row 7: any request to S3 may fail in any way; it is tried again, or named with exit 6."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from support.store_proxy import (
    Fault,
    Proxy,
    answer,
    cut_request,
    cut_response,
    lost_answer,
    reset,
)
from support.tokenizing import digests, make_dataset, texts, write_jsonl

from olm_data.errors import ConflictError, StorageError
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.store import Store

SLOW_DOWN, INTERNAL = answer(503, "SlowDown"), answer(500, "InternalError")
TOO_MANY = answer(429, "TooManyRequests")
ALL = [reset, SLOW_DOWN, lost_answer, INTERNAL, cut_request, cut_response, TOO_MANY, lost_answer]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("in") / "a.jsonl", texts(40))


@pytest.fixture(scope="module")
def expected(
    source: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Digests of the undisturbed dataset."""
    folder = tmp_path_factory.mktemp("expected") / "out"
    make_dataset([source], tiny_tokenizer, folder)
    return _told_apart(digests(folder))


def _told_apart(found: dict[str, str]) -> dict[str, str]:
    """Leave out the two undigested files that tell where the input lies and when it changed."""
    return {name: sha for name, sha in found.items() if name not in ("plan.json", "job.json")}


def objects(store: Store) -> dict[str, str]:
    return {
        entry.name: hashlib.sha256(store.read(entry.name)).hexdigest() for entry in store.entries()
    }


@pytest.mark.slow
def test_07_a_run_is_identical_whichever_request_fails_in_all_ways_in_turn(
    proxy: Proxy,
    source: Path,
    expected: dict[str, str],
    tiny_tokenizer: Path,
    tmp_path: Path,
) -> None:
    bucket, number, requests = proxy.server["bucket"], 0, 1
    fs_source = f"s3://{bucket}/{tmp_path.name}/in/a.jsonl"
    Store(f"s3://{bucket}/{tmp_path.name}/in").put("a.jsonl", source.read_bytes())
    while number < requests:
        proxy.clear()
        proxy.inject(*ALL, at=number)
        output = f"s3://{bucket}/{tmp_path.name}/{number}"
        make_dataset([fs_source], tiny_tokenizer, output)
        requests = len(proxy.seen) - len(ALL)
        proxy.clear()
        assert _told_apart(objects(Store(output))) == expected, f"fault at request {number}"
        number += 1
    assert number >= 12


@pytest.mark.slow
def test_07_a_multipart_upload_is_identical_whichever_request_fails(
    proxy: Proxy, tmp_path: Path
) -> None:
    data = os.urandom(1 << 20) * 33
    sha256 = hashlib.sha256(data).hexdigest()
    (tmp_path / "x").write_bytes(data)
    store = Store(f"s3://{proxy.server['bucket']}/{tmp_path.name}")
    number, requests = 0, 1
    while number < requests:
        proxy.clear()
        proxy.inject(reset, SLOW_DOWN, lost_answer, cut_request, at=number)
        store.publish("x", tmp_path / "x", sha256)
        requests = len(proxy.seen)
        stored = hashlib.sha256()
        for piece in store.pieces("x", 8 << 20):
            stored.update(piece)
        assert stored.hexdigest() == sha256
        store.delete("x")
        number += 1
    assert number >= 5  # create, three parts, complete
    for upload in store.bucket.uploads(store.key("")):  # begun, but we never heard their ids
        store.bucket.abort(upload)


@pytest.mark.parametrize(
    ("fault", "said"),
    [(SLOW_DOWN, "503 SlowDown"), (INTERNAL, "500 InternalError"), (reset, "connection failed")],
)
@pytest.mark.parametrize("operation", ["PUT", "GET", "HEAD"])
def test_07_a_store_that_goes_on_failing_is_exit_6_with_key_and_request_id(
    operation: str, fault: Fault, said: str, proxy: Proxy, tmp_path: Path
) -> None:
    store = Store(f"s3://{proxy.server['bucket']}/{tmp_path.name}")
    proxy.inject(fault, times=None)
    with pytest.raises(StorageError) as caught:
        {"PUT": lambda: store.put("k", b"x"), "GET": lambda: store.read("k")}.get(
            operation, lambda: store.size("k")
        )()
    text = str(caught.value)
    assert caught.value.exit_code == 6
    assert f"{store.root}/k" in text
    assert "10 times" in text
    assert len(proxy.seen) == 10
    if fault is not reset:
        assert "injected-id" in text
        assert operation == "HEAD" or said in text
    else:
        assert said in text


def test_07_a_refusal_is_not_repeated(proxy: Proxy, tmp_path: Path) -> None:
    proxy.inject(answer(403, "AccessDenied"), times=None)
    with pytest.raises(RemoteFailure, match="AccessDenied"):
        Store(f"s3://{proxy.server['bucket']}/{tmp_path.name}").put("k", b"x")
    assert len(proxy.seen) == 1


def test_07_a_created_object_whose_answer_was_lost_is_ours_and_a_rivals_is_not(
    proxy: Proxy, tmp_path: Path
) -> None:
    store = Store(f"s3://{proxy.server['bucket']}/{tmp_path.name}")
    proxy.inject(lost_answer, method="PUT")
    store.create("manifest.json", b"{}")
    proxy.inject(reset, method="PUT")
    with pytest.raises(ConflictError):  # the same bytes, by somebody else, before our attempts
        store.create("manifest.json", b"{}")
    assert store.read("manifest.json") == b"{}"


def test_07_an_object_changed_on_its_way_is_found_by_reading_it_back(
    proxy: Proxy, tmp_path: Path
) -> None:
    """A store whose ETag is no md5 proves nothing by its answer."""

    def other_etag(exchange) -> None:
        response, data = exchange.forward()
        for name in ("ETag", "x-amz-checksum-crc32"):
            del response.headers[name]
        response.headers["ETag"] = '"not-an-md5"'
        exchange.reply(response, data)

    store = Store(f"s3://{proxy.server['bucket']}/{tmp_path.name}")
    path = tmp_path / "x"
    path.write_bytes(b"right")
    proxy.inject(other_etag, method="PUT", times=None)
    store.publish("a", path, hashlib.sha256(b"right").hexdigest())
    assert store.read("a") == b"right"
    with pytest.raises(StorageError, match="other bytes"):
        store.publish("a", path, hashlib.sha256(b"wrong").hexdigest())
    assert store.size("a") is None
