"""Callbacks of every run: its lines, its log, its speed and rates, its versions, its garbage."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from support.full_disk import files_of_at_most
from support.own_data import Own
from support.runs import build_trainer, metrics, steps_of

from olm_data.errors import ResourceError, UsageError
from olm_data.run_log.log import read_ends, read_starts
from olm_train.callbacks.base import Callback
from olm_train.callbacks.environment import EnvironmentCallback, describe, packages
from olm_train.callbacks.speed_monitor import SpeedMonitorCallback
from olm_train.distributed.preempt import Preempted, StopRequest
from olm_train.duration import Duration
from olm_train.extensions.any_model.train_module import BasicTrainModule
from olm_train.trainer import Trainer


def test_one_line_an_interval_and_at_both_ends(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(
        tiny_mixture, tmp_path, "--trainer.callbacks.console_logger.log_interval=3", stop=7
    ).fit()
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        "1/7", "3/7", "6/7", "7/7",
    ]  # fmt: skip
    assert re.fullmatch(
        r"step 6/7   loss \d\.\d{4}   lr \S+   grad norm \S+   \S+( K)? tok/s   wait \S+%   ETA .+",
        next(line for line in lines if line.startswith("step 6/7")),
    )
    assert lines[0].startswith("training 21.6 K parameters to step 7 (1.79 K tokens) on 1 CPU rank")
    assert lines[1].startswith(
        "attention sdpa; loss plain: logits of a micro-batch need 0.000655 GB"
    )
    assert lines[-1] == "finished at step 7 (1.79 K tokens)"


def test_metrics_that_are_asked_for_get_lines_at_their_own_interval(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = "--trainer.callbacks.console_logger"
    asked = (f"{prefix}.metrics=[optim/lr*, train/tokens]", f"{prefix}.log_interval=7")
    shown = []
    for more in ((), (f"{prefix}.metrics_log_interval=3",)):
        build_trainer(tiny_mixture, tmp_path / str(len(more)), *asked, *more, stop=7).fit()
        lines = capsys.readouterr().err.splitlines()
        shown.append([line for line in lines if line.startswith("metrics of step")])
        names = {line.split(" = ")[0].strip() for line in lines if line.startswith("    ")}
        assert names == {"optim/lr", "train/tokens"}
    assert shown[0] == ["metrics of step 1", "metrics of step 7"]
    assert shown[1] == [f"metrics of step {step}" for step in (1, 3, 6, 7)]
    with pytest.raises(UsageError, match="has no effect without metrics"):
        build_trainer(tiny_mixture, tmp_path, f"{prefix}.metrics_log_interval=3")


def test_rows_at_the_end_of_the_mixture_that_are_not_trained_on_are_said(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "note: 2 rows at the end fill no step and are not trained on"
    size = "--data_loader.global_batch_size=6080"  # 190 of the mixture's 192 rows
    micro = "--train_module.rank_microbatch_size=3040"
    constant = "--train_module.scheduler={name: constant}"
    build_trainer(tiny_mixture, tmp_path, size, micro, constant, quiet=True).fit()
    assert note in capsys.readouterr().err.splitlines()
    build_trainer(tiny_mixture, tmp_path / "stopped", quiet=True, stop=1).fit()
    assert "at the end fill no step" not in capsys.readouterr().err


def test_numbers_are_the_floats_of_the_device(tiny_mixture: Path, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, stop=3)
    step, seen = trainer.train_module.train_step, []

    def watched(*arguments: object, **options: object) -> object:
        result = step(*arguments, **options)  # type: ignore[arg-type]
        seen.append({name: float(value) for name, value in result.items()})
        assert seen[-1].pop("optim/non-finite") == 0  # logged where it is 1, see row 57
        return result

    trainer.train_module.train_step = watched  # type: ignore[method-assign,assignment]
    trainer.fit()
    written = steps_of(tmp_path)
    for number, (line, expected) in enumerate(zip(written, seen, strict=True), start=1):
        assert line == {
            "step": number,
            "tokens": 256 * number,
            "rows": [8 * number - 8, 8 * number],
            "order": trainer.data_loader.order_digest(number - 1),
            **expected,
        }


def test_a_new_run_does_not_go_on_in_an_old_file(tiny_mixture: Path, tmp_path: Path) -> None:
    lines = [{"step": n, "tokens": 9 * n, "rows": [n, n + 1]} for n in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    build_trainer(tiny_mixture, tmp_path, stop=2).fit()
    steps = [line["step"] for line in steps_of(tmp_path)]
    assert steps == [1, 2]


def test_a_resume_tells_what_the_log_has_lost(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(steps: int) -> str:
        build_trainer(tiny_mixture, tmp_path, stop=steps).fit()
        return capsys.readouterr().err

    assert "warning:" not in run(2) + run(3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join([lines[0], *lines[2:]]) + '{"step": 4')
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"step"')
    said = run(4)
    for part in (
        "metrics.jsonl has no line of step 2",
        "metrics.jsonl is cut off after 10 bytes",
        "starts.jsonl is cut off after 7 bytes",
    ):
        assert f"{part}" in said
    (tmp_path / "metrics.jsonl").unlink()
    assert "metrics.jsonl is missing" in run(5)
    for name in ("metrics.jsonl", "starts.jsonl"):
        (tmp_path / name).unlink()
    assert "metrics.jsonl and starts.jsonl are missing or empty: what was trained" in run(6)


def test_each_start_says_how_it_ended(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "abcdefgh12345678")
    ended = []

    def run(steps: int, *, at: int = 0, error: BaseException | None = None) -> None:
        class Ends(Callback):
            def post_step(self) -> None:
                if self.trainer.step == at and error is not None:
                    raise error
                if self.trainer.step == at:
                    self.trainer.cancel_run("it is low enough", by="my_rule")

        trainer = build_trainer(tiny_mixture, tmp_path, stop=steps, callbacks={"ends": Ends()})
        with contextlib.suppress(ValueError, Preempted):
            trainer.fit()
        end = read_ends(tmp_path)[-1]
        assert end.time > 1e9
        ended.append((end.step, end.reason, end.by, end.why))

    run(2)
    run(9, at=3, error=ValueError("no such key abcdefgh12345678\n\x1b[31m"))
    request = StopRequest(code=15, rank=0, by="SIGTERM")
    run(9, at=4, error=Preempted(request, 4))
    run(9, at=5)
    assert ended == [
        (2, "finished", "", ""),
        (3, "failed", "ValueError", "no such key ***\\n\\x1b[31m"),
        (4, "stopped", "SIGTERM", ""),
        (5, "cancelled", "my_rule", "it is low enough"),
    ]
    assert len(read_ends(tmp_path)) == len(read_starts(tmp_path)) == 4


def test_an_end_that_the_disk_refuses_is_a_warning(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ends.jsonl").mkdir()
    build_trainer(tiny_mixture, tmp_path, stop=1).fit()
    assert "warning: ends.jsonl could not be written" in capsys.readouterr().err


def test_a_run_that_was_killed_after_its_last_save_gets_its_end(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(tiny_mixture, tmp_path, stop=2).fit()
    (tmp_path / "ends.jsonl").unlink()
    before = metrics(tmp_path)
    for message in ("still to do: its end in ends.jsonl", "nothing to do"):
        build_trainer(tiny_mixture, tmp_path, stop=2).fit()
        assert f"already finished at step 2: {message}\n" in capsys.readouterr().err
    assert [(end.step, end.reason) for end in read_ends(tmp_path)] == [(2, "finished")]
    assert metrics(tmp_path) == before


def test_lines_that_a_full_disk_refuses_to_the_end_are_exit_5_also_without_a_checkpoint(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    class Full(Callback):
        def pre_step(self, batches: object) -> None:
            if self.trainer.step == 1:
                size = (tmp_path / "metrics.jsonl").stat().st_size
                disk.enter_context(files_of_at_most(size + 10))

    off = "--trainer.callbacks.checkpointer.enabled=false"
    log = "--trainer.metrics_collect_interval=1"
    trainer = build_trainer(tiny_mixture, tmp_path, off, log, stop=3, callbacks={"full": Full()})
    trainer.say = lambda message: None  # type: ignore[method-assign]  # pytest's file is limited too
    with contextlib.ExitStack() as disk, pytest.raises(ResourceError) as caught:
        trainer.fit()
    assert caught.value.exit_code == 5
    assert "metrics.jsonl" in str(caught.value)


def test_throughput_leaves_out_evaluations_checkpoints_and_the_first_step(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    trainer = build_trainer(
        tiny_mixture,
        tmp_path,
        "--trainer.callbacks.lm_evaluator.eval_interval=3",
        "--data_loader.prefetch=0",
        stop=7,
    )
    step, evaluate = trainer.train_module.train_step, trainer.train_module.eval_batch

    def timed_step(*arguments: object, **options: object) -> object:
        now[0] += 100.0 if trainer.step == 0 else 2.0
        return step(*arguments, **options)  # type: ignore[arg-type]

    def timed_evaluation(batch: object) -> object:
        now[0] += 10.0
        return evaluate(batch)  # type: ignore[arg-type]

    trainer.train_module.train_step = timed_step  # type: ignore[method-assign,assignment]
    trainer.train_module.eval_batch = timed_evaluation  # type: ignore[method-assign,assignment]
    trainer.fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    measured = {
        line["step"]: (line["throughput/seconds per step"], line["throughput/tokens per second"])
        for line in lines
        if "throughput/seconds per step" in line
    }
    assert measured == dict.fromkeys((2, 3, 4, 6, 7), (2.0, 128.0))
    waits = [
        line["throughput/data wait share"]
        for line in lines
        if line["step"] in measured and "eval" not in line
    ]
    assert all(0 <= share < 1 for share in waits)
    # A CPU has no peak in the table.
    assert not any("throughput/MFU" in line for line in lines)


PEAK = "device_peak_flops_per_second=1e12"


@pytest.mark.parametrize(
    ("options", "flops"),
    [
        (["num_flops_per_token=1e6", PEAK], 1e6),
        (["num_params=1000", PEAK], 6e3),
        ([PEAK], None),  # what the model says
        (["num_flops_per_token=1e6"], 0.0),  # a peak that is not known
    ],
)
def test_utilisation_follows_flops_and_peak_that_are_given(
    tiny_mixture: Path, tmp_path: Path, options: list[str], flops: float | None
) -> None:
    prefix = "--trainer.callbacks.speed_monitor"
    given = [f"{prefix}.{option}" for option in options]
    trainer = build_trainer(tiny_mixture, tmp_path, *given, quiet=True, stop=3)
    trainer.fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    measured = [line for line in lines if "throughput/seconds per step" in line]
    assert measured
    for line in measured:
        if flops == 0.0:
            assert "throughput/MFU" not in line
            continue
        per_token = line["throughput/MFU"] * 1e12 / line["throughput/tokens per second"]
        model = trainer.train_module.flops_per_token(0.0)
        if flops is None:
            assert model < per_token < 2 * model  # and the pairs of attention
        else:
            assert per_token == pytest.approx(flops)


def test_two_ways_to_say_the_flops_are_refused() -> None:
    with pytest.raises(UsageError, match="no effect beside num_flops_per_token"):
        SpeedMonitorCallback(num_params=1, num_flops_per_token=2.0)


SLOW = (
    "--train_module.optim.group_overrides=[{params: [norm.weight], opts: {lr: 1e-4}}]",
    "--trainer.callbacks.checkpointer.enabled=false",
)
OFF = "--trainer.callbacks.lr_monitor.enabled=false"


def rates(folder: Path) -> list[dict[str, float]]:
    found = metrics(folder)
    return [{n: v for n, v in line.items() if n.startswith("optim/lr")} for line in found]


def test_groups_with_rates_of_their_own_log_them(tiny_mixture: Path, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path / "a", *SLOW, stop=5, quiet=True)
    peaks = [group["peak_lr"] for group in trainer.train_module.optimizer.param_groups]
    assert sorted({1e-4, 1e-2}) == sorted(set(peaks))
    trainer.fit()
    for line in rates(tmp_path / "a"):
        factor = line.pop("optim/lr") / 1e-2
        assert line == {
            f"optim/lr (group {n})": pytest.approx(peak * factor) for n, peak in enumerate(peaks)
        }
    build_trainer(tiny_mixture, tmp_path / "b", *SLOW, OFF, stop=5, quiet=True).fit()
    assert {name for line in rates(tmp_path / "b") for name in line} == {"optim/lr"}


def test_groups_of_one_rate_log_it_once(tiny_mixture: Path, tmp_path: Path) -> None:
    build_trainer(tiny_mixture, tmp_path, *SLOW[1:], stop=5, quiet=True).fit()
    assert {name for line in rates(tmp_path) for name in line} == {"optim/lr"}


def test_an_optimiser_of_ones_own_is_watched_too(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    groups = [{"params": [model[1].weight]}, {"params": [model[1].bias], "lr": 0.5}]
    module = BasicTrainModule(
        model, torch.optim.SGD(groups, lr=0.1), torch.nn.functional.cross_entropy
    )
    Trainer(
        train_module=module, data_loader=Own(), save_folder=tmp_path, max_duration=Duration.steps(2)
    ).fit()
    for line in rates(tmp_path):
        assert (line["optim/lr (group 0)"], line["optim/lr (group 1)"]) == (0.1, 0.5)


def test_versions_are_named_and_hosts_are_not() -> None:
    found = describe(torch.device("cpu"))
    assert found["package torch"].startswith(torch.__version__.split("+")[0])
    assert found.keys() & {"python", "system", "device"} == {"python", "system", "device"}
    assert not found.keys() & {"host", "hostname", "time"}


def test_names_and_versions_of_packages_are_those_of_their_metadata() -> None:
    found = {
        name: version
        for name, version in describe(torch.device("cpu")).items()
        if name.startswith("package ")
    }
    code = """
