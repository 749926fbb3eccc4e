"""The keys of a lock file."""

from __future__ import annotations

import json

import msgspec
import pytest
from support.stand_in import MANIFEST, compiled

from olm_data.bounded_json import digest as canonical_digest
from olm_data.errors import ValidationError
from olm_data.mixture.lock import UNDIGESTED, Lock
from olm_data.mixture.lock_format import take_order
from olm_data.order.base import SourceSize
from olm_data.order.orders import manifest_orders


def test_a_lock_has_the_keys_that_it_uses() -> None:
    stage = compiled(
        "version: 1\nsequence_length: 8\nsources: {web: {data: ./web}}\n"
        "stages: [{name: a, tokens: 1K, weights: {web: 1}}]\n"
    ).encode()
    for key in (b"part_of", b'epochs":', b"capped", b"groups", b"weights_file"):
        assert key not in stage.replace(b'"max_epochs": "4/1"', b"")


@pytest.mark.parametrize(
    ("name", "keys"),
    [("global", {}), ("windowed", {"window_chunks": 2}), ("olmo-core", {"batch_rows": 8})],
)
def test_a_lock_gives_back_its_order(name: str, keys: dict[str, int]) -> None:
    lock = compiled(MANIFEST)
    lock = msgspec.structs.replace(lock, sources=lock.sources[:1])
    sizes = [SourceSize(rows=s.rows, tokens=s.tokens, shards=2) for s in lock.sources]
    lock = msgspec.structs.replace(lock, order=manifest_orders()[name](**keys).compile(sizes))
    content = json.loads(lock.encode())
    assert take_order(content) == lock.order
    assert lock.order.name.replace("-", "_") not in content


def test_a_lock_has_one_order() -> None:
    two = {"windowed": {"window_chunks": 1, "chunk_rows": [1]}, "olmo_core": {"batch_rows": 1}}
    with pytest.raises(msgspec.ValidationError, match="one order, not olmo-core, windowed"):
        take_order(two)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        take_order({"windowed": {"window_chunks": 1, "chunk_rows": [1], "more": 1}})


@pytest.mark.parametrize("name", ["a b", "../web", "\x1b[31m", "x" * 200, ""])
def test_a_lock_with_a_strange_name_is_refused_by_that_name(name: str) -> None:
    content = json.loads(compiled(MANIFEST).encode())
    first = content["sources"][0]["name"]
    content["sources"][0]["name"] = name
    content["locations"][name] = content["locations"].pop(first)
    undigested = {key: value for key, value in content.items() if key not in UNDIGESTED}
    for digest in (content["digest"], canonical_digest(undigested)):
        data = json.dumps(content | {"digest": digest}).encode()
        with pytest.raises(ValidationError, match="a name that no mixture has") as refused:
            Lock.decode(data, "/m.lock.json")
        assert "\x1b" not in str(refused.value)


def test_a_lock_whose_numbers_do_not_fit_is_not_called_changed() -> None:
    content = json.loads(compiled(MANIFEST).encode()) | {"sequence_length": 7}
    with pytest.raises(ValidationError, match="digest does not match"):
        Lock.decode(json.dumps(content).encode(), "/m.lock.json")
    undigested = {key: value for key, value in content.items() if key not in UNDIGESTED}
    data = json.dumps(content | {"digest": canonical_digest(undigested)}).encode()
    with pytest.raises(ValidationError, match="numbers do not fit each other"):
        Lock.decode(data, "/m.lock.json")
