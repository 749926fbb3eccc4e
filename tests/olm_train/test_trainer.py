"""The loop: hooks in order, lengths, stopping and starting, metrics read once, what is refused."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.distributed import run_ranks
from support.own_data import Own
from support.runs import STEPS, build_trainer, group_world, metrics, steps_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from olm_data.errors import ConflictError, InputError, UsageError, ValidationError
from olm_data.order.steps import StepSizes
from olm_train.callbacks.base import Callback
from olm_train.distributed.world import World
from olm_train.duration import Duration, DurationUnit
from olm_train.metrics import MetricsBuffer, Reduce
from olm_train.trainer import next_batches


class Recorder(Callback):
    """Writes down each hook with the step it saw."""

    def __init__(self, log: list[str], name: str = "", priority: int = 0) -> None:
        self.log, self.name = log, name
        self.priority = priority  # type: ignore[misc]
        self.count = 0

    def _note(self, hook: str) -> None:
        self.log.append(f"{self.name}{hook}@{self.trainer.step}")

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]

    def pre_train(self) -> None:
        self._note("pre_train")

    def pre_step(self, batches: Sequence[Any]) -> None:
        assert len(batches) == 2  # 256 tokens by 128 on one rank
        assert "olm-watchdog" in {thread.name for thread in threading.enumerate()}
        self._note("pre_step")

    def pre_optim_step(self) -> None:
        self._note("pre_optim_step")

    def post_step(self) -> None:
        self.count += 1
        self._note("post_step")

    def post_checkpoint_saved(self, folder: str) -> None:
        self._note(f"saved {Path(folder).name}")

    def pre_log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        metrics["mine"] = float(step)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note(f"log {step}")

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        self._note(f"evaluation {step}")

    def post_train(self) -> None:
        self._note("post_train")

    def on_error(self, error: BaseException) -> None:
        self._note(f"error {error}")

    def close(self) -> None:
        self._note("close")


def stop_at(step: int) -> str:
    return f"--trainer.hard_stop={{value: {step}, unit: steps}}"


def test_hooks_run_in_the_stated_order(tiny_mixture: Path, tmp_path: Path) -> None:
    log: list[str] = []
    build_trainer(
        tiny_mixture,
        tmp_path,
        "--trainer.callbacks.checkpointer.save_interval=2",
        stop=3,
        callbacks={"recorder": Recorder(log)},
    ).fit()
    step = ["pre_step@{0}", "pre_optim_step@{0}"]
    assert log == [
        "pre_train@0",
        *[text.format(0) for text in step],
        "post_step@1",
        *[text.format(1) for text in step],
        "post_step@2",
        "log 1@2",  # read from the device every second step
        "log 2@2",
        "saved step00000002@2",
        *[text.format(2) for text in step],
        "post_step@3",
        "log 3@3",
        "evaluation 3@3",
        "saved step00000003@3",
        "post_train@3",
        "close@3",
    ]
    assert [line["mine"] for line in steps_of(tmp_path)] == [1.0, 2.0, 3.0]


def test_an_error_reaches_the_callbacks_and_the_caller(tiny_mixture: Path, tmp_path: Path) -> None:
    log: list[str] = []
    trainer = build_trainer(tiny_mixture, tmp_path, callbacks={"recorder": Recorder(log)})

    def fail(*_: object, **options: object) -> None:
        raise RuntimeError("boom")

    trainer.train_module.train_step = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit()
    assert log[-2:] == ["error boom@0", "close@0"]


@pytest.mark.parametrize(
    ("option", "steps"),
    [
        ("--trainer.max_duration={value: 5, unit: steps}", 5),
        ("--trainer.max_duration={value: 1025, unit: tokens}", 5),
        ("--trainer.max_duration={value: 1, unit: epochs}", STEPS),
        ("--trainer.hard_stop={value: 512, unit: tokens}", 2),
        ("--trainer.hard_stop={value: 999, unit: steps}", STEPS),
    ],
)
def test_a_run_is_as_long_as_it_was_told(
    tiny_mixture: Path, tmp_path: Path, option: str, steps: int
) -> None:
    assert build_trainer(tiny_mixture, tmp_path, option).stop_step == steps


def test_hard_stop_leaves_the_learning_rate_alone_and_max_duration_moves_it(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    rates = {}
    for name, option in (
        ("whole", stop_at(4)),
        ("short", "--trainer.max_duration={value: 4, unit: steps}"),
    ):
        build_trainer(
            tiny_mixture, tmp_path / name, option, "--train_module.scheduler.warmup=1"
        ).fit()
        rates[name] = [line["optim/lr"] for line in steps_of(tmp_path / name)]
    assert rates["short"][-1] == pytest.approx(1e-3)  # alpha_f of the peak
    assert rates["whole"][-1] > 9e-3


def test_the_collect_interval_changes_nothing_but_when(tiny_mixture: Path, tmp_path: Path) -> None:
    for interval in (1, 3, 100):
        build_trainer(
            tiny_mixture,
            tmp_path / str(interval),
            f"--trainer.metrics_collect_interval={interval}",
            stop=4,
        ).fit()
    assert metrics(tmp_path / "1") == metrics(tmp_path / "3") == metrics(tmp_path / "100")


def test_going_on_says_when_the_schedule_changed(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(tiny_mixture, tmp_path, "--trainer.max_duration={value: 6, unit: steps}").fit()
    build_trainer(tiny_mixture, tmp_path, stop=7).fit()
    assert "the schedule is 24 steps long, it was 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("duration", "says"),
    [
        ("{value: 2, unit: epochs}", "the mixture lock holds 24"),
        ("{value: 2, unit: steps}", "warm-up of 4 steps does not fit"),
    ],
)
def test_a_length_that_does_not_fit_is_refused_before_the_run_starts(
    tiny_mixture: Path, tmp_path: Path, duration: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        build_trainer(tiny_mixture, tmp_path, f"--trainer.max_duration={duration}")


def test_another_model_batch_size_or_mixture_is_refused_with_the_difference(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    from support.runs import MANIFEST
    from support.stand_in import parse_mixture

    from olm_data.mixture.mix import MixPlan, open_sources

    build_trainer(tiny_mixture, tmp_path / "run", stop=2).fit()
    folder, other = tiny_mixture.parent, tmp_path / "other.lock.json"
    seeded = MANIFEST.replace("seed: 5", "seed: 6")
    mixture = parse_mixture(seeded, str(folder / "m.yaml"), str(folder))
    MixPlan(mixture, open_sources(mixture), str(tmp_path)).compile().write(other)
    for lock, options, says in (
        (tiny_mixture, ["--model.d_model=32"], "model.d_model: 16 -> 32"),
        (tiny_mixture, ["--data_loader.global_batch_size=512"], "global_batch_size: 256 -> 512"),
        (other, [], "seed: checkpoint has 5, this lock has 6"),
    ):
        with pytest.raises(ValidationError, match=says):
            build_trainer(lock, tmp_path / "run", *options, stop=4, quiet=True).fit()


def test_load_strategies(tiny_mixture: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="no usable checkpoint"):
        build_trainer(tiny_mixture, tmp_path, "--trainer.load_strategy=always").fit()
    build_trainer(tiny_mixture, tmp_path, "--trainer.load_strategy=never", stop=2).fit()
    with pytest.raises(ConflictError, match="there is a run here already"):
        build_trainer(tiny_mixture, tmp_path, "--trainer.load_strategy=never").fit()
    trainer = build_trainer(tiny_mixture, tmp_path, "--trainer.load_strategy=always", stop=3)
    trainer.fit()
    assert trainer.resumed


def test_mandatory_callbacks_are_added_and_each_can_be_switched_off(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    names = {"console_logger", "garbage_collector", "metrics_logger"}
    names |= {"speed_monitor", "environment", "watchdog", "lr_monitor"}
    assert names <= set(build_trainer(tiny_mixture, tmp_path).callbacks)
    all_of_them = (*sorted(names), "checkpointer", "lm_evaluator")
    off = [f"--trainer.callbacks.{name}.enabled=false" for name in all_of_them]
    trainer = build_trainer(tiny_mixture, tmp_path, *off, stop=2)
    assert trainer.callbacks == {}
    trainer.fit()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["config.json", "lease-000001.json"]


def test_the_resolved_configuration_lies_in_the_folder_and_in_each_checkpoint(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    build_trainer(tiny_mixture, tmp_path, stop=1).fit()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved == json.loads((tmp_path / "step00000001" / "config.json").read_text())
    assert saved["model"]["vocab_size"] == 512
    assert saved["train_module"]["optim"]["lr"] == 1e-2


def _drawn() -> tuple[list[bool], list[str]]:
    rank = dist.get_rank()
    world = World(rank=rank, size=2, neighbours=range(2))
    loader: Any = Own(None, ends=2 + rank)  # rank 1 has a step more
    said: list[str] = []
    steps = iter(loader)
    given = [next_batches(steps, loader, world, reached=n, say=said.append) for n in range(3)]
    return [batches is not None for batches in given], said


def test_data_of_unknown_length_end_on_all_ranks_at_once_and_what_is_left_out_is_said() -> None:
    end = "the data ended after step 2; a step that the ranks 1 still had is left out"
    assert run_ranks(_drawn, 2) == [([True, True, False], [end])] * 2


def test_an_end_before_the_length_that_was_said_is_an_error() -> None:
    for loader, kind in ((Own(3), ValidationError), (Own(None), InputError)):
        with pytest.raises(kind):
            next_batches(iter([]), loader, World(), reached=0, say=print)


def to_steps(duration: Duration, *, batch: int = 10, epoch: int = 3, num_params: int = 7) -> int:
    return duration.to_steps(
        batch_sizes=StepSizes.constant(batch), steps_per_epoch=epoch, num_params=num_params
    )


@given(st.integers(1, 10**15), st.integers(1, 10**9))
def test_tokens_round_up_to_whole_steps(tokens: int, batch: int) -> None:
    steps = to_steps(Duration.tokens(tokens), batch=batch)
    assert (steps - 1) * batch < tokens <= steps * batch


def test_steps_and_epochs_are_exact() -> None:
    assert to_steps(Duration.steps(7)) == 7
    assert to_steps(Duration.epochs(2)) == 6


@given(st.integers(1, 10**12), st.integers(1, 10**9), st.sampled_from([0.5, 1, 2.5, 10]))
def test_chinchilla_is_twenty_tokens_for_each_parameter(
    num_params: int, batch: int, multiple: float
) -> None:
    steps = to_steps(Duration.chinchilla(multiple), batch=batch, num_params=num_params)
    assert steps == math.ceil(math.ceil(num_params * int(multiple * 20)) / batch)


@pytest.mark.parametrize("unit", ["steps", "tokens", "epochs"])
@pytest.mark.parametrize("value", [-1, 1.5])
def test_a_duration_that_is_negative_or_not_whole_is_refused(value: float, unit: str) -> None:
    with pytest.raises(UsageError, match="is a whole number of"):
        Duration(value=value, unit=DurationUnit(unit))


@pytest.mark.parametrize("value", [-0.5, math.inf, math.nan])
def test_a_negative_or_endless_multiple_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match=r"0 or more|a number, not"):
        Duration.chinchilla(value)


def test_a_duration_reads_as_a_sentence() -> None:
    assert str(Duration.steps(1)) == "1 step"
    assert str(Duration.tokens(20_000)) == "20,000 tokens"
    assert str(Duration.chinchilla(0.5)) == "10 tokens a parameter"


def test_values_come_out_as_they_went_in_by_ascending_step_and_once() -> None:
    buffer = MetricsBuffer()
    third = torch.tensor(1 / 3)
    buffer.record(2, {"a": third, "b": 0.1})
    buffer.record(1, {"a": torch.tensor(2**53 - 1), "c": torch.tensor([1.5])})
    buffer.record(2, {"d": 7})
    assert buffer.collect(10**9) == [
        (1, {"a": float(2**53 - 1), "c": 1.5}),
        (2, {"a": third.item(), "b": 0.1, "d": 7.0}),
    ]
    assert buffer.collect(10**9) == []


def test_a_recorded_tensor_may_change_its_graph_but_not_its_value() -> None:
    weight = torch.ones((), requires_grad=True)
    buffer = MetricsBuffer()
    buffer.record(1, {"loss": weight * 2})
    ((_, metrics),) = buffer.collect(10**9)
    assert metrics == {"loss": 2.0}


@pytest.mark.parametrize(
    ("name", "value", "reduce"),
    [
        ("x", "text", None),
        ("x", None, None),
        ("x", torch.ones(3), None),
        ("x", torch.tensor(1j), None),
        ("x", 10**400, None),
        ("x", 1.0, "median"),
        ("", 1.0, None),
        ("two\nlines", 1.0, None),
        (3, 1.0, None),
    ],
)
def test_what_is_no_metric_is_refused_where_it_is_recorded(
    name: Any, value: Any, reduce: Any
) -> None:
    with pytest.raises(UsageError):
        MetricsBuffer().record_one(1, name, value, reduce)


def test_a_reduction_may_be_given_by_name() -> None:
    buffer = MetricsBuffer()
    buffer.record_one(1, "x", 2, "mean")  # type: ignore[arg-type]
    assert buffer.collect(1) == [(1, {"x": 2.0})]


def recorded() -> tuple[Any, str]:
    world = group_world()
    sharded = distribute_tensor(
        torch.arange(1.0, 7.0), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
    )
    buffer = MetricsBuffer(world)
    buffer.record_one(1, "norm", sharded.norm(), None)
    buffer.record_one(1, "largest", sharded.max(), Reduce.max)
    buffer.record_one(1, "mean", sharded.mean(), Reduce.sum)
    buffer.record_one(1, "plain", world.rank, Reduce.sum)
    for kind in Reduce:
        buffer.record_one(1, f"by {kind}", float(world.rank + 1), kind)
    if world.rank == 1:
        buffer.record_one(1, "here alone", 7.0, Reduce.mean)
    collected = buffer.collect(1)
    assert buffer.collect(1) == []
    if world.main:
        buffer.record_one(2, "norm", sharded.norm(), None)
    try:
        return collected, str(buffer.collect(2))
    except UsageError as error:
        return collected, error.what


def test_ranks_reduce_what_they_have_and_a_sharded_value_is_that_of_all_shards() -> None:
    norm = float(torch.arange(1.0, 7.0).norm())
    for ((_, found),), refused in run_ranks(recorded, 2):
        assert found["norm"] == pytest.approx(norm, rel=1e-6)
        assert (found["largest"], found["mean"], found["plain"]) == (6.0, 7.0, 1.0)
        by_kind = [found[f"by {kind}"] for kind in ("mean", "sum", "max", "min")]
        assert by_kind == [1.5, 3.0, 2.0, 1.0]
        assert found["here alone"] == 7.0
        assert "'norm' of step 2 is sharded, and was not recorded on every rank" in refused
