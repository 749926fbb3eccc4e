"""AutoTrainer as the training guide has it: alone and under torchrun, stopped and gone on with."""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.auto_runs import (
    LENGTH,
    SHAPE,
    STEPS,
    decoder,
    loader,
    rows,
    train,
    train_in_group,
    trainer,
)
from support.distributed import run_ranks
from support.forked import python
from support.runs import REPOSITORY, environment, metrics
from torch import nn
from torch.utils.data import DataLoader

import olm_train
from olm_data.errors import UsageError
from olm_train import AutoTrainer, Callback, CheckpointerConfig, World
from olm_train.callbacks.console_logger import ConsoleLoggerCallback
from olm_train.callbacks.metrics_logger import MetricsLoggerCallback
from olm_train.extensions.auto.strategy import DeviceConfig
from olm_train.optim.schedule import Linear
from olm_train.parallel.config import DataParallelConfig


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# ---- the guide's examples --------------------------------------------------------------------


def test_the_guides_first_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = decoder()
    before = decoder()
    run = AutoTrainer(
        model, torch.optim.AdamW, loader(), device="auto", context_length=LENGTH, learning_rate=1e-2
    )
    said = capsys.readouterr().err
    assert "AutoTrainer: single: chosen for balanced: CPU, 1 rank on 1 machine, " in said
    assert "<- chosen" in said
    losses = run.train(epochs=1)
    assert len(losses) == 6 == run.global_step
    assert losses == run.losses
    assert run.current_epoch == 1
    assert losses[-1] < losses[0]
    assert not same(model, before), "the model that was given is the one that is trained"
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"go on with this run later, start again with save_folder='runs/{folder.name}'" in said
    assert losses == [line["train/CE loss"] for line in metrics(folder)]
    model.save("models/mine")
    assert same(olm_train.load_model("models/mine"), model)
    second = AutoTrainer(model, torch.optim.AdamW, loader(), context_length=LENGTH)
    assert second.save_folder != run.save_folder, "a run without a name is a new one"


def test_the_guides_other_examples_and_numbers(tmp_path: Path) -> None:
    @dataclass(kw_only=True)
    class StepLogger(Callback):
        seen: Any = None

        def log_metrics(self, step: int, metrics: Any) -> None:
            self.seen = [*(self.seen or []), (step, metrics["optim/lr"], metrics["train/CE loss"])]

    log = StepLogger()
    run = AutoTrainer(
        decoder(),
        torch.optim.AdamW,
        loader(4),
        device="cpu",
        context_length=LENGTH,
        learning_rate=3e-4,
        weight_decay=0.1,
        warmup_steps=2,
        total_steps=100,
        min_lr=1e-5,
        grad_accum_steps=2,
        use_amp=True,
        grad_clip_norm=1.0,
        callbacks=[log],
        save_folder=tmp_path,
    )
    assert len(run.train(epochs=1, max_steps=5, log_interval=100)) == 5
    rates = [rate for _, rate, _ in log.seen]
    cosine = [1e-5 + (3e-4 - 1e-5) * (1 + math.cos(math.pi * t / 98)) / 2 for t in range(4)]
    assert rates == pytest.approx([1.5e-4, *cosine])
    assert metrics(tmp_path)[0]["train/tokens"] == 8 * LENGTH, "two micro-batches of four rows"
    decays = {group["weight_decay"] for group in run.train_module.optimizer.param_groups}
    assert decays == {0.1, 0.0}


def test_an_instance_keeps_its_groups_and_trains_as_its_class(tmp_path: Path) -> None:
    model = decoder()
    own = torch.optim.SGD(model.parameters(), lr=0.5)
    run = AutoTrainer(model, own, loader(), context_length=LENGTH, save_folder=tmp_path / "a")
    assert run.train_module.optimizer is own
    other = trainer(tmp_path / "b", optimizer=torch.optim.SGD, learning_rate=0.5)
    assert run.train() == other.train()


# ---- any data --------------------------------------------------------------------------------


