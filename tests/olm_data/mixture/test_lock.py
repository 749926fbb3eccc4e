"""The lock: what it says of a run, and that no other bytes are taken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.stand_in import MANIFEST, compiled, parse_mixture, stand_in_dataset, stand_ins

from olm_data.bounded_json import digest as canonical_digest
from olm_data.errors import ConflictError, InputError, ValidationError
from olm_data.mixture.lock import UNDIGESTED, Lock, lock_of_run
from olm_data.mixture.lock_format import take_order
from olm_data.mixture.mix import MixPlan
from olm_data.order.base import SourceSize
from olm_data.order.orders import manifest_orders

GOLDEN = Path(__file__).parent / "golden"


def golden_lock() -> Lock:
    text = (GOLDEN / "manifest.yaml").read_text()
    mixture = parse_mixture(text, folder="/home/user/mixtures")
    tokens = {"code": 2_000_000, "math": 1_234_567, "web": 9_876_543}
    opened = {name: stand_in_dataset(name, count) for name, count in tokens.items()}
    return MixPlan(mixture, opened, "/home/user/mixtures/locks").compile()


def test_the_golden_manifest_compiles_to_the_golden_lock() -> None:
    lock = msgspec.structs.replace(golden_lock(), tools={"olm": "0.1.0"})
    assert lock.encode() == (GOLDEN / "mixture.lock.json").read_bytes()


def test_the_golden_lock_can_be_read_and_gives_the_golden_rows() -> None:
    lock = Lock.read(GOLDEN / "mixture.lock.json")
    place = lock.schedule().locate([0, 1, 2, 4881, 4882, 6346, 6347, lock.total_rows - 1])
    found = np.stack([place.stage, place.source, place.epoch, place.row], axis=1).tolist()
    assert found == json.loads((GOLDEN / "lock_rows.json").read_text())


def test_a_lock_is_read_back_equal(tmp_path: Path) -> None:
    mixture = parse_mixture(MANIFEST, folder=str(tmp_path))
    lock = MixPlan(mixture, stand_ins(mixture), str(tmp_path / "locks")).compile()
    assert lock.write(tmp_path / "locks/m.lock.json") == "written"
    assert Lock.read(tmp_path / "locks/m.lock.json") == lock
    assert lock.locations == {"code": "s3://bucket/tokens/code", "web": "../tokens/web"}
    assert lock.location("web") == str(tmp_path / "tokens/web")
    assert [p.name for p in (tmp_path / "locks").iterdir()] == ["m.lock.json"]


def test_an_equal_lock_is_left_alone_and_another_is_replaced_only_on_request(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.lock.json"
    first, second = compiled(MANIFEST), compiled(MANIFEST.replace("20260101", "7"))
    assert [first.write(path), first.write(path)] == ["written", "unchanged"]
    before = path.read_bytes()
    with pytest.raises(ConflictError, match="another lock") as error:
        second.write(path)
    assert error.value.exit_code == 7
    assert path.read_bytes() == before
    assert second.write(path, overwrite=True) == "written"
    assert Lock.read(path).seed == 7


def test_a_file_that_is_no_lock_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "m.lock.json"
    path.write_text("precious")
    with pytest.raises(ConflictError, match="not a lock"):
        compiled(MANIFEST).write(path)
    assert path.read_text() == "precious"


def test_moved_data_keeps_the_lock_and_updates_its_locations(tmp_path: Path) -> None:
    path = tmp_path / "m.lock.json"
    compiled(MANIFEST).write(path)
    moved = compiled(MANIFEST.replace("./tokens/web", "/elsewhere/web"))
    assert moved.write(path) == "written"
    assert Lock.read(path).location("web") == "/elsewhere/web"


def test_a_missing_lock_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no mixture lock") as error:
        Lock.read(tmp_path / "none.lock.json")
    assert error.value.fix == "make one: olm-data mix manifest.yaml"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (MANIFEST, "not a mixture lock"),
        ("{}", "this is None version None"),
        ("[]", "not a mixture lock"),
        ("\udcff", "not a mixture lock"),
    ],
)
def test_a_file_that_is_no_lock_is_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "m.lock.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValidationError, match=says):
        Lock.read(path)


@pytest.mark.parametrize(("key", "value"), [("version", 2), ("order", "prp2"), ("format", "x")])
def test_a_lock_of_another_version_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "m.lock.json"
    path.write_text(json.dumps(json.loads(compiled(MANIFEST).encode()) | {key: value}))
    with pytest.raises(ValidationError, match=f"{value}.*this release reads"):
        Lock.read(path)


@pytest.mark.parametrize("place", ["m.lock.json", "s3://bucket/m.lock.json"])
def test_a_remote_run_may_name_a_lock_in_its_own_bucket(place: str) -> None:
    found = lock_of_run({"data_loader": {"mixture": place}}, "s3://bucket/run")
    assert found.startswith("s3://bucket/")


@pytest.mark.parametrize("folder", ["s3://other/run", "s3://bucket-2/run", "gs://bucket/run"])
def test_a_remote_run_names_no_lock_and_no_source_of_another_bucket(folder: str) -> None:
    with pytest.raises(InputError, match="which only you may open"):
        lock_of_run({"data_loader": {"mixture": "s3://bucket/m.lock.json"}}, folder)
    lock = compiled(MANIFEST)  # its source `code` is in s3://bucket
    lock.refuse_far("s3://bucket/run")
    with pytest.raises(InputError, match="source 'code' of its lock"):
        lock.refuse_far(folder)


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
