"""Rows are short at first: the lengths of each step, what is trained of them, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.own_data import Own
from support.runs import build_trainer, metrics

from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_data.run_log.metric_names import LABELS, SEQUENCE_LENGTH, TOKENS, TRUNCATED
from olm_train.callbacks.sequence_length_scheduler import SequenceLengthSchedulerCallback

PREFIX = "--trainer.callbacks.sequence_length_scheduler"
SPLIT = f"{PREFIX}={{min_sequence_length: 8, warmup_steps: 6}}"
CUT = f"{PREFIX}={{min_sequence_length: 8, warmup_steps: 6, truncate: true, keep_multiple_of: 4}}"


def run(mixture: Path, folder: Path, *options: str, stop: int) -> list[dict[str, Any]]:
    build_trainer(mixture, folder, *options, stop=stop, quiet=True).fit()
    return metrics(folder)


def of(lines: list[dict[str, Any]], name: str) -> list[Any]:
    return [line.get(name) for line in lines]


def test_split_rows_get_longer_by_powers_of_two_and_no_token_is_lost(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    lines = run(tiny_mixture, tmp_path / "a", SPLIT, stop=8)
    assert of(lines, SEQUENCE_LENGTH) == [8, 16, 16, 16, 16, 32, 32, 32]
    assert set(of(lines, TOKENS)) == {256}
    assert set(of(lines, TRUNCATED)) == {None}
    plain = run(tiny_mixture, tmp_path / "b", SPLIT, f"{PREFIX}.enabled=false", stop=8)
    assert set(of(plain, SEQUENCE_LENGTH)) == {32}
    assert of(plain, LABELS) == of(lines, LABELS)
    assert of(plain, "rows") == of(lines, "rows")
    assert plain[0]["train/CE loss"] != lines[0]["train/CE loss"]


def test_truncated_rows_leave_tokens_out_and_count_them(tiny_mixture: Path, tmp_path: Path) -> None:
    lines = run(tiny_mixture, tmp_path, CUT, stop=8)
    assert of(lines, SEQUENCE_LENGTH) == [12, 16, 20, 24, 28, 32, 32, 32]
    assert of(lines, TOKENS) == [8 * length for length in of(lines, SEQUENCE_LENGTH)]
    left_out = [8 * (32 - length) for length in of(lines, SEQUENCE_LENGTH)[:6]]
    assert of(lines, TRUNCATED) == [*left_out, None, None]
    assert of(lines, "tokens") == [256 * step for step in range(1, 9)]


@pytest.mark.parametrize("option", [SPLIT, CUT])
def test_a_resumed_run_has_the_same_bits_and_a_repeated_step_too(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    whole = run(tiny_mixture, tmp_path / "a", option, stop=8)
    run(tiny_mixture, tmp_path / "b", option, stop=3)
    again = ["--trainer.callbacks.replay_checker={steps: 2}"]
    every = ["--trainer.callbacks.checkpointer.save_interval=1"]
    run(tiny_mixture, tmp_path / "b", option, *every, stop=5)
    assert run(tiny_mixture, tmp_path / "b", option, *every, *again, stop=8) == whole
    assert "repeated, the same bit for bit" in capsys.readouterr().err


def test_the_loss_ledger_follows_split_rows_and_refuses_truncated_ones(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    ledger = "--trainer.callbacks.loss_ledger={}"
    with_it = run(tiny_mixture, tmp_path / "a", SPLIT, ledger, stop=3)
    assert of(with_it, LABELS) == of(run(tiny_mixture, tmp_path / "b", SPLIT, stop=3), LABELS)
    with pytest.raises(UsageError, match="which documents truncated rows hold"):
        run(tiny_mixture, tmp_path / "c", CUT, ledger, stop=3)


def test_the_defaults_are_a_warm_up_from_128_over_2000_steps() -> None:
    scheduler = SequenceLengthSchedulerCallback()
    scheduler._full = 2048
    lengths = [scheduler.length_at(step) for step in (1, 133, 134, 399, 400, 1999, 2000)]
    assert lengths == [128, 128, 256, 256, 512, 1024, 2048]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("{min_sequence_length: 32}", "not below the sequence length"),
        ("{min_sequence_length: 12}", "not 12 times a power of 2"),
        ("{min_sequence_length: 8, keep_multiple_of: 4}", "no effect without truncate"),
        ("{min_sequence_length: 8, truncate: true}", "8 is below keep_multiple_of 128"),
    ],
)
def test_lengths_that_cannot_be_are_refused(
    tiny_mixture: Path, tmp_path: Path, options: str, says: str
) -> None:
    assert Lock.read(tiny_mixture).sequence_length == 32
    with pytest.raises(UsageError, match=says):
        build_trainer(tiny_mixture, tmp_path, f"{PREFIX}={options}")


def test_it_needs_a_lock() -> None:
    scheduler = SequenceLengthSchedulerCallback()
    scheduler.trainer = type("Run", (), {"data_loader": Own()})()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="sequence_length_scheduler needs a mixture lock"):
        scheduler.post_attach()