from importlib import metadata
for each in reversed([*metadata.distributions()]):  # the first of a name is imported
    print(f"package {each.metadata['Name']}", each.version, sep="=")
"""  # in a Python that has imported nothing yet, which may add to its path
    told = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    assert found == dict(line.split("=") for line in told.stdout.splitlines())
    assert list(found) == sorted(found)


@pytest.mark.parametrize("version", ["0.0.1", "999.0"])
def test_of_two_packages_of_a_name_it_has_the_one_that_is_imported(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"Metadata-Version: 2.1\nName: numpy\nVersion: {version}\n\n"
    for name in ("before", "behind"):
        (tmp_path / name / f"numpy-{version}.dist-info").mkdir(parents=True)
        (tmp_path / name / f"numpy-{version}.dist-info" / "METADATA").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path / "before")
    assert packages.__wrapped__()["numpy"] == version
    sys.path[:] = [*sys.path[1:], str(tmp_path / "behind")]
    assert packages.__wrapped__()["numpy"] == metadata.version("numpy") != version


def test_copies_that_a_package_keeps_for_itself_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = packages.__wrapped__()
    copy = tmp_path / "site-packages/setuptools/_vendor/platter-9.0.dist-info"
    copy.mkdir(parents=True)
    (copy / "METADATA").write_text("Metadata-Version: 2.1\nName: platter\nVersion: 9.0\n\n")
    monkeypatch.syspath_prepend(copy.parent)
    assert "platter" in {each.metadata["Name"] for each in metadata.distributions()}
    assert packages.__wrapped__() == before
    own = tmp_path / "my-packages/lib"
    copy.rename(tmp_path / copy.name)
    own.mkdir(parents=True)
    (tmp_path / copy.name).rename(own / copy.name)
    monkeypatch.syspath_prepend(own)
    assert packages.__wrapped__() == {**before, "platter": "9.0"}


def test_strict_without_a_record_of_the_versions_is_refused() -> None:
    with pytest.raises(UsageError, match="no effect without enabled"):
        EnvironmentCallback(enabled=False, strict=True)


class Watch(Callback):
    """Notes whether automatic garbage collection was on in each step."""

    def __init__(self) -> None:
        self.enabled: list[bool] = []

    def post_step(self) -> None:
        self.enabled.append(gc.isenabled())


@pytest.mark.parametrize("managed", [True, False])
def test_garbage_is_collected_at_fixed_steps_only(
    tiny_mixture: Path, tmp_path: Path, managed: bool
) -> None:
    watch, collected = Watch(), []
    config = f"{{enabled: {str(managed).lower()}, gc_interval: 3}}"
    gc.callbacks.append(
        lambda phase, info: collected.append(info["generation"]) if phase == "start" else None
    )
    trainer = build_trainer(
        tiny_mixture,
        tmp_path,
        f"--trainer.callbacks.garbage_collector={config}",
        stop=7,
        callbacks={"watch": watch},
    )
    collected.clear()
    trainer.fit()
    gc.callbacks.pop()
    assert watch.enabled == [not managed] * 7
    if managed:
        # the youngest generation may have been collected before the first step
        assert [generation for generation in collected if generation][:2] == [1, 1]
    assert gc.isenabled()


def test_a_step_names_the_rows_that_were_left_out_inside_it(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    build_trainer(tiny_mixture, tmp_path, "--data_loader.skip=[[1, 2]]", stop=2, quiet=True).fit()
    one, two = steps_of(tmp_path)
    assert (one["rows"][0], one["skipped"]) == (0, [[1, 2]])
    assert one["rows"][1] == two["rows"][0]
    assert "skipped" not in two
