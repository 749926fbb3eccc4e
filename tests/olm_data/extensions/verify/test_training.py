"""Planned against trained: what real runs logged, and each way in which a log can differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.runs import build_trainer
from support.small_datasets import random_shards, write_mixture

from olm_data.cli import cli
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.extensions.verify.training import TrainingReport, read_log, verify_training
from olm_data.mixture.lock import Lock
from olm_data.order.steps import KeptRows, clip_ranges, order_digest
from olm_data.run_log.log import METRICS, STARTS, RunLog, Start, Step
from olm_data.run_log.metric_names import TOKENS
from olm_train.callbacks.base import Callback

S, BATCH = 8, 6  # tokens of a row, rows of a step


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Lock:
    """Several epochs of each source, and a stage of shorter rows."""
    sources = {
        name: random_shards(i, [[5, 3, 9, 24, 1, 1, 6]]) for i, name in enumerate(("web", "code"))
    }
    path = write_mixture(
        tmp_path_factory.mktemp("mixture"),
        sources,
        stages=[(40 * S, {"web": 3, "code": 1}), (23 * S, {"code": 1, "web": 1})],
        sequence_length=S,
        lengths=(4, S),
    )
    return Lock.read(path)


def start(lock: Lock, skip: Any = (), **changes: Any) -> Start:
    fields = {"step": 0, "rewound": 0, "lock": lock.digest, "world_size": 1, "skip": tuple(skip)}
    return Start(**{**fields, "global_batch_size": BATCH * S, **changes})


def step(lock: Lock, number: int, rows: Any, skipped: Any = (), trained: int = BATCH * S) -> Step:
    kept = KeptRows(lock.total_rows, skipped)
    count = rows[1] - rows[0] - sum(b - a for a, b in skipped)
    return Step(
        step=number,
        tokens=number * BATCH * S,
        rows=rows,
        skipped=tuple(skipped),
        order=order_digest(lock.digest, kept.rows(np.arange(rows[0], rows[0] + count))),
        metrics={TOKENS: trained},
        line=number,
    )


def steps_of(lock: Lock, count: int, skip: Any = ()) -> list[Step]:
    """The first steps of a run, as the trainer logs them."""
    kept, steps = KeptRows(lock.total_rows, skip), []
    for number in range(count):
        rows = kept.rows(np.arange(number * BATCH, number * BATCH + BATCH))
        span = int(rows[0]), int(rows[-1]) + 1
        steps.append(step(lock, number + 1, span, clip_ranges(kept.skip, *span)))
    return steps


def verified(lock: Lock, steps: list[Step], *starts: Start) -> TrainingReport:
    return verify_training(lock, RunLog(folder=Path("run"), starts=list(starts), steps=steps))


@given(data=st.data())
def test_accounts_are_those_of_counting_row_by_row(lock: Lock, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, lock.total_rows), max_size=6)))
    skip = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    kept = KeptRows(lock.total_rows, skip)
    steps = steps_of(lock, data.draw(st.integers(0, kept.count // BATCH)), skip)
    found = verified(lock, steps, start(lock, skip))
    assert found.agrees, found.problems
    assert (found.steps, found.tokens) == (len(steps), len(steps) * BATCH * S)

    reached = steps[-1].rows[1] if steps else 0
    left_out = {row for a, b in kept.skip for row in range(a, min(b, reached))}
    place = lock.schedule().locate(np.arange(lock.total_rows))
    keys = list(
        zip(
            [lock.stages[i].name for i in place.stage],
            [lock.sources[i].name for i in place.source],
            place.epoch.tolist(),
            strict=True,
        )
    )
    planned, due = Counter(keys), Counter(keys[:reached])
    skipped = Counter(keys[row] for row in left_out)
    assert {(a.stage, a.source, a.epoch): a.planned for a in found.accounts} == planned
    for account in found.accounts:
        key = (account.stage, account.source, account.epoch)
        assert (account.due, account.skipped) == (due[key], skipped[key])
        assert (account.trained, account.difference) == (due[key] - skipped[key], 0)


Change = Callable[[list[Step], Callable[..., Step]], Any]


@pytest.mark.parametrize(
    ("change", "says", "difference"),
    [
        (lambda s, step: s.insert(3, s[2]), "6 rows trained more than once: [12, 18)", 6),
        (lambda s, step: s.pop(2), "6 rows neither trained nor skipped: [12, 18)", -6),
        (lambda s, step: s.pop(2), "step 4 stands where step 3 should", -6),
        (lambda s, step: s.__setitem__(2, step(3, (12, 17))), "step 3 has 5 rows, not 6", -1),
        (lambda s, step: s.__setitem__(2, step(3, (12, 18), (), 40)), "on 40 tokens, not 48", 0),
        (lambda s, step: s.__setitem__(1, step(2, (5, 11))), "1 row trained more than once", 0),
        (lambda s, step: s.append(step(6, (60, 66))), "3 rows not in the lock: [63, 66)", -30),
        (lambda s, step: s.__setitem__(1, replace(s[1], order="0" * 64)), "digest is 0000", 0),
        (lambda s, step: s.__setitem__(1, replace(s[1], order=None)), "no order digest", 0),
        (lambda s, step: s.__setitem__(1, replace(s[1], tokens=1)), "ends at 1 tokens, not 96", 0),
        (
            lambda s, step: s.__setitem__(1, replace(s[1], rows=(6, 14), skipped=((12, 14),))),
            "step 2 (line 2 of metrics.jsonl): its rows begin or end with a skipped one", 0,
        ),
    ],
)  # fmt: skip
def test_each_way_to_differ_is_named(
    lock: Lock, change: Change, says: str, difference: int
) -> None:
    steps = steps_of(lock, 5)
    change(steps, partial(step, lock))
    found = verified(lock, steps, start(lock))
    assert not found.agrees
    assert says in "\n".join(found.problems)
    assert sum(account.difference for account in found.accounts) == difference


def test_skipped_rows_that_were_trained_and_rows_left_out_unasked_differ(lock: Lock) -> None:
    found = verified(lock, steps_of(lock, 5), start(lock, [(3, 5)]))
    assert found.problems == ["2 rows trained though the run skips them: [3, 5)"]
    found = verified(lock, steps_of(lock, 5, [(3, 5)]), start(lock))
    assert found.problems == ["2 rows neither trained nor skipped: [3, 5)"]


def test_another_lock_differs(lock: Lock) -> None:
    found = verified(lock, [], msgspec.structs.replace(start(lock), lock="f" * 64), start(lock))
    assert len(found.problems) == 1
    assert "f" * 64 in found.problems[0]


class FailsAfter(Callback):
    """Ends a run like a crash, once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def post_step(self) -> None:
        if self.trainer.step == self.step:
            raise RuntimeError("crash")


