"""No bytes make a parser of outside data raise anything but an error for the user.

The targets are those of the coverage-guided fuzzer (tests/fuzz/run.py); here each gets its seeds
and the same changes of them every time.
"""

from __future__ import annotations

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz.mutate import mutated
from fuzz.targets import Workshop
from support.small_tokenizer import train

from olm_data.counts import parse_count, parse_share
from olm_data.dataset.plan import parse_tasks
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.tokenization.recipe import parse_budget
from olm_data.tokenizer.tokenizer import open_reference, spec_from_bytes

CHANGES = 75
TARGETS = [
    *("jsonl", "jsonl.zst", "txt", "manifest", "record", "plan", "job", "ends", "tokens", "docs"),
    *("tokenizer", "lock", "yaml", "where", "settings", "parquet", "arrow"),
    *("heartbeat", "metrics", "starts", "run config", "csv.gz", "csv", "datatrove", "megatron"),
    "ids",
    *("checkpoint manifest", "checkpoint index", "checkpoint state"),
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("fuzz")
    return Workshop(folder, train(folder / "tokenizer.json"))


def test_every_target_is_replayed(workshop: Workshop) -> None:
    assert sorted(workshop.targets) == sorted(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_changed_bytes_raise_nothing_but_errors_for_the_user(name: str, workshop: Workshop) -> None:
    target = workshop.targets[name]
    for seed in [b"", *target.seeds]:
        target.run(seed)
    for number in range(CHANGES):
        target.run(mutated(target.seeds[number % len(target.seeds)], number))


def test_a_range_of_tasks_beyond_any_plan_is_refused_before_its_numbers_are_made() -> None:
    """Found by fuzzing: a worker's heartbeat could make its reader count to 10^90."""
    for text in ("3-" + "3" * 90, "9" * 5000):
        with pytest.raises(UsageError, match="range of tasks"):
            parse_tasks(text)


def test_a_tokenizer_file_that_only_the_library_can_read_is_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by fuzzing: the library's JSON parser takes files that others refuse."""
    data = workshop.tokenizer.read_bytes()
    reference = open_reference(data, plain=True)
    monkeypatch.setattr("olm_data.tokenizer.tokenizer.open_reference", lambda *_, **__: reference)
    with pytest.raises(InputError, match="not valid JSON"):
        spec_from_bytes(data.replace(b":", b"", 1), name="tokenizer.json")


@pytest.mark.parametrize("text", ["9" * 5000, "1e999999999", "1e-999999999%", "0." + "1" * 5000])
def test_numbers_of_thousands_of_digits_are_refused_before_they_are_made(text: str) -> None:
    """Found by fuzzing: Python itself refuses to convert them, or fills the memory."""
    for read in (parse_count, parse_budget, lambda t: parse_share(t, "--sample")):
        with pytest.raises(UsageError):
            read(text)


def test_a_document_row_whose_id_is_no_utf8_is_refused(workshop: Workshop) -> None:
    """Found by fuzzing: Arrow hands out such a string, and decoding it failed far away."""
    folder = workshop.folder / "ids"
    shutil.copytree(workshop.folder / "data", folder)
    path = folder / "shard-00000.docs.parquet"
    table = pq.read_table(path)
    ids = pa.array([b"\x8d"] * len(table), pa.binary())
    broken = pa.Array.from_buffers(pa.string(), len(ids), ids.buffers())
    pq.write_table(table.set_column(0, "id", broken), path)
    shard = workshop.open_shard(folder, {})
    reads = (
        lambda: shard.docs.table(["id", "content_hash"]),
        lambda: shard.docs.row(0),
        lambda: list(shard.docs.batches(["id"])),
    )
    for read in reads:
        with pytest.raises(ValidationError, match="rows are damaged"):
            read()
