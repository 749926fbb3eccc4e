"""Plan, job and options of a run: what they hold, and what is no such file."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import plans

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.inputs import KEEP_TYPES, InputFile, ReadOptions, RecordOptions, Unit
from olm_data.dataset.job import JobFile, TokenizerIdentity
from olm_data.dataset.options import ImportedOptions, Last, Options, decode_options
from olm_data.dataset.plan import OtherVersion, Plan, group, likely_text, shard_name, shard_text
from olm_data.errors import ValidationError
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import load_tokenizer

SIZES = st.lists(st.integers(0, 1000), max_size=60)
INPUTS = [("a.jsonl", 10, "1"), ("b.jsonl", 20, "1")]
UNITS = [(0, 0, 10, 10), (1, 0, 10, 10), (1, 10, 20, 10)]


def plan_of(inputs: Any = INPUTS, units: Any = UNITS, target: int = 20, **settings: Any) -> Plan:
    return plans.plan_of(inputs, units, target, **settings)


@given(SIZES, st.integers(1, 3000))
def test_tasks_tile_the_units_in_order_and_are_as_long_as_the_target_lets_them(
    sizes: list[int], target: int
) -> None:
    tasks = group(sizes, target)
    assert [i for start, stop in tasks for i in range(start, stop)] == list(range(len(sizes)))
    for start, stop in tasks:
        assert stop > start
        assert sum(sizes[start:stop]) <= target or stop - start == 1
    for start, stop in tasks[:-1]:
        assert sum(sizes[start : stop + 1]) > target


def test_the_shard_size_follows_the_users_wish_or_the_size_of_the_inputs() -> None:
    assert shard_text(10**12, 1000) == 4000
    assert shard_text(10**12, None) == 400_000_000
    assert shard_text(0, None) == 400_000_000
    assert shard_text(10**6, None) == 4 << 20
    assert shard_text(64 * 10**7, None) == 10**7


def test_compressed_inputs_are_expected_to_hold_more_text_than_bytes() -> None:
    assert likely_text([("a.jsonl.gz", 10), ("b.jsonl", 10), ("c.parquet", 10)]) == 60


def test_the_digest_depends_on_inputs_settings_and_cuts_and_on_nothing_else() -> None:
    base = plan_of()
    assert plan_of([(path, size, "2") for path, size, _ in INPUTS]).digest == base.digest
    others = [
        plan_of(eos=None),
        plan_of(text_column="content"),
        plan_of([("a.jsonl", 11, "1"), INPUTS[1]]),
        plan_of([("c.jsonl", 10, "1"), INPUTS[1]]),
        plan_of(target=10),
        plan_of(units=[(0, 0, 10, 10), (1, 0, 20, 20)]),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_a_stored_plan_is_the_plan() -> None:
    plan = plan_of(where="n > 3", sample="1/3", last=Last("a.jsonl", 5, 40), limit=2)
    assert Plan.decode(plan.encode()) == plan
    assert plan.differences(Plan.decode(plan.encode())) == []


def test_the_bytes_of_a_plan_are_those_of_version_1() -> None:
    plan = plan_of(holdout="1/8", shuffle_documents=True, seed=7, keep=(("n", "int64"),))
    assert plan.digest == "ec3819c2e96f749900d15349b8be24e121c7dc6d4d4ae91a3d1f650f98819115"
    text = plan.encode().decode()
    assert list(json.loads(text)["settings"].items()) == [
        ("text_column", "text"),
        ("id_column", None),
        ("keep", [["n", "int64"]]),
        ("separator", None),
        ("holdout", "1/8"),
        ("shuffle_documents", True),
        ("seed", 7),
        ("tokenizer", "0" * 64),
        ("tokenizer_probe", "1" * 64),
        ("vocab_size", 512),
        ("bos", None),
        ("eos", 0),
        ("special", "plain"),
        ("shard_text_bytes", 4194304),
    ]
    both = plan_of(sample="1/3", shuffle_documents=True, parent="d", first_shard=3).encode()
    both = json.loads(both)["settings"]
    assert [name for name in both if name in ("sample", "seed", "shuffle_documents")] == [
        "sample",
        "seed",
        "shuffle_documents",
    ]
    assert list(both.items())[-2:] == [("parent", "d"), ("first_shard", 3)]
    assert (
        hashlib.sha256(plan.encode()).hexdigest()
        == "fd5d61595ebd7f1b65006b9d6272bd2a0f262132bb2b71effed9cde22091b4b2"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"eos": 0', '"eos": 1'),
        lambda text: text.replace('"eos": 0', '"eos": 0, "more": 1'),
        lambda text: text.replace('"format": "olm-plan",', ""),
        lambda text: "{}",
        lambda text: "[]",
        lambda text: "{",
    ],
)
def test_a_plan_that_was_changed_is_none(change: Callable[[str], str]) -> None:
    with pytest.raises(MalformedJson):
        Plan.decode(change(plan_of().encode().decode()).encode())


def test_a_plan_of_another_version_says_so_and_who_wrote_it(tmp_path: Path) -> None:
    later = plan_of().encode().replace(b'"version": 1', b'"version": 2, "more": []')
    (tmp_path / "plan.json").write_bytes(later)
    (tmp_path / "job.json").write_text('{"version": 9, "packages": {"olm": "7.1"}}')
    with pytest.raises(OtherVersion, match="of version 2, and this release reads version 1"):
        Plan.decode(later)
    with pytest.raises(ValidationError, match="another release of olm-data wrote") as refused:
        Plan.read(Store(tmp_path), "plan.json")
    assert "written by olm-data 7.1" in str(refused.value.why)
    assert "use the release that wrote it" in str(refused.value.fix)
    (tmp_path / "job.json").unlink()
    with pytest.raises(ValidationError, match="version 2"):
        Plan.read(Store(tmp_path), "plan.json")


def test_differences_name_the_option_the_input_and_both_values() -> None:
    stored = plan_of()
    now = plan_of([("a.jsonl", 10, "2"), ("c.jsonl", 20, "1")], eos=5)
    found = now.differences(stored)
    assert "eos: 0 there, 5 now" in found
    assert "input a.jsonl: changed since (revision 1 there)" in found
    assert "input c.jsonl: new" in found
    assert "input b.jsonl: gone" in found


def test_tasks_know_their_inputs_and_sizes() -> None:
    plan = plan_of()
    assert plan.tasks == ((0, 2), (2, 3))
    assert [plan.text_bytes(task) for task in (0, 1)] == [20, 10]
    assert [plan.inputs_of(task) for task in (0, 1)] == [[0, 1], [1]]
    assert (plan.describe(0), plan.describe(1)) == ("a.jsonl to b.jsonl (2 files)", "b.jsonl")
    assert [shard_name(0), shard_name(123456)] == ["shard-00000", "shard-123456"]


def job_of(tokenizer: Path) -> JobFile:
    return JobFile(
        plan_file="plan.json",
        packages={"olm": "1"},
        plan_sha256="0" * 64,
        plan="1" * 64,
        inputs=(
            InputFile(
                path="a.jsonl",
                url="/x/a.jsonl",
                bytes=1,
                revision="r",
                format="jsonl",
                position="line",
            ),
        ),
        read=ReadOptions(sample="1/2", seed=4),
        tokenizer=TokenizerIdentity.of(load_tokenizer(tokenizer)),
        encoder="hf",
        routed=(),
        special="plain",
        holdout=0,
        single_writer=False,
        shuffle=None,
        duplicates="keep",
    )


def test_a_job_reads_back_and_a_change_is_noticed(tiny_tokenizer: Path, tmp_path: Path) -> None:
    job, path = job_of(tiny_tokenizer), tmp_path / "job.json"
    path.write_bytes(job.encode())
    found = JobFile.read_from(Store(tmp_path))
    assert (found.read, found.inputs, found.digest) == (job.read, job.inputs, job.compute_digest())
    path.write_bytes(job.encode().replace(b"/x/", b"/y/"))
    assert JobFile.read_from(Store(tmp_path), checked=False).inputs[0].url == "/y/a.jsonl"
    with pytest.raises(MalformedJson, match="digest"):
        JobFile.read_from(Store(tmp_path))


def test_a_tokenizer_is_the_one_the_run_began_with(tiny_tokenizer: Path) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    identity = TokenizerIdentity.of(spec)
    assert identity.open(spec.json_bytes) == spec
    with pytest.raises(ValidationError, match="not the tokenizer the run began with"):
        identity.open(spec.json_bytes + b" ")


def test_a_unit_is_a_list_of_four_numbers_in_a_plan() -> None:
    unit = Unit(input=3, start=10, stop=20, bytes=10)
    assert msgspec.json.encode(unit) == b"[3,10,20,10]"
    assert msgspec.json.decode(b"[3,10,20,10]", type=Unit) == unit
    assert pickle.loads(pickle.dumps(unit)) == unit
    for wrong in (b"[3,10,20]", b"[3,10,20,-1]", b'{"input":3}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(wrong, type=Unit)


def test_a_field_that_no_release_wrote_is_refused() -> None:
    value = {"path": "a", "url": "/a", "bytes": 1, "revision": "r", "format": "txt"}
    assert msgspec.convert({**value, "position": "byte"}, InputFile).until is None
    for more in ({"position": "page"}, {"position": "byte", "more": 1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**value, **more}, InputFile)


def test_what_changes_no_byte_is_not_in_what_is_recorded() -> None:
    stops = RecordOptions(on_invalid="error")
    assert stops.recorded.on_invalid == "skip"
    assert RecordOptions(on_invalid="replace").recorded.on_invalid == "replace"
    assert RecordOptions(seed=7).seed is None  # nothing is drawn
    assert RecordOptions(sample="1/2").seed == 0
    assert RecordOptions(sample="1/2", seed=7).seed == 7


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({}, {}),
        ({"on_invalid": "skip", "on_unknown": "keep"}, {}),
        ({"delimiter": "|"}, {"delimiter": "|"}),
        ({"where": "a == 1"}, {"where": "a == 1"}),
    ],
)
def test_old_fields_are_always_written_and_newer_ones_where_they_say_something(
    options: dict[str, Any], stored: dict[str, Any]
) -> None:
    plain = msgspec.to_builtins(RecordOptions(**options))
    assert {**plain, "keep": list(plain["keep"])} == {**ALWAYS, **stored}
    assert msgspec.convert(plain, RecordOptions) == RecordOptions(**options)


def test_kept_columns_have_the_types_that_arrow_names() -> None:
    keep = tuple((f"c{n}", kind) for n, kind in enumerate(KEEP_TYPES))
    schema = ReadOptions(keep=keep).keep_schema  # type: ignore[arg-type]
    assert schema.types == [pa.string(), pa.int64(), pa.float64(), pa.bool_()]
    assert ReadOptions().keep_schema is None


@pytest.mark.parametrize("share", ["", "1/0", "0.5", "-1/2", "1/2/3"])
def test_a_share_is_a_fraction(share: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"sample": share}, RecordOptions)


ALWAYS = {"text_column": "text", "id_column": None, "keep": [], "separator": None}


def stored(options: RecordOptions) -> dict[str, object]:
    return msgspec.json.decode(msgspec.json.encode(options))


def test_an_option_that_is_not_in_use_is_left_out_however_its_value_was_made() -> None:
    plain = Options(on_invalid="".join("skip"), container="".join("npy"), seed=5)
    assert stored(plain) == ALWAYS | {"holdout": "0"}
    assert stored(Options(sample="1/2"))["seed"] == 0
    assert stored(Options(shuffle_documents=True, seed=3))["seed"] == 3
    assert stored(Options(container="raw"))["container"] == "raw"


def test_to_stop_at_invalid_text_is_not_recorded_and_batches_are_of_the_reading_alone() -> None:
    read = ReadOptions(on_invalid="error", batch_bytes=7)
    assert stored(read.recorded) == ALWAYS | {"batch_bytes": 7}
    assert stored(msgspec.convert(read.recorded, RecordOptions, from_attributes=True)) == ALWAYS
    assert read.on_invalid == "error"


def test_a_manifest_holds_options_of_tokenising_or_the_format_it_was_imported_from() -> None:
    assert decode_options(msgspec.Raw(b'{"imported": "megatron"}')) == ImportedOptions("megatron")
    known = decode_options(msgspec.Raw(b'{"text_column": "body", "of_a_later_release": 1}'))
    assert known == Options(text_column="body")


@pytest.mark.parametrize(
    "data", [b'{"imported": 3}', b'{"imported": "x", "more": 1}', b'{"text_column": "a\\u001b"}']
)
def test_options_that_cannot_be_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expected|unknown field|control"):
        decode_options(msgspec.Raw(data))