def run_verify(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["verify", *map(str, arguments)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value or 0), result.stdout


def test_a_real_run_with_skips_a_crash_and_a_resume_agrees_and_a_changed_log_does_not(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ["--trainer.hard_stop={value: 10, unit: steps}"]
    options.append("--trainer.callbacks.lm_evaluator.enabled=false")
    first = [*options, "--data_loader.skip=[[5, 9], [16, 24], [70, 74]]"]
    crash = build_trainer(tiny_mixture, run, *first, callbacks={"crash": FailsAfter(9)})
    with pytest.raises(RuntimeError, match="crash"):
        crash.fit()
    build_trainer(tiny_mixture, run, *options, "--data_loader.skip=[[80, 85]]").fit()

    code, out = run_verify(run, "--json")
    found = json.loads(out)
    assert (code, found["agrees"], found["problems"]) == (0, True, [])
    assert (found["steps"], found["tokens"], found["rewound"]) == (10, 2560, 2)
    assert [s["step"] for s in found["starts"]] == [0, 6]
    # rows 70 to 73 were still ahead of the checkpoint and are not skipped any more
    assert found["skipped"] == [[5, 9], [16, 24], [80, 85]]
    assert found["starts"][1]["skip"] == [[5, 9], [16, 24], [80, 85]]
    assert sum(account["skipped"] for account in found["accounts"]) == 12 + 5
    assert sum(account["trained"] for account in found["accounts"]) == 80
    lock = Lock.read(tiny_mixture)
    planned = [sum(stage.rows_by_source[i] for stage in lock.stages) for i in range(2)]
    for source, rows in zip(lock.sources, planned, strict=True):
        mine = [a["planned"] for a in found["accounts"] if a["source"] == source.name]
        assert sum(mine) == rows
    code, out = run_verify(run)
    assert code == 0
    assert "rewound          2\n" in out
    assert "skipped          16, 24\n" in out

    lines = (run / METRICS).read_text().splitlines(keepends=True)
    (run / METRICS).write_text("".join([*lines[:4], *lines[5:]]))
    code, out = run_verify(run)
    assert code == 3
    assert "rows neither trained nor skipped" in out
    assert "step 6 stands where step 5 should" in out


def test_a_folder_without_a_log_or_lock_says_what_to_do(lock: Lock, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"starts\.jsonl is missing"):
        read_log(tmp_path)
    fields = {name: getattr(start(lock), name) for name in Start.__struct_fields__}
    (tmp_path / STARTS).write_text(json.dumps(fields) + "\n" + '{"torn')
    with pytest.raises(InputError, match=r"metrics\.jsonl is missing"):
        run_verify(tmp_path)
    order = order_digest(lock.digest, np.arange(6))
    line = json.dumps({"step": 1, "tokens": 48, "rows": [0, 6], "order": order})
    (tmp_path / METRICS).write_text(line + '\n{"step": 2')
    with pytest.raises(InputError, match="--lock") as caught:
        run_verify(tmp_path)
    assert caught.value.exit_code == 4
    path = tmp_path / "some.lock.json"
    path.write_bytes(lock.encode())
    code, out = run_verify(tmp_path, "--lock", path)
    assert (code, "agrees           yes\n" in out) == (0, True)
    for words in (("--sample", "1%"), ("--deep",), ("--seed", "3"), ("--root", tmp_path)):
        with pytest.raises(UsageError, match=f"{words[0]} is for datasets, and this is a run"):
            run_verify(tmp_path, "--lock", path, *words)
    with pytest.raises(UsageError, match="--lock is for the folder of a run"):
        run_verify(path, "--lock", path)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"step": 1, "tokens": 48, "rows": [6, 0]}',
        '{"step": 1, "tokens": 48, "rows": [0, 6], "skipped": [[9, 10]]}',
        "{",
    ],
)
def test_a_malformed_log_is_refused_with_its_line(lock: Lock, tmp_path: Path, line: str) -> None:
    fields = {name: getattr(start(lock), name) for name in Start.__struct_fields__}
    (tmp_path / STARTS).write_text(json.dumps(fields) + "\n")
    (tmp_path / METRICS).write_text('{"step": 1, "eval": {}}\n' + line + "\n")
    with pytest.raises(ValidationError) as caught:
        RunLog.read(tmp_path)
    assert str(caught.value.why).startswith("line 2: ")