def test_a_mixture_lock_trains_as_by_hand(tiny_mixture: Path, tmp_path: Path) -> None:
    sizes = {"global_batch_size": 256, "rank_microbatch_size": 64}
    shape = replace(SHAPE, vocab_size=512)
    model = decoder(shape=shape)
    run = AutoTrainer(
        model,
        torch.optim.AdamW,
        olm_train.DataLoader(tiny_mixture, **sizes),
        save_folder=tmp_path / "auto",
        learning_rate=1e-2,
        weight_decay=0.1,
        optim={"betas": (0.9, 0.95)},
        total_steps=24,
        grad_clip_norm=1.0,
    )
    losses = run.train(max_steps=6)
    module = olm_train.TransformerTrainModule(
        olm_train.TransformerTrainModuleConfig(
            rank_microbatch_size=64,
            optim=olm_train.AdamWConfig(lr=1e-2, decay_embeddings=True, fused=False),
            scheduler=olm_train.CosineWithWarmup(warmup_fraction=0.1),
        ),
        shape,
        seed=1,
    )
    olm_train.Trainer(
        train_module=module,
        data_loader=olm_train.DataLoader(tiny_mixture, **sizes),
        save_folder=tmp_path / "by-hand",
        max_duration=olm_train.Duration.steps(24),
        hard_stop=olm_train.Duration.steps(6),
    ).fit()
    assert losses == [line["train/CE loss"] for line in metrics(tmp_path / "by-hand")]
    assert same(model, module.model)


def test_text_is_trained_on_with_the_borders_of_its_documents(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / "text" / f"{number}.txt").write_text("over a lazy dog " * (5 + 9 * number))
    data = olm_train.LocalTextDataset(
        str(tmp_path / "text"), tokenizer=tiny_tokenizer, context_length=LENGTH
    )
    run = AutoTrainer(
        decoder(shape=replace(SHAPE, vocab_size=512)),
        torch.optim.AdamW,
        DataLoader(data, batch_size=2),
        context_length=LENGTH,
        learning_rate=1e-2,
        save_folder=tmp_path / "run",
    )
    losses = run.train(max_steps=4)
    assert losses[-1] < losses[0]
    labels = [line["train/labels"] for line in metrics(tmp_path / "run")]
    assert max(labels) == 2 * LENGTH > min(labels), "none across the end of a document"


def test_rows_beyond_the_context_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rows of 16 tokens; context_length is 8"):
        trainer(tmp_path, context_length=8).train()


# ---- stopped and gone on with ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["decoder", "tied"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", kind)
    expected = whole.train(max_steps=STEPS)
    assert trainer(tmp_path / "stopped", kind).train(max_steps=3) == expected[:3]
    again = trainer(tmp_path / "stopped", kind)
    assert again.train(max_steps=5) == expected[:5], "with the losses before the resume"
    assert again.train(max_steps=STEPS) == expected, "in the same process too"
    assert again.train(max_steps=STEPS) == expected, "and there is no more to do"
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    assert same(again.train_module.model, whole.train_module.model)


def test_losses_are_there_without_a_log_and_without_checkpoints(tmp_path: Path) -> None:
    expected = trainer(tmp_path / "log").train()
    off = CheckpointerConfig(enabled=False)
    silent = {"metrics_logger": MetricsLoggerCallback(enabled=False)}
    run = trainer(tmp_path / "none", callbacks=silent, checkpointer=off)
    assert run.train(max_steps=STEPS) == expected
    assert not (tmp_path / "none" / "metrics.jsonl").exists()
    with pytest.raises(UsageError, match="saves no checkpoints"):
        run.train(max_steps=STEPS)


# ---- options ---------------------------------------------------------------------------------


def test_each_option_changes_the_run(tmp_path: Path) -> None:
    def losses(name: str, **options: Any) -> list[float]:
        return trainer(tmp_path / name, "tied", **options).train(max_steps=STEPS)

    expected = losses("plain")
    changes: dict[str, dict[str, Any]] = {
        "learning_rate": {"learning_rate": 2e-2},
        "weight_decay": {"weight_decay": 0.9},
        "optim": {"optim": {"betas": (0.5, 0.5)}},
        "scheduler": {"scheduler": Linear()},
        "use_warmup_cosine": {"use_warmup_cosine": False},
        "warmup_steps": {"warmup_steps": 4},
        "total_steps": {"total_steps": 60},
        "min_lr": {"min_lr": 0.0},
        "grad_clip_norm": {"optimizer": torch.optim.SGD, "grad_clip_norm": 1e-3},
        "seed": {"seed": 3},
        "loss": {"loss": lambda logits, labels: logits.square().mean()},
        "dp_config": {"dp_config": DataParallelConfig(param_dtype="bfloat16")},
        "grad_accum_steps": {"grad_accum_steps": 2},
        "dataloader": {"dataloader": DataLoader(rows(shift=2), batch_size=8)},
    }
    for name, change in changes.items():
        assert losses(name, **change) != expected, name
    assert losses("amp", use_amp=False) == expected, "a CPU has no fast bf16"


