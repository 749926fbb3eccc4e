"""The log of a run read while it grows, by steps, by lines and beside it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.tracked import logged, write_log

from olm_data.errors import ValidationError
from olm_data.extensions.watching.follow import (
    TOGETHER,
    LogTail,
    StepColumns,
    StepLines,
    StepReader,
    last_step,
    lines_of_step,
    offset_of_step,
)
from olm_data.extensions.watching.watched import (
    EVAL,
    Measured,
    WatchedEvaluation,
    WatchedTail,
    is_watched_name,
    read_watched,
)
from olm_data.run_log.log import (
    METRICS,
    Evaluation,
    MetricsWriter,
    Start,
    Step,
    append_start,
    decode_line,
    keep_until,
)
from olm_data.storage.store import Store


def test_steps_come_once_and_whole_however_the_log_grows(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 24))
    whole = (tmp_path / METRICS).read_bytes()
    reader, found = StepReader(tmp_path), []
    for cut in [*range(0, len(whole), 97), len(whole)]:
        (tmp_path / METRICS).write_bytes(whole[:cut])
        found += [(step.step, step.metrics) for step in reader.read()]
    assert found == logged(tmp_path)[:-1]  # more lines may follow for the last one
    found += [(step.step, step.metrics) for step in reader.read(complete=True)]
    assert found == logged(tmp_path)


@pytest.mark.parametrize("step", [0, 1, 2, 5, 6, 22, 23, 24])
def test_the_lines_of_a_step_are_found_by_bisection(tmp_path: Path, step: int) -> None:
    write_log(tmp_path, range(1, 24))
    lines = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)
    before = [line for line in lines if int(line.split(b",")[0].split(b":")[1]) < step]
    assert offset_of_step(tmp_path, step) == len(b"".join(before))
    assert lines_of_step(tmp_path, step) == (0 if not 0 < step < 24 else 1 + (step % 5 == 0))
    found = [each.step for each in StepReader(tmp_path, step).read(complete=True)]
    assert found == [*range(max(1, step), 24)]


def test_lines_that_were_read_before_are_left_out_and_counted(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 6))
    assert list(StepReader(tmp_path, 5, 2).read(complete=True)) == []
    (late,) = StepReader(tmp_path, 5, 1).read(complete=True)
    assert (late.step, late.lines, late.metrics) == (5, 2, {"eval/held/PPL": 5.0})


def test_a_log_that_is_not_there_yet_has_no_steps(tmp_path: Path) -> None:
    reader = StepReader(tmp_path)
    assert (last_step(tmp_path), offset_of_step(tmp_path, 3)) == (0, 0)
    assert list(reader.read(complete=True)) == []
    write_log(tmp_path, range(1, 3))
    assert last_step(tmp_path) == 2
    assert [step.step for step in reader.read(complete=True)] == [1, 2]


def test_what_the_log_has_as_null_is_nan(tmp_path: Path) -> None:
    line = '{"step": 1, "tokens": 1, "rows": [0, 1], "train/CE loss": null}\n'
    (tmp_path / METRICS).write_text(line)
    (step,) = StepReader(tmp_path).read(complete=True)
    assert math.isnan(step.metrics["train/CE loss"])


# A log is read on from where it was, whatever its writer does meanwhile.
FOREVER = float("inf")
START = Start(step=0, rewound=0, lock="f" * 64, global_batch_size=64, world_size=1, skip=())


def line(step: int) -> Step:
    return Step(step=step, tokens=64 * step, rows=(step, step + 1), metrics={"a": 0.5 * step})


def numbers(found: list[StepColumns | Evaluation]) -> list[int]:
    return [
        step
        for entry in found
        for step in (entry.step.tolist() if isinstance(entry, StepColumns) else [entry.step])
    ]


def steps(tail: LogTail) -> list[int]:
    return numbers(tail.read(FOREVER))


def first_place(tail: LogTail) -> int:
    first, *_ = tail.read(FOREVER)
    assert isinstance(first, StepColumns)
    return int(first.place[0])


def test_only_what_is_new_is_read_and_a_line_is_found_again(tmp_path: Path) -> None:
    tail, writer = LogTail(tmp_path, ["a"]), MetricsWriter(tmp_path)
    assert steps(tail) == []
    for step in (1, 2):
        writer.write(line(step))
    found = [entry for entry in tail.read(FOREVER) if isinstance(entry, StepColumns)]
    assert [v for entry in found for v in entry.metrics["a"].tolist()] == [0.5, 1.0]
    places = [int(place) for entry in found for place in entry.place]
    assert (steps(tail), tail.read_share) == ([], 1.0)
    writer.write(Evaluation(step=2, results={"web": {"CE loss": 1.0}}))
    writer.write(line(3))
    assert steps(tail) == [2, 3]
    again = tail.step_at(places[1])
    assert (again.step, again.rows) == (2, (2, 3))
    writer.close()


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    tail, path = LogTail(tmp_path, []), tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "tokens": 6, "rows": [0, 1]}\n{"step": 2, "tok')
    assert steps(tail) == [1]
    with path.open("ab") as file:
        file.write(b'ens": 12, "rows": [1, 2]}\n')
    assert steps(tail) == [2]


def test_a_log_that_a_resume_has_cut_is_read_anew(tmp_path: Path) -> None:
    tail, writer = LogTail(tmp_path, []), MetricsWriter(tmp_path)
    append_start(tmp_path, START)
    for step in (1, 2, 3):
        writer.write(line(step))
    writer.close()
    place = first_place(tail)
    before = tail.generation
    keep_until(tmp_path, 1)
    assert tail.step_at(place) is None
    assert steps(tail) == [1]
    assert tail.generation == before + 1


def test_a_long_log_is_read_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.extensions.watching.follow.PIECE", 50)  # bytes: less than a line
    tail, writer = LogTail(tmp_path, []), MetricsWriter(tmp_path)
    for step in range(1, 6):
        writer.write(line(step))
    writer.close()
    seen, shares = [], []
    for _ in range(5):
        seen += numbers(tail.read(0.0))
        shares.append(tail.read_share)
    assert seen == [1, 2, 3, 4, 5]
    assert 0 < shares[0] < shares[1] < shares[-1] == 1.0


def test_malformed_lines_are_left_out_counted_and_the_first_is_named(tmp_path: Path) -> None:
    tail, path = LogTail(tmp_path, []), tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "rows": [0, 1]}\n{"step": -1}\n{"step": 2, "rows": [1, 2]}\n')
    assert steps(tail) == [1, 2]
    assert tail.wrong.startswith("1 line of metrics.jsonl left out as malformed, the first: line 2")
    with path.open("a") as file:
        file.write("\0\0\n" * 2)
    assert steps(tail) == []
    assert tail.wrong.startswith(
        "3 lines of metrics.jsonl left out as malformed, the first: line 2"
    )


def test_a_line_beyond_all_bounds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.extensions.watching.follow.MAX_LINE", 3 << 20)
    (tmp_path / "metrics.jsonl").write_bytes(b" " * (4 << 20))
    with pytest.raises(ValidationError, match="malformed"):
        steps(LogTail(tmp_path, []))


def test_a_new_file_with_the_number_of_the_old_one_is_read_anew(tmp_path: Path) -> None:
    """As after two restarts between two looks: file systems give a free number away again."""
    path, tail = tmp_path / "metrics.jsonl", LogTail(tmp_path, ["a"])
    for steps_, name in ((range(1, 5), "old"), (range(2, 12), "new")):
        (tmp_path / name).mkdir()
        writer = MetricsWriter(tmp_path / name)
        for step in steps_:
            writer.write(line(step))
        writer.close()
    path.write_bytes((tmp_path / "old/metrics.jsonl").read_bytes())
    assert steps(tail) == [1, 2, 3, 4]
    path.write_bytes((tmp_path / "new/metrics.jsonl").read_bytes())  # longer, in the same place
    assert steps(tail) == list(range(2, 12))
    assert (tail.generation, tail.wrong) == (2, "")


PATH = Path("metrics.jsonl")
KEPT = ("loss", "optim/lr", "lacking")


def spelled(step: int, **more: object) -> str:
    plain = {
        "step": step,
        "time": 1767225600.25 + step,
        "tokens": 512 * step,
        "rows": [8 * step - 8, 8 * step],
        "order": f"{random.Random(step).getrandbits(256):064x}",
        "loss": random.Random(step).random() * 5,
        "optim/lr": None if step % 7 == 0 else 1e-3,
        "eval/web: a": 0.1 + 0.2,
    }
    return json.dumps({**plain, **more})


ODD = {
    "evaluation": '{"step": 5, "time": 1.5, "eval": {"web": {"CE loss": 1.0}}}',
    "other names": spelled(5, more=1.0),
    "fewer names": '{"step": 5, "tokens": 9, "rows": [1, 2], "loss": 1}',
    "skipped": spelled(5, skipped=[[33, 35]]),
    "skipped elsewhere": spelled(5, skipped=[[0, 3]]),
    "no lock": spelled(5, rows=[0, 0], version=2, epoch=3).replace('"order"', '"no"'),
    "own data": '{"step": 5, "tokens": 9, "epoch": 2, "version": 2, "loss": 1}',
    "own data with an order": spelled(5, rows=[0, 0], version=2),
    "another version": spelled(5, version=3),
    "a name twice": spelled(5).replace('"loss"', '"loss": 1.0, "loss"'),
    "a name twice for another": spelled(5).replace('"optim/lr"', '"loss"'),
    "a name twice, hidden by an escape": spelled(5)
    .replace('"eval/web: a"', '"eval/web\\u003a a"')
    .replace('"loss"', '"loss": 1.0, "loss"'),
    "an escaped name": spelled(5).replace('"loss"', '"l\\u006fss"'),
    "a colon in the order": spelled(5, order="a:b"),
    "a bracket in the order": spelled(5, order="a{b"),
    "no order": spelled(5, order=None),
    "a wide integer": spelled(5).replace('"loss": ', '"loss": 1234567890123456789012, "other": '),
    "a wide loss": spelled(5, loss=0).replace('"loss": 0', '"loss": 123456789012345678901'),
    "a wide negative loss": spelled(5, loss=0).replace(
        '"loss": 0', '"loss": -123456789012345678901'
    ),
    "a loss of 20 digits": spelled(5, loss=0).replace('"loss": 0', '"loss": 12345678901234567890'),
    "a long fraction": spelled(5, loss=0).replace('"loss": 0', '"loss": 0.1234567890123456789012'),
    "digits in the order": spelled(5, order="1" * 64),
    "a large number": spelled(5, loss=0).replace('"loss": 0', '"loss": 1e400'),
    "a text as loss": spelled(5, loss="1"),
    "a truth as loss": spelled(5, loss=True),
    "rows that end before they begin": spelled(5, rows=[9, 8]),
    "three rows": spelled(5, rows=[1, 2, 3]),
    "negative": spelled(5, tokens=-1),
    "too large": spelled(5, tokens=1 << 63),
    "late": spelled(5, time=1e12),
    "no step": spelled(5).replace('"step"', '"stop"'),
    "half a line": spelled(5)[:60],
    "two on a line": spelled(5) + spelled(5),
    "two on a line with blanks": " " + spelled(5) + " " + spelled(5),
    "an object in it": spelled(5, loss={}),
    "a control byte": spelled(5).replace("loss", "lo\x01ss"),
    "a control byte in the order": spelled(5, order="").replace('"order": ""', '"order": "\x02"'),
    "nothing": "",
    "blanks": "   ",
    "blanks about it": " \t" + spelled(5) + "  ",
    "brackets": "[" * 70 + "]" * 70,
    "no text": "\udcff",
    "null": "null",
    "a list": "[1]",
}


def alone(lines: list[bytes]) -> tuple[list[object], list[int]]:
    """What each line says by itself, and the numbers of those that are refused."""
    found: list[object] = []
    wrong, place = [], 0
    for number, each in enumerate(lines, 1):
        try:
            entry = decode_line(PATH, number, each, KEPT)
        except ValidationError:
            wrong.append(number)
        else:
            found.append(plain(entry, place) if isinstance(entry, Step) else entry)
        place += len(each)
    return found, wrong


def plain(entry: Step, place: int) -> tuple[object, ...]:
    values = [entry.metrics.get(name) for name in KEPT]
    return (place, entry.step, entry.tokens, entry.time, *entry.rows, *values)


def together(lines: list[bytes]) -> tuple[list[object], StepLines, int]:
    """The same of all lines, and how many calls it took."""
    reader, found, parts = StepLines(PATH, KEPT), list[object](), 0
    for entry in reader.read(b"".join(lines), 0):
        parts += 1
        if isinstance(entry, Evaluation):
            found.append(entry)
            continue
        assert isinstance(entry, StepColumns)
        values = [
            [None if np.isnan(v) else v for v in entry.metrics[name].tolist()] for name in KEPT
        ]
        columns = (entry.place, entry.step, entry.tokens, entry.time, *entry.rows.T)
        found += zip(*(column.tolist() for column in columns), *values, strict=True)
    return found, reader, parts


WHERE = (0, 2, 3, 40, 79)


@pytest.mark.parametrize(
    ("odd", "where"),
    [(odd, WHERE[(n + k) % 5]) for n, odd in enumerate(ODD.values()) for k in (0, 2)],
    ids=[f"{name}-{WHERE[(n + k) % 5]}" for n, name in enumerate(ODD) for k in (0, 2)],
)
def test_an_odd_line_among_others_is_taken_or_refused_as_it_is_alone(odd: str, where: int) -> None:
    texts = [spelled(step) for step in range(1, 81)]
    texts[where] = odd
    texts += [odd, odd, spelled(90), odd]  # by then its names may be known
    lines = [text.encode(errors="surrogateescape") + b"\n" for text in texts]
    want, wrong = alone(lines)
    found, reader, _ = together(lines)
    assert found == want
    assert (reader.lines, reader.wrong) == (len(lines), len(wrong))
    assert reader.first_wrong.startswith(f"line {wrong[0]}: " if wrong else "")


def test_mixed_lines_in_any_order_say_what_each_says_alone() -> None:
    chance = random.Random(1)
    for _ in range(20):
        texts = [
            chance.choice(list(ODD.values())) if chance.random() < 0.1 else spelled(step)
            for step in range(1, chance.randrange(2, 700))
        ]
        lines = [text.encode(errors="surrogateescape") + b"\n" for text in texts]
        found, reader, _ = together(lines)
        want, wrong = alone(lines)
        assert (found, reader.wrong) == (want, len(wrong))


def test_lines_of_the_same_names_are_taken_many_at_once() -> None:
    lines = [spelled(step).encode() + b"\n" for step in range(1, 4 * TOGETHER)]
    _, _, parts = together(lines)
    assert parts < 40


def test_every_line_may_have_names_of_its_own() -> None:
    lines = [spelled(step, **{f"m{step // 2}": 1}).encode() + b"\n" for step in range(1, 400)]
    found, reader, _ = together(lines)
    assert (found, reader.wrong) == (alone(lines)[0], 0)


def test_ranges_that_steps_left_out_are_given() -> None:
    reader = StepLines(PATH, KEPT)
    texts = [spelled(1), spelled(2, skipped=[[9, 11]]), spelled(3, skipped=[[16, 17], [20, 24]])]
    found = list(reader.read("".join(text + "\n" for text in texts).encode(), 0))
    ranges = [each for f in found if isinstance(f, StepColumns) for each in f.skipped]
    assert ranges == [(9, 11), (16, 17), (20, 24)]


SET = Measured(digest="d" * 64, sequence_length=32, by=("language",))
GOLDEN = (
    b'{"checkpoint":"step00000012-ema","digest":"' + b"a" * 64 + b'","step":12,"time":1.5,'
    b'"data":{"held":{"digest":"' + b"d" * 64 + b'","sequence_length":32,"by":["language"],'
    b'"against":""}},"results":{"held":{"CE loss":2.5,"PPL":null}},"version":1}\n'
)


def result(checkpoint: str = "step00000012", loss: float = 2.5) -> WatchedEvaluation:
    return WatchedEvaluation(
        checkpoint=checkpoint,
        digest="a" * 64,
        step=int(checkpoint[4:12]),
        time=1.5,
        data={"held": SET},
        results={"held": {"CE loss": loss, "PPL": None}},
    )


def test_a_file_is_what_it_is_and_reads_back(tmp_path: Path) -> None:
    folder = Store(str(tmp_path)).child(EVAL)
    found = result("step00000012-ema")
    found.write(folder)
    assert (tmp_path / EVAL / "step00000012-ema.json").read_bytes() == GOLDEN
    assert read_watched(folder, found.file) == found
    assert read_watched(folder, "step00000013.json") is None
    assert sorted(path.name for path in (tmp_path / EVAL).iterdir()) == [found.file]


def test_averaged_weights_have_the_names_that_they_have_in_a_run() -> None:
    assert list(result().logged.results) == ["held"]
    assert list(result("step00000012-merged").logged.results) == ["merged/held"]
    assert list(result("step00000012-ema").logged.results) == ["merged/ema/held"]


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        GOLDEN,  # of another checkpoint than the file is called after
        GOLDEN.replace(b'"version":1', b'"version":2').replace(b"-ema", b""),
        GOLDEN.replace(b'"step":12', b'"step":-1').replace(b"-ema", b""),
        GOLDEN.replace(b'"time"', b'"then"').replace(b"-ema", b""),
    ],
)
def test_what_is_malformed_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / EVAL).mkdir()
    (tmp_path / EVAL / "step00000012.json").write_bytes(data)
    with pytest.raises(ValidationError, match="damaged"):
        read_watched(Store(str(tmp_path)).child(EVAL), "step00000012.json")
    tail = WatchedTail(tmp_path)
    assert (tail.read(), list(tail.wrong)) == ([], ["step00000012.json"])


def test_a_reader_gets_what_is_new_or_was_written_anew(tmp_path: Path) -> None:
    tail, folder = WatchedTail(tmp_path), Store(str(tmp_path)).child(EVAL)
    assert tail.read() == []
    result("step00000024").write(folder)
    result("step00000012").write(folder)
    (tmp_path / EVAL / "lease-step00000012-000001.json").write_text("{}")
    assert [each.step for each in tail.read()] == [12, 24]
    assert tail.read() == []
    more = msgspec.structs.replace(result("step00000012"), results={"held": {"CE loss": 12.25}})
    more.write(folder)
    assert tail.read() == [more]
    seldom = WatchedTail(tmp_path, seconds=1000)
    assert len(seldom.read()) == 2
    result("step00000036").write(folder)
    assert seldom.read() == []
    assert [each.step for each in seldom.read(now=True)] == [36]


def test_other_files_of_the_folder_are_none_of_these() -> None:
    assert is_watched_name("step00000012.json")
    for name in ("step12.json", "lease-step00000012-000001.json", "x/step00000012.json", "a.json"):
        assert not is_watched_name(name)
