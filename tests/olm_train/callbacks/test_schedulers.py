"""Schedules of batch size and sequence length: what each step holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from support.own_data import Own
from support.runs import STEPS, build_trainer, config_values, metrics

from olm_data.cli import cli
from olm_data.config.values import Values
from olm_data.errors import UsageError, ValidationError
from olm_data.extensions.verify.training import verify_training
from olm_data.mixture.lock import Lock
from olm_data.order.steps import StepSizes
from olm_data.rows.reader import RowReader
from olm_data.run_log.log import RunLog
from olm_data.run_log.metric_names import LABELS, SEQUENCE_LENGTH, TOKENS, TRUNCATED
from olm_data.run_log.run_folder import Run
from olm_train.callbacks.batch_size_scheduler import BatchSizeSchedulerCallback
from olm_train.callbacks.sequence_length_scheduler import (
    SequenceLengthSchedulerCallback,
    split_rows,
    truncate_rows,
)
from olm_train.data.batch import Batch
from olm_train.duration import Duration
from olm_train.run.config import RunConfig
from olm_train.run.dry_run import describe

pytestmark = pytest.mark.xdist_group("batch-sizes")  # its fixtures are made once
SCHEDULER = "--trainer.callbacks.batch_size_scheduler"
GROWING = (
    f"{SCHEDULER}={{batch_sizes: [256, 512, 1024], schedule: [{{value: 0, unit: steps}}, "
    "{value: 1100, unit: tokens}, {value: 8, unit: steps}]}"
)
MICRO = "--train_module.rank_microbatch_size=64"
SIZES = [256] * 5 + [512] * 3 + [1024] * 3


def train(lock: Path, folder: Path, *overrides: str, stop: int | None = None) -> None:
    build_trainer(lock, folder, MICRO, *overrides, stop=stop, quiet=True).fit()


def after(sizes: dict[int, int]) -> str:
    """A schedule: what steps have after so many of them."""
    begins = ", ".join(f"{{value: {step}, unit: steps}}" for step in sizes)
    return f"{{batch_sizes: {[*sizes.values()]}, schedule: [{begins}]}}"


def lines(folder: Path) -> list[dict[str, Any]]:
    """The steps of a log without what depends on the clock."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            key: value
            for key, value in entry.items()
            if key != "time" and not key.startswith("throughput/")
        }
        for entry in entries
        if "eval" not in entry
    ]