def test_the_console_logger_prints_when_it_is_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path / "a").train(log_interval=2, max_steps=STEPS)
    assert re.findall(r"^step (\d)", capsys.readouterr().err, re.MULTILINE) == ["1", "2", "4", "6"]
    own = {"mine": ConsoleLoggerCallback(log_interval=5)}
    with pytest.raises(UsageError, match="log_interval is given, and a console logger"):
        trainer(tmp_path / "b", callbacks=own).train(log_interval=2)


def test_a_world_a_device_and_hardware_must_agree(tmp_path: Path) -> None:
    here = DeviceConfig.here()
    run = trainer(tmp_path, device_config=replace(here, memory=1000), world=World(), device="cpu")
    assert "nothing fits by this estimate" in "\n".join(run.choice.why)
    with pytest.raises(UsageError, match="device_config is for 8 ranks on cpu; there are 1 on cpu"):
        trainer(tmp_path, device_config=replace(here, world_size=8))
    with pytest.raises(UsageError, match="device is cpu; the world that is given computes on meta"):
        trainer(tmp_path, world=World(device=torch.device("meta")), device="cpu")
    half = DataParallelConfig(param_dtype="bfloat16")
    with pytest.raises(UsageError, match=r"use_amp is off; dp_config\.param_dtype is bfloat16"):
        trainer(tmp_path, dp_config=half, use_amp=False)


# ---- several ranks ---------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_of_torchrun_agree_with_one(tmp_path: Path) -> None:
    _, expected = train(tmp_path / "single", "auto", "decoder", STEPS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(REPOSITORY / "tests" / "support" / "auto_runs.py")
    done = subprocess.run(
        [python(), *launcher, script, str(tmp_path / "two"), "auto", "decoder", str(STEPS)],
        env=environment() | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert "AutoTrainer: ddp: " in done.stderr
    lines = {line for line in done.stdout.splitlines() if line.startswith("LOSSES")}
    assert len(lines) == 1, "the same on each rank"
    _, taken, *losses = lines.pop().split()
    assert taken == "ddp"
    assert list(map(float, losses)) == pytest.approx(expected, rel=1e-5)


def in_group(count: int, *arguments: object) -> tuple[str, list[float]]:
    """Run `auto_runs.train` on ranks; return the strategy and the losses, the same on each."""
    first, *others = run_ranks(train_in_group, count, *arguments)
    assert all(other == first for other in others)
    return first  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "plain"])
def test_one_rank_and_two_agree_under_every_strategy(kind: str, tmp_path: Path) -> None:
    _, expected = train(tmp_path / "single", "auto", kind, STEPS)
    for strategy, told in (("auto", "ddp"), ("fsdp", "fsdp")):
        whole, stopped = tmp_path / strategy, tmp_path / f"{strategy}-stopped"
        taken, losses = in_group(2, whole, strategy, kind, STEPS)
        assert taken == told
        assert losses == pytest.approx(expected, rel=1e-5)
        in_group(2, stopped, strategy, kind, 3)
        in_group(2, stopped, strategy, kind, 5, STEPS)
        assert metrics(stopped) == metrics(whole)


@pytest.mark.slow
def test_four_ranks_in_two_groups_agree_with_one(tmp_path: Path) -> None:
    _, expected = train(tmp_path / "single", "single", "decoder", STEPS)
    taken, losses = in_group(4, tmp_path / "hsdp", "hsdp", "decoder", STEPS)
    assert taken == "hsdp"
    assert losses == pytest.approx(expected, rel=1e-5)
