"""Small monitors: memory, noise scale, files of metrics, replicas, spikes."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.distributed import run_ranks
from support.own_data import Own
from support.probe_checks import Steps, train_and_look
from support.runs import build_trainer, metrics, one_step_trainer
from support.training import build, micro_batches

from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_data.run_log.metric_names import (
    CE_LOSS,
    GPU_ACTIVE_GIB,
    GPU_RESERVED_GIB,
    GRAD_NORM,
    LABELS,
    NOISE_SCALE,
    NOISE_SIGNAL,
    NOISE_VARIANCE,
    SPIKE_SCORE,
    SPIKE_SCORE_TOTAL,
)
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.load import open_checkpoint
from olm_train.distributed.world import World
from olm_train.extensions.monitors.config_saver import ConfigSaverCallback, data_paths
from olm_train.extensions.monitors.gpu_memory_monitor import GPUMemoryMonitorCallback
from olm_train.extensions.monitors.gradient_noise_scale import GradientNoiseScaleCallback, estimate
from olm_train.extensions.monitors.replica_checker import digests, odd_ranks
from olm_train.extensions.monitors.stability_monitor import FEWEST, StabilityMonitorCallback
from olm_train.model.loss import count_valid

ON = "--trainer.callbacks.gpu_memory_monitor.enabled=true"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_that_there_is_nothing_to_look_at(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_step_trainer(tiny_mixture, tmp_path, ON).fit()
    assert "gpu_memory_monitor has nothing to look at: there is no GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_peaks_of_each_step_are_logged(tiny_mixture: Path, tmp_path: Path) -> None:
    build_trainer(tiny_mixture, tmp_path, ON).fit()
    lines = [line for line in metrics(tmp_path) if "eval" not in line]
    assert all(0 < line[GPU_ACTIVE_GIB] <= line[GPU_RESERVED_GIB] for line in lines)


@pytest.mark.parametrize(("device_id", "looked_at"), [(None, "cuda:5"), (1, "cuda:1")])
def test_it_looks_at_the_gpu_that_is_named_else_at_that_of_the_rank(
    device_id: int | None, looked_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda d: seen.append(str(d)))
    callback = GPUMemoryMonitorCallback(device_id=device_id)
    world = SimpleNamespace(device=torch.device("cuda", 5))
    callback.trainer = SimpleNamespace(world=world)  # type: ignore[assignment]
    callback.pre_train()
    assert seen == [looked_at]


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8), st.floats(0.01, 10), st.floats(0, 9))
def test_expected_norms_give_signal_and_variance_exactly(
    labels: list[int], signal: float, variance: float
) -> None:
    total = sum(labels)
    # E|share of i|^2 = (n_i / N)^2 (signal + variance / n_i)
    shares = [(n / total) ** 2 * (signal + variance / n) for n in labels]
    norms = sum(total / n * share for n, share in zip(labels, shares, strict=True))
    found = estimate(norms, signal + variance / total, total, len(labels))
    assert math.isclose(found[0], signal, rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(found[1], variance, rel_tol=1e-9, abs_tol=1e-9)


def test_drawn_gradients_give_the_noise_scale_they_were_drawn_with() -> None:
    generator = torch.Generator().manual_seed(1)
    true, spread, sizes = torch.full((20,), 0.5), 2.0, [3, 8, 5, 16]
    signal = variance = 0.0
    for _ in range(2000):
        draws = [true + spread * torch.randn(n, 20, generator=generator) for n in sizes]
        shares = [each.sum(0) / sum(sizes) for each in draws]
        total = sum(sizes)
        norms = sum(total / n * float(g @ g) for n, g in zip(sizes, shares, strict=True))
        whole = torch.stack(shares).sum(0)
        found = estimate(norms, float(whole @ whole), total, len(sizes))
        signal, variance = signal + found[0], variance + found[1]
    assert math.isclose(variance / signal, 20 * spread**2 / float(true @ true), rel_tol=0.03)


def own_norms(rows: list[int]) -> tuple[float, float, float]:
    """Signal and variance of step 1, from a backward pass for each micro-batch; and labels."""
    module = build()
    batches = micro_batches(1, rows, module.world)
    counts = [int(count_valid(batch.labels)) for batch in batches]
    total, shares = sum(counts), []
    for batch in batches:
        module.model.zero_grad()
        sums = module._reduce(batch, lambda *a, b=batch: module._loss(*a, labels=b.labels))
        (sums.total / total).backward()
        gradients = [p.grad.flatten() for p in module.model.parameters()]
        shares.append(torch.cat(gradients).double())
    norms = sum(total / n * float(g @ g) for n, g in zip(counts, shares, strict=True) if n)
    whole = torch.stack(shares).sum(0)
    return *estimate(norms, float(whole @ whole), total, sum(n > 0 for n in counts)), total


@pytest.mark.parametrize("rows", [[4, 4], [1, 3, 4], [1] * 8])
def test_a_step_sees_the_gradient_of_each_of_its_micro_batches(rows: list[int]) -> None:
    (line,) = Steps(build(), [GradientNoiseScaleCallback()]).run(rows, steps=1)
    signal, variance, labels = own_norms(rows)
    assert math.isclose(line[NOISE_SIGNAL], signal, rel_tol=1e-4)
    assert math.isclose(line[NOISE_VARIANCE], variance, rel_tol=1e-4)
    assert math.isclose(line[NOISE_SCALE], variance / signal, rel_tol=1e-4)
    assert line[LABELS] == labels
    assert not any("micro-batch" in name for name in line)


@pytest.mark.xdist_group("parallel")
def test_ranks_are_more_micro_batches(tmp_path: Path) -> None:
    results = run_ranks(train_and_look, 2, str(tmp_path))
    (alone, *_) = Steps(build(), [GradientNoiseScaleCallback(smoothing=0.5)]).run([1, 3, 1, 3])
    for result in results:
        for strategy in ("fsdp", "ddp"):
            (line, *_), _ = result[strategy, "with"]
            for name in (NOISE_SIGNAL, NOISE_VARIANCE, NOISE_SCALE):
                assert math.isclose(line[name], alone[name], rel_tol=1e-4), (strategy, name)


def test_the_average_goes_on_after_a_resume() -> None:
    whole = GradientNoiseScaleCallback(smoothing=0.9)
    parts = [GradientNoiseScaleCallback(smoothing=0.9) for _ in range(2)]
    lines = Steps(build(), [whole]).run([4, 4], steps=4)

    def log(callback: GradientNoiseScaleCallback, numbers: range) -> list[dict[str, float]]:
        found = []
        for number in numbers:
            line: dict[str, Any] = {
                "optim/micro-batch norms": 0.1 + number,
                "optim/micro-batches": 2.0,
                LABELS: 10.0,
                "optim/total grad norm": 0.7,
            }
            callback.pre_log_metrics(number, line)
            found.append(line)
        return found

    fresh = GradientNoiseScaleCallback(smoothing=0.9)
    expected = log(fresh, range(6))
    found = log(parts[0], range(3))
    parts[1].load_state_dict(json.loads(json.dumps(parts[0].state_dict())))
    assert found + log(parts[1], range(3, 6)) == expected
    assert len({line[NOISE_VARIANCE] for line in expected}) == 6
    assert len({line[NOISE_VARIANCE] for line in lines}) == 4


def test_smoothing_and_interval_have_their_effect() -> None:
    lines = Steps(build(), [GradientNoiseScaleCallback(interval=2)]).run([4, 4], steps=4)
    assert [NOISE_VARIANCE in line for line in lines] == [False, True] * 2
    sharp = Steps(build(), [GradientNoiseScaleCallback(interval=2, smoothing=0)]).run([4, 4], 4)
    assert sharp[1][NOISE_VARIANCE] == pytest.approx(lines[1][NOISE_VARIANCE])
    assert sharp[3][NOISE_VARIANCE] != pytest.approx(lines[3][NOISE_VARIANCE])


def test_one_micro_batch_says_that_there_is_nothing_to_compare() -> None:
    run = Steps(build(), [GradientNoiseScaleCallback()])
    lines = run.run([8])
    assert ["nothing to compare" in said for said in run.said] == [True]
    assert not any(NOISE_VARIANCE in line for line in lines)


def test_a_run_logs_it(tiny_mixture: Path, tmp_path: Path) -> None:
    one_step_trainer(tiny_mixture, tmp_path, "--trainer.callbacks.gradient_noise_scale={}").fit()
    (line,) = metrics(tmp_path)
    assert line[NOISE_VARIANCE] > 0


PREFIX = "--trainer.callbacks.metric_saver"


def run(mixture: Path, folder: Path, *options: str) -> dict[str, dict[str, object]]:
    """The files of a run of 4 steps, evaluated at its end."""
    given = [f"{PREFIX}.{option}" for option in options] or [f"{PREFIX}.enabled=true"]
    build_trainer(mixture, folder, "--trainer.hard_stop={value: 4, unit: steps}", *given).fit()
    names = sorted({*folder.glob("*.json")} - {folder / n for n in ("config.json",)})
    found = {path.name: json.loads(path.read_bytes()) for path in names}
    return {name: found[name] for name in found if "metrics" in found[name]}


def test_the_last_values_are_in_metrics_json(tiny_mixture: Path, tmp_path: Path) -> None:
    files = run(tiny_mixture, tmp_path / "a")
    assert list(files) == ["metrics.json"]
    last = [line for line in metrics(tmp_path / "a") if "eval" not in line][-1]
    content = files["metrics.json"]
    assert content["step"] == 4
    captured = content["metrics"]
    assert isinstance(captured, dict)
    assert captured["train/CE loss"] == last["train/CE loss"]
    assert captured["optim/lr"] == last["optim/lr"]
    assert captured["eval/held/CE loss"] > 0


def test_files_of_steps_come_at_an_interval_and_at_fixed_steps(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    files = run(
        tiny_mixture,
        tmp_path,
        "save_interval=2",
        "fixed_steps=[3]",
        "step_metrics_fname='at-{step}.json'",
        "final_metrics_fname=last.json",
        "metrics_to_capture=[train/*, optim/lr]",
    )
    assert sorted(files) == ["at-2.json", "at-3.json", "at-4.json", "last.json"]
    assert [files[f"at-{n}.json"]["step"] for n in (2, 3, 4)] == [2, 3, 4]
    captured = files["last.json"]["metrics"]
    assert isinstance(captured, dict)
    assert {name.partition("/")[0] for name in captured} == {"train", "optim"}
    assert [name for name in captured if name.startswith("optim")] == ["optim/lr"]


def untimed(files: dict[str, dict[str, object]]) -> dict[str, object]:
    return {
        name: {key: v for key, v in found.items() if not key.startswith("throughput/")}
        for name, content in files.items()
        if isinstance(found := content["metrics"], dict)
    }


def test_a_run_that_was_killed_has_the_files_of_one_that_was_not(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("save_interval=4", "step_metrics_fname='at-{step}.json'")
    every = "--trainer.callbacks.lm_evaluator={datasets: {held: "
    every += f"{tiny_mixture.parent / 'held'}}}, eval_interval: 1000, fixed_steps: [1]}}"
    saved = "--trainer.callbacks.checkpointer={save_interval: 2}"

    def files(folder: Path) -> dict[str, object]:
        given = [f"{PREFIX}.{option}" for option in more]
        stop = "--trainer.hard_stop={value: 4, unit: steps}"
        build_trainer(tiny_mixture, folder, stop, every, saved, *given).fit()
        found = {path.name: json.loads(path.read_bytes()) for path in folder.glob("*.json")}
        return untimed({name: each for name, each in found.items() if "metrics" in each})

    plain = files(tmp_path / "plain")
    assert "eval/held/PPL" in plain["at-4.json"]  # type: ignore[operator]
    killed = Path(shutil.copytree(tmp_path / "plain", tmp_path / "killed"))
    for name in ("at-4.json", "metrics.json"):
        (killed / name).unlink()
    shutil.rmtree(killed / "step00000004")
    assert files(killed) == plain  # killed after the save of step 2
    (killed / "metrics.json").unlink()
    capsys.readouterr()
    assert files(killed) == plain  # killed after the last save
    assert "still to do: metrics.json\n" in capsys.readouterr().err
    assert files(killed) == plain
    assert "nothing to do" in capsys.readouterr().err


CONFIG = "--trainer.callbacks.config_saver"
SHORT = (
    "--trainer.hard_stop={value: 3, unit: steps}",
    "--trainer.callbacks.lm_evaluator.enabled=false",
)


def kept(mixture: Path, folder: Path, *options: str) -> dict[str, set[str]]:
    """The files of a run of 3 steps, and of its checkpoint, that are there because of options."""
    build_trainer(mixture, folder, *SHORT, *(f"{CONFIG}.{option}" for option in options)).fit()
    checkpoint = folder / "step00000003"
    open_checkpoint(checkpoint, World())  # whole, with what was added
    usual = {"config.json", "environment.json", "train.json", "manifest.json", "latest"}
    usual |= {"mixture.lock.json", "tokenizer.json", "lease-000001.json"}
    return {
        name: {p.name for p in place.iterdir() if p.suffix in (".json", ".txt")} - usual
        for name, place in (("run", folder), ("checkpoint", checkpoint))
    }


def test_nothing_more_than_config_json_by_default(tiny_mixture: Path, tmp_path: Path) -> None:
    assert ConfigSaverCallback().fname == "config.json"
    assert kept(tiny_mixture, tmp_path, "enabled=true") == {"run": set(), "checkpoint": set()}


def test_the_configuration_lies_under_its_fname_too(tiny_mixture: Path, tmp_path: Path) -> None:
    found = kept(tiny_mixture, tmp_path / "a", "fname=experiment.json")
    assert found == {"run": {"experiment.json"}, "checkpoint": {"experiment.json"}}
    for place in (tmp_path / "a", tmp_path / "a" / "step00000003"):
        content = (place / "experiment.json").read_bytes()
        assert content == (place / "config.json").read_bytes()
        assert json.loads(content)["model"]["d_model"] == 16


@pytest.mark.parametrize(
    ("options", "name"), [([], "data_paths.txt"), (["data_paths_fname=files.txt"], "files.txt")]
)
def test_save_data_paths_names_each_token_file(
    tiny_mixture: Path, tmp_path: Path, options: list[str], name: str
) -> None:
    found = kept(tiny_mixture, tmp_path, "save_data_paths=true", *options)
    assert found == {"run": {name}, "checkpoint": {name}}
    lines = (tmp_path / "step00000003" / name).read_text().splitlines()
    assert lines == data_paths(Lock.read(tiny_mixture).open_datasets(verify="off"))
    assert {Path(line).parent.name for line in lines} == {"prose", "code"}
    assert all(Path(line).is_file() for line in lines)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ([f"{CONFIG}.data_paths_fname=files.txt"], "no effect without save_data_paths"),
        ([f"{CONFIG}.fname=metrics.jsonl"], "fname"),
        ([f"{CONFIG}.fname=environment.json"], "environment.json is a file of each run"),
        ([f"{CONFIG}.fname=../up.json"], "fname"),
        (
            [f"{CONFIG}.save_data_paths=true", f"{CONFIG}.data_paths_fname=config.json"],
            "is a file of each run",
        ),
        ([f"{PREFIX}.step_metrics_fname=same.json"], r"a \.json file"),
        ([f"{PREFIX}.final_metrics_fname=../metrics.json"], r"the name of a \.json file"),
    ],
)
def test_names_that_cannot_be_are_refused(
    tiny_mixture: Path, tmp_path: Path, options: list[str], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        build_trainer(tiny_mixture, tmp_path, *options)


def test_data_paths_need_a_lock() -> None:
    saver = ConfigSaverCallback(save_data_paths=True)
    saver.trainer = type("Run", (), {"data_loader": Own()})()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="save_data_paths needs a mixture lock"):
        saver.post_attach()


class Adds(Callback):
    """Wants a file in each checkpoint."""

    def __init__(self, name: str) -> None:
        self.name = name

    def documents(self) -> Mapping[str, bytes]:
        return {self.name: b"mine"}


@pytest.mark.parametrize("name", ["train.json", "latest", "a/b", ".hidden", "manifest.json", ""])
def test_a_callback_cannot_take_the_place_of_a_file_of_the_checkpoint(
    tiny_mixture: Path, tmp_path: Path, name: str
) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, *SHORT, callbacks={"adds": Adds(name)})
    with pytest.raises(UsageError, match="'adds' cannot give each checkpoint a file"):
        trainer.fit()


def test_two_callbacks_cannot_write_one_file(tiny_mixture: Path, tmp_path: Path) -> None:
    both = {"one": Adds("notes.txt"), "two": Adds("notes.txt")}
    trainer = build_trainer(tiny_mixture, tmp_path, *SHORT, callbacks=both)
    with pytest.raises(UsageError, match="'two' cannot give each checkpoint a file "):
        trainer.fit()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_one_changed_bit_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).to(dtype).reshape(3, 4)
    changed = tensor.clone()
    bits = changed.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    bits[5] ^= 1
    assert digests({"w": tensor}) == digests({"w": tensor.clone()})
    assert digests({"w": tensor}) != digests({"w": changed})


WHOLE = ()


@pytest.mark.parametrize(
    ("sums", "problems"),
    [
        ([7, 7, 7], []),
        ([7, 8, 7], ["w: rank 1 differ from the others"]),
        ([7, 8, 9, 7, 7], ["w: ranks 1, 2 differ from the others"]),
        ([7, 8], ["w: ranks 0, 1 differ"]),
    ],
)
def test_the_ranks_that_are_not_as_most_are_named(sums: list[int], problems: list[str]) -> None:
    assert odd_ranks([{"w": (WHOLE, total)} for total in sums]) == problems


def test_different_pieces_of_a_tensor_are_not_compared() -> None:
    assert odd_ranks([{"w": ((0,), 1)}, {"w": ((1,), 2)}]) == []


class Quiet(StabilityMonitorCallback):
    """One that no trainer holds: it keeps what it would tell."""

    def _tell(self, step: int, found: Any, watched: Any) -> None:
        self.told = [*getattr(self, "told", []), (step, found)]


def scores(monitor: StabilityMonitorCallback, losses: list[float], first: int = 1) -> list[Any]:
    lines = []
    for step, loss in enumerate(losses, first):
        line = {CE_LOSS: loss, GRAD_NORM: 1.0}
        monitor.pre_log_metrics(step, line)
        lines.append(line)
    return lines


@given(
    st.lists(st.floats(0.5, 4.0) | st.floats(50, 60) | st.just(math.nan), min_size=1, max_size=60),
    st.integers(FEWEST, 12),
    st.integers(1, 20),
)
def test_spikes_are_those_of_the_definition_in_any_cut_of_the_run(
    losses: list[float], window: int, rolling: int
) -> None:
    calm: list[float] = []
    spikes: list[int] = []
    for step, loss in enumerate(losses, 1):
        last = calm[-window:]
        limit = math.inf
        if len(last) >= FEWEST:
            limit = statistics.fmean(last) + 6 * statistics.pstdev(last, statistics.fmean(last))
        if math.isnan(loss) or loss > limit:
            spikes.append(step)
        else:
            calm.append(loss)
    monitor = Quiet(window_size=window, rolling_window=rolling)
    half = len(losses) // 2
    lines = scores(monitor, losses[:half])
    resumed = Quiet(window_size=window, rolling_window=rolling)
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    lines += scores(resumed, losses[half:], half + 1)
    for step, line in enumerate(lines, 1):
        assert line[SPIKE_SCORE_TOTAL] == len([s for s in spikes if s <= step]) / step
        recent = [s for s in spikes if step - rolling < s <= step]
        assert line.get(SPIKE_SCORE) == (len(recent) / rolling if step >= rolling else None)


def test_a_spike_hides_none_of_those_that_follow() -> None:
    monitor = Quiet(window_size=16)
    calm = [1.0, 1.1] * 10
    scores(monitor, [*calm, 9.0, 9.0, 9.0, 1.0])
    assert [step for step, _ in monitor.told] == [21, 22, 23]


@pytest.mark.parametrize(
    ("option", "steps"),
    [
        ({}, [21]),
        ({"threshold_std": 1000.0}, []),
        ({"loss_metric_name": "another"}, []),
        ({"grad_norm_metric_name": CE_LOSS, "loss_metric_name": "another"}, [21]),
        ({"window_size": 8, "threshold_std": 100.0}, []),
    ],
)
def test_each_option_has_its_effect(option: dict[str, Any], steps: list[int]) -> None:
    monitor = Quiet(**option)
    scores(monitor, [*[1.0, 1.1] * 10, 5.0])
    assert [step for step, _ in getattr(monitor, "told", [])] == steps


def test_each_spike_names_its_documents(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Raise(Callback):
        priority = 9

        def pre_log_metrics(self, step: int, metrics: dict[str, float]) -> None:
            metrics["watched"] = 100.0 if step in (12, 13) else 1.0 + step % 2 / 10

    (tmp_path / "with/spike-step00000012.json").mkdir(parents=True)  # it cannot be a file then
    monitor = StabilityMonitorCallback(window_size=10, loss_metric_name="watched")
    callbacks = {"raise": Raise(), "stability_monitor": monitor}
    stop = "--trainer.hard_stop={value: 15, unit: steps}"
    build_trainer(tiny_mixture, tmp_path / "with", stop, callbacks=callbacks).fit()
    said = capsys.readouterr().err
    assert "warning: spike at step 13: watched 100; documents: " in said
    assert "warning: spike at step 12: watched 100; its documents could not be written: " in said
    report = json.loads((tmp_path / "with/spike-step00000013.json").read_text())
    assert report["step"] == 13
    assert all(piece["input"] for row in report["rows"] for piece in row["documents"])
    line = next(each for each in metrics(tmp_path / "with") if each["step"] == 13)
    rows = [row["row"] for row in report["rows"]]
    assert (rows[0], rows[-1] + 1) == tuple(line["rows"])