@pytest.fixture(scope="module")
def grown(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grown") / "run"
    train(tiny_mixture, folder, GROWING)
    return folder


def test_the_batch_grows_at_its_steps_and_each_step_is_logged_with_its_tokens(grown: Path) -> None:
    log = lines(grown)
    assert [entry["train/tokens"] for entry in log] == SIZES
    assert [entry["tokens"] for entry in log] == [sum(SIZES[: n + 1]) for n in range(len(SIZES))]
    ends = [entry["rows"][1] for entry in log]
    assert [entry["rows"][0] for entry in log] == [0, *ends[:-1]]
    assert log[-1]["optim/lr"] < log[4]["optim/lr"]  # the curve ends with the last step


def test_a_run_resumed_before_at_and_after_a_change_is_the_same_to_the_bit(
    grown: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    for end in (4, 5, 6, 8):
        train(tiny_mixture, tmp_path, GROWING, stop=end)
    assert lines(tmp_path) == lines(grown)[:8]


def test_verify_and_show_know_the_size_of_each_step(grown: Path, tiny_mixture: Path) -> None:
    found = verify_training(Lock.read(tiny_mixture), RunLog.read(grown))
    assert found.agrees, found.problems
    assert (found.steps, found.tokens) == (len(SIZES), sum(SIZES))

    def olm_data(*arguments: str) -> str:
        result = CliRunner().invoke(cli, [*arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    assert olm_data("verify", str(grown)).startswith("agrees           yes\n")
    for step, rows in ((5, 8), (6, 16), (9, 32)):
        command = ["show", "step", str(tiny_mixture), str(step), "--run", str(grown)]
        view = json.loads(olm_data(*command, "--world", "2", "--json"))
        logged = lines(grown)[step - 1]
        assert (view["order"], view["rows_of_step"]) == (logged["order"], rows)
        dealt = [(row["rank"], row["micro_batch"]) for row in view["rows"]]
        assert dealt == [(n // (rows // 2), n % (rows // 2) // 2) for n in range(rows)]
        said = olm_data(*command, "--first", "1").splitlines()[0]
        assert said == f"step {step} of 11, trained: {rows} rows, {rows * 32:,} tokens"


def test_a_log_of_other_sizes_differs(grown: Path, tiny_mixture: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes((grown / "metrics.jsonl").read_bytes())
    starts = (grown / "starts.jsonl").read_text()
    assert '"batch_size_changes":[[6,512],[9,1024]]' in starts
    (tmp_path / "starts.jsonl").write_text(starts.replace("[6,512]", "[7,512]"))
    found = verify_training(Lock.read(tiny_mixture), RunLog.read(tmp_path))
    assert found.problems[:2] == [
        "step 6 has 16 rows, not 8",
        "step 6 trained on 512 tokens, not 256",
    ]
    # without a configuration the sizes of the past are those of the log
    assert [Run.read(str(tmp_path)).batch_sizes.size(n) for n in range(len(SIZES))] == SIZES


def test_the_past_of_a_schedule_is_fixed_and_its_future_may_change(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    train(tiny_mixture, tmp_path, GROWING, stop=6)
    for other in ("{}", after({0: 256, 4: 512})):
        with pytest.raises(ValidationError, match="batch sizes up to step 6: 256 tokens, "):
            train(tiny_mixture, tmp_path, f"{SCHEDULER}={other}")
    other = after({0: 256, 5: 512, 7: 256})
    train(tiny_mixture, tmp_path, f"{SCHEDULER}={other}", stop=9)
    assert [entry["train/tokens"] for entry in lines(tmp_path)] == [256] * 5 + [512] * 2 + [256] * 2
    assert verify_training(Lock.read(tiny_mixture), RunLog.read(tmp_path)).agrees
    starts = RunLog.read(tmp_path).starts
    assert [start.batch_sizes.changes for start in starts] == [
        ((6, 512), (9, 1024)),
        ((6, 512), (8, 256)),
    ]
    assert Run.read(str(tmp_path)).batch_sizes == starts[-1].batch_sizes


def test_durations_in_tokens_and_the_dry_run_count_what_each_step_holds(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    values = Values(config_values(tiny_mixture, tmp_path))
    for override in (GROWING, MICRO, "--trainer.max_duration={value: 3000, unit: tokens}"):
        values.override(override)
    config = RunConfig.resolve(values)
    text = describe(config, 2)
    assert "9 steps of 256, then 512, then 1,024 tokens: 3,840 tokens" in text
    assert "steps 1 to 5, 256 tokens each: 2 ranks x 2 micro-batches of 64 tokens" in text
    assert "steps 9 to 9, 1,024 tokens each: 2 ranks x 8 micro-batches of 64 tokens" in text


@pytest.mark.parametrize(("scaling", "power"), [("none", -0.5), ("linear", 0.5)])
def test_the_learning_rate_follows_the_root_of_the_batch_unless_told_otherwise(
    grown: Path, tiny_mixture: Path, tmp_path: Path, scaling: str, power: float
) -> None:
    option = f"--train_module.lr_batch_scaling={scaling}"
    train(tiny_mixture, tmp_path, GROWING, option, stop=6)
    rates = [[entry["optim/lr"] for entry in lines(folder)[:6]] for folder in (grown, tmp_path)]
    assert rates[1][:5] == rates[0][:5]
    assert rates[1][5] == pytest.approx(rates[0][5] * 2**power, rel=1e-12)
    values = Values(config_values(tiny_mixture, tmp_path))
    for override in (GROWING, option):
        values.override(override)
    assert f"lr at step  6: {rates[1][5]:.3e}" in describe(RunConfig.resolve(values), 1)


def sizes_of(*begins: Duration, batch_sizes: tuple[int, ...] = (8, 24, 8)) -> StepSizes:
    given = list(batch_sizes[: len(begins)])
    return BatchSizeSchedulerCallback(batch_sizes=given, schedule=list(begins)).sizes(8, 5)


def test_a_size_comes_with_the_first_step_that_begins_after_its_tokens() -> None:
    for tokens, first in ((1, 1), (8, 1), (9, 2), (16, 2), (17, 3)):
        found = sizes_of(Duration.steps(0), Duration.tokens(tokens))
        assert found.sizes_from == ((0, 8), (first, 24))
    mixed = sizes_of(Duration.tokens(0), Duration.steps(2), Duration.tokens(17))
    assert mixed.sizes_from == ((0, 8), (2, 24), (3, 8))
    parameters = sizes_of(Duration.steps(0), Duration.chinchilla(0.5))  # 50 tokens
    assert parameters.sizes_from == ((0, 8), (7, 24))
    assert sizes_of() == StepSizes.constant(8)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_sizes": [8]}, "1 batch_sizes have 0 beginnings"),
        ({"batch_sizes": [8], "schedule": [Duration.steps(1)]}, "first size begins after 1 step"),
        ({"batch_sizes": [8], "schedule": [Duration.epochs(0)]}, "how long an epoch is"),
        ({"batch_sizes": [0], "schedule": [Duration.steps(0)]}, "batch_sizes"),
    ],
)
def test_a_schedule_that_is_no_schedule_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        BatchSizeSchedulerCallback(**options)


@pytest.mark.parametrize(
    ("begins", "sizes", "says"),
    [
        ((0, 9, 2), (8, 16, 32), "they come to steps 1, 10, 3"),
        ((0, 3, 3), (8, 16, 32), "they come to steps 1, 4, 4"),
        ((0, 3), (16, 32), "the first of the batch_sizes is 16"),
    ],
)
def test_steps_that_are_not_in_order_are_refused(
    begins: tuple[int, ...], sizes: tuple[int, ...], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        sizes_of(*map(Duration.steps, begins), batch_sizes=sizes)


def test_it_is_given_to_the_trainer_with_the_others(tiny_mixture: Path, tmp_path: Path) -> None:
    late = BatchSizeSchedulerCallback(
        batch_sizes=[256, 512], schedule=[Duration.steps(0), Duration.steps(5)]
    )
    with pytest.raises(UsageError, match="comes too late"):
        build_trainer(tiny_mixture, tmp_path).add_callback("batch_size_scheduler", late)


def test_a_loader_of_ones_own_has_one_size_unless_it_says_more() -> None:
    with pytest.raises(UsageError, match="the steps of this data loader have one size"):
        Own().schedule_sizes(StepSizes.constant(8))


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


ROWS = np.arange(2 * STEPS, dtype=np.int64)
NAMES = ("input_ids", "labels", "doc_start", "positions", "rows")


def ends(batch: Batch) -> list[int]:
    return sorted(set(batch.cu_seqlens.tolist()))


@pytest.mark.parametrize("parts", [1, 2, 4, 32])
def test_rows_cut_into_parts_are_those_of_a_stage_of_that_length(
    tiny_mixture: Path, parts: int
) -> None:
    windows = RowReader(tiny_mixture).prepare(ROWS)
    whole = Batch.from_rows(windows.read(0, len(ROWS)))
    wanted = Batch.from_rows(windows.read(0, len(ROWS), parts))
    found = split_rows(whole, 32 // parts)
    for name in NAMES:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
        assert getattr(found, name).dtype == getattr(wanted, name).dtype
    assert found.max_seqlen == wanted.max_seqlen == 32 // parts
    assert ends(found) == ends(wanted)
    offsets = found.cu_seqlens.tolist()
    assert offsets == sorted(offsets)
    assert found.cu_seqlens.dtype == wanted.cu_seqlens.dtype
    assert len(set(offsets)) == int(np.searchsorted(offsets, offsets[-1])) + 1  # padded at the end


@pytest.mark.parametrize("length", [1, 7, 31, 32])
def test_truncated_rows_are_the_beginnings_of_rows(tiny_mixture: Path, length: int) -> None:
    whole = Batch.from_rows(RowReader(tiny_mixture).prepare(ROWS).read(0, len(ROWS)))
    found = truncate_rows(whole, length)
    for name in NAMES[:-1]:
        assert torch.equal(getattr(found, name), getattr(whole, name)[:, :length]), name
    assert torch.equal(found.rows, whole.rows)
    assert found.max_seqlen == length
    # A piece begins where positions do.
    begins = (found.positions.flatten() == 0).nonzero().flatten().tolist()
    assert ends(found) == [*begins, len(ROWS) * length]
