"""Lines taken together say what each says alone; one that is refused alone is refused together."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from olm_data.errors import ValidationError
from olm_data.extensions.watching.follow import TOGETHER, StepColumns, StepLines
from olm_data.run_log.log import Evaluation, Step, decode_line

PATH = Path("metrics.jsonl")
KEPT = ("loss", "optim/lr", "lacking")


def line(step: int, **more: object) -> str:
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
    "other names": line(5, more=1.0),
    "fewer names": '{"step": 5, "tokens": 9, "rows": [1, 2], "loss": 1}',
    "skipped": line(5, skipped=[[33, 35]]),
    "skipped elsewhere": line(5, skipped=[[0, 3]]),
    "no lock": line(5, rows=[0, 0], version=2, epoch=3).replace('"order"', '"no"'),
    "own data": '{"step": 5, "tokens": 9, "epoch": 2, "version": 2, "loss": 1}',
    "own data with an order": line(5, rows=[0, 0], version=2),
    "another version": line(5, version=3),
    "a name twice": line(5).replace('"loss"', '"loss": 1.0, "loss"'),
    "a name twice for another": line(5).replace('"optim/lr"', '"loss"'),
    "a name twice, hidden by an escape": line(5)
    .replace('"eval/web: a"', '"eval/web\\u003a a"')
    .replace('"loss"', '"loss": 1.0, "loss"'),
    "an escaped name": line(5).replace('"loss"', '"l\\u006fss"'),
    "a colon in the order": line(5, order="a:b"),
    "a bracket in the order": line(5, order="a{b"),
    "no order": line(5, order=None),
    "a wide integer": line(5).replace('"loss": ', '"loss": 1234567890123456789012, "other": '),
    "a wide loss": line(5, loss=0).replace('"loss": 0', '"loss": 123456789012345678901'),
    "a wide negative loss": line(5, loss=0).replace('"loss": 0', '"loss": -123456789012345678901'),
    "a loss of 20 digits": line(5, loss=0).replace('"loss": 0', '"loss": 12345678901234567890'),
    "a long fraction": line(5, loss=0).replace('"loss": 0', '"loss": 0.1234567890123456789012'),
    "digits in the order": line(5, order="1" * 64),
    "a large number": line(5, loss=0).replace('"loss": 0', '"loss": 1e400'),
    "a text as loss": line(5, loss="1"),
    "a truth as loss": line(5, loss=True),
    "rows that end before they begin": line(5, rows=[9, 8]),
    "three rows": line(5, rows=[1, 2, 3]),
    "negative": line(5, tokens=-1),
    "too large": line(5, tokens=1 << 63),
    "late": line(5, time=1e12),
    "no step": line(5).replace('"step"', '"stop"'),
    "half a line": line(5)[:60],
    "two on a line": line(5) + line(5),
    "two on a line with blanks": " " + line(5) + " " + line(5),
    "an object in it": line(5, loss={}),
    "a control byte": line(5).replace("loss", "lo\x01ss"),
    "a control byte in the order": line(5, order="").replace('"order": ""', '"order": "\x02"'),
    "nothing": "",
    "blanks": "   ",
    "blanks about it": " \t" + line(5) + "  ",
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
    texts = [line(step) for step in range(1, 81)]
    texts[where] = odd
    texts += [odd, odd, line(90), odd]  # by then its names may be known
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
            chance.choice(list(ODD.values())) if chance.random() < 0.1 else line(step)
            for step in range(1, chance.randrange(2, 700))
        ]
        lines = [text.encode(errors="surrogateescape") + b"\n" for text in texts]
        found, reader, _ = together(lines)
        want, wrong = alone(lines)
        assert (found, reader.wrong) == (want, len(wrong))


def test_lines_of_the_same_names_are_taken_many_at_once() -> None:
    lines = [line(step).encode() + b"\n" for step in range(1, 4 * TOGETHER)]
    _, _, parts = together(lines)
    assert parts < 40


def test_every_line_may_have_names_of_its_own() -> None:
    lines = [line(step, **{f"m{step // 2}": 1}).encode() + b"\n" for step in range(1, 400)]
    found, reader, _ = together(lines)
    assert (found, reader.wrong) == (alone(lines)[0], 0)


def test_ranges_that_steps_left_out_are_given() -> None:
    reader = StepLines(PATH, KEPT)
    texts = [line(1), line(2, skipped=[[9, 11]]), line(3, skipped=[[16, 17], [20, 24]])]
    found = list(reader.read("".join(text + "\n" for text in texts).encode(), 0))
    ranges = [each for f in found if isinstance(f, StepColumns) for each in f.skipped]
    assert ranges == [(9, 11), (16, 17), (20, 24)]
