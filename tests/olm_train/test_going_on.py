"""A run that goes on, its mixture revised or not: what it takes over, and what it says it lacks."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.own_data import Own
from support.own_parts import PlainSGDConfig
from support.runs import build_trainer, metrics, steps_of
from torch import Tensor, nn

from olm_data.bounded_json import JsonObject
from olm_data.config.convert import as_dict, parse
from olm_data.config.values import Values
from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError, ValidationError
from olm_data.extensions.verify.training import read_log, verify_training
from olm_data.mixture.lock import Lock
from olm_data.mixture.revise import revise
from olm_train import (
    BasicTrainModule,
    Callback,
    Duration,
    Trainer,
    TransformerTrainModule,
    TransformerTrainModuleConfig,
)
from olm_train.callbacks.early_stopping import EarlyStoppingCallback
from olm_train.data.loader import DataLoader
from olm_train.model.config import DecoderConfig
from olm_train.optim.adamw import SkipStepAdamWConfig
from olm_train.stability.gate import take_step


def trainer(folder: Path, stop: int, model: nn.Module | None = None, **options: Any) -> Trainer:
    lr = options.pop("lr", 0.1)
    module = BasicTrainModule(
        model or Plain(), torch.optim.SGD, nn.CrossEntropyLoss(), optim={"lr": lr}
    )
    return Trainer(
        train_module=module,
        data_loader=Own(None),
        save_folder=folder,
        max_duration=Duration.steps(9),
        hard_stop=Duration.steps(stop),
        **options,
    )


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1))  # type: ignore[no-any-return]


class Worse(Callback):
    """An evaluation after each step, each worse than the one before."""

    def post_step(self) -> None:
        self.due = True

    def evaluate(self) -> None:
        if vars(self).pop("due", False):
            found = {"CE loss": float(self.trainer.step), "PPL": 1.0, "tokens": 1.0}
            self.trainer.log_evaluation({"held out": found})


def test_a_run_that_was_stopped_early_takes_no_step_when_it_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reached = []
    for patience in (2, 2, 2, 4):
        run = trainer(
            tmp_path,
            9,
            callbacks={"worse": Worse(), "stop": EarlyStoppingCallback(patience=patience)},
        )
        run.fit()
        assert run.cancelled is not None
        reached.append(run.step)
    assert reached == [3, 3, 3, 5], "more patience goes on"
    assert "not been better than 1.0000 of step 1" in capsys.readouterr().err


@dataclass(kw_only=True)
class Summing(Callback):
    """Has its tensor from the first step on."""

    enabled: bool = True
    takes: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.total: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.total is None else {"total": self.total}

    def load_tensors(self, tensors: Any) -> bool:
        if self.takes:
            self.total = tensors["total"]
        return self.takes

    def post_step(self) -> None:
        if self.total is None:
            self.total = torch.zeros(2)
        self.total += self.trainer.step


@pytest.mark.parametrize("takes", [True, False])
def test_tensors_of_a_first_step_are_handed_over_or_said_to_be_left(
    takes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for stop in (2, 4):
        callback = Summing(takes=takes)
        trainer(tmp_path, stop, callbacks={"sum": callback}).fit()
    assert callback.total.tolist() == [10.0 if takes else 7.0] * 2
    said = "1 tensors that the callback sum kept in the checkpoint are not used: it has none of"
    assert (said in capsys.readouterr().err) is not takes


def test_a_change_that_a_finished_run_cannot_take_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, 9).fit()
    for lr, said in ((0.1, False), (0.2, True)):
        trainer(tmp_path, 9, lr=lr).fit()
        found = capsys.readouterr().err
        assert "already finished at step 9: nothing to do" in found
        line = "changed, and no step is left that it acts on: train_module.optim.lr: 0.1 -> 0.2"
        assert (line in found) is said


class Restless(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.noise, self.calls, self.width = torch.Generator(), 0, 16
        self.draws = {"seed": 1, "of": [np.random.default_rng(1)]}
        self._past: list[int] = []
        self.mean, self._found = torch.zeros(()), None
        self.register_buffer("moving", torch.zeros(()), persistent=False)
        self.register_buffer("still", torch.zeros(()), persistent=False)
        self.register_buffer("kept", torch.zeros(()))
        self.moving: Tensor
        self.kept: Tensor

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        self.moving += 1
        self.kept += 1
        self._past.append(len(images))
        self.mean = self.mean + 1
        self._found = self.mean
        drawn = torch.rand((), generator=self.noise) + float(self.draws["of"][0].random())
        return super().forward(images) + drawn  # type: ignore[no-any-return]


def test_what_a_step_changes_and_no_checkpoint_holds_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path / "restless", 3, Restless()).fit()
    found = capsys.readouterr().err
    assert found.count("a step changes what no checkpoint holds") == 1
    for name in ("noise (a generator)", "draws (a dict)", "_past (a list)", "calls (a number)"):
        assert f"model.{name}" in found
    assert not any(f"model.{name}" in found for name in ("still", "kept", "width", "_found"))
    trainer(tmp_path / "plain", 3).fit()
    assert "no checkpoint holds" not in capsys.readouterr().err


def test_a_step_that_is_left_out_is_left_out_whoever_takes_it() -> None:
    model = nn.Linear(2, 2)
    optimizer = SkipStepAdamWConfig(rolling_interval_length=4, sigma_factor=1.0).build(model)
    guard, skipped = optimizer.guard, []  # type: ignore[attr-defined]
    for number in range(6):
        model(torch.ones(1, 2)).sum().backward()
        before = model.weight.detach().clone()
        guard.push(torch.tensor(100.0 if number == 4 else 1.0), torch.ones(()))
        if number % 2:
            take_step(optimizer, torch.zeros(()))
        else:
            optimizer.step()
        assert torch.equal(model.weight, before) is bool(guard.skipped())
        skipped.append(bool(guard.skipped()))
    assert skipped[4]
    assert not skipped[5]


def config(**optim: Any) -> TransformerTrainModuleConfig:
    data: JsonObject = {"rank_microbatch_size": 32, "optim": optim}
    return parse(TransformerTrainModuleConfig, Values(data, file="train.yaml", imports=True))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("NAdam", {"lr": 2e-3, "betas": [0.9, 0.99]}),
        ("RMSprop", {"momentum": 0.5, "weight_decay": 0.1}),
        ("Adagrad", {}),
        ("Adamax", {"lr": 1e-2}),
        ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    ],
)
def test_train_yaml_names_any_class_of_torch_optim(name: str, options: dict[str, Any]) -> None:
    found = config(name=f"torch.optim:{name}", **options)
    plain = as_dict(found)
    assert plain["optim"] == {"name": f"torch.optim:{name}", **options}
    assert parse(TransformerTrainModuleConfig, Values(plain, imports=True)) == found
    model = DecoderConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=2)
    module = TransformerTrainModule(found, model, seed=1)
    assert type(module.optimizer) is getattr(torch.optim, name)
    tokens = torch.arange(8)[None]
    before = [p.detach().clone() for p in module.model.parameters()]
    metrics = module.train_step([(tokens, (tokens + 1) % 9)], 1, 1)
    assert metrics["optim/lr"] == found.optim.lr == module.optimizer.param_groups[0]["lr"]
    assert not all(map(torch.equal, before, module.model.parameters()))
    again = TransformerTrainModule(found, model, seed=2)
    again.load_state_dict(module.state_dict())
    assert all(map(torch.equal, module.model.parameters(), again.model.parameters()))


@pytest.mark.parametrize(
    ("optim", "what"),
    [
        ({"name": "torch.optim:NAdam", "lrr": 1.0}, "does not take these options"),
        ({"name": "torch.optim:NAdm"}, "has no class NAdm"),
        ({"name": "torch.optim:SGD", "lr": -1.0}, "does not take these options"),
        ({"name": "torch.optim:LBFGS"}, "calls the model itself"),
        ({"name": "torch.nn:Linear"}, "not a subclass"),
    ],
)
def test_an_optimiser_that_cannot_be_made_is_refused_with_its_place(
    optim: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        config(**optim)
    assert "train.yaml" in str(caught.value.where)


def test_a_section_of_ones_own_is_still_named_by_its_own_class() -> None:
    found = config(name="support.own_parts:PlainSGDConfig", lr=0.5)
    assert found.optim == PlainSGDConfig(lr=0.5)


NEW = """\
version: 1
sources:
  code: {data: code, max_epochs: 9}
  more: {data: held, max_epochs: 99}
stages:
  - {name: short, tokens: 1024, sequence_length: 8, weights: {code: 1, more: 3}}
  - {name: last, tokens: 1024, weights: {more: 1}}
"""
ROWS = 12 * 8
"""Rows of 32 tokens of the first 12 steps."""


@pytest.fixture(scope="module")
def folder(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny mixture, a run of 12 steps on it, and its revision there, `new.lock.json`."""
    place = tmp_path_factory.mktemp("revised") / "data"
    shutil.copytree(tiny_mixture.parent, place)
    build_trainer(place / "mixture.lock.json", place / "run", stop=12).fit()
    (place / "new.yaml").write_text(NEW)
    done = revise(str(place / "mixture.lock.json"), str(place / "run"), str(place / "new.yaml"))
    assert (done.status, done.lock.extends[-1].rows) == ("written", ROWS)
    return place


def test_a_revised_run_goes_on_with_the_batches_of_the_revision_and_resumes_to_the_bit(
    folder: Path, tmp_path: Path
) -> None:
    new = folder / "new.lock.json"
    for name, stops in (("one", (20,)), ("two", (14, 18, 20))):
        shutil.copytree(folder / "run", tmp_path / name)
        for step in stops:
            trainer = build_trainer(new, tmp_path / name, stop=step)
            trainer.fit()
            assert trainer.resumed
    one, two = (steps_of(tmp_path / name) for name in ("one", "two"))
    assert [line["step"] for line in one] == [*range(1, 21)]
    assert one == two
    assert [line["rows"] for line in one] == [[8 * i, 8 * i + 8] for i in range(20)]
    assert [line["train/sequence length"] for line in one[11:]] == [32] + [8] * 4 + [32] * 4
    assert {line["train/tokens"] for line in one} == {256}
    # evaluation always sees rows of the longest length
    held = [line["eval"]["held"]["tokens"] for line in metrics(tmp_path / "one") if "eval" in line]
    assert len(set(held)) == 1

    # every row of the run against the sources' streams, each from its first row on
    old, lock = Lock.read(folder / "mixture.lock.json"), Lock.read(new)
    datasets = {name: Dataset.open(folder / name) for name in ("code", "prose", "held")}
    opened = {"code": datasets["code"], "prose": datasets["prose"], "more": datasets["held"]}
    seen: dict[str, list[int]] = {name: [] for name in opened}
    with DataLoader(new, global_batch_size=256, rank_microbatch_size=256, prefetch=0) as loader:
        ids = [row for step in loader for batch in step for row in whole_rows(batch.input_ids)]
    place = lock.schedule().locate(np.arange(lock.total_rows))
    assert len(ids) == lock.total_rows == 20 * 8
    for got, source, row in zip(ids, place.source.tolist(), place.row.tolist(), strict=True):
        name = lock.sources[source].name
        seen[name].append(row)
        assert got == opened[name].read(row * 32, row * 32 + 32).tolist()
    for index, source in enumerate(lock.sources):
        whole = len(seen[source.name]) // source.rows * source.rows
        assert sorted(seen[source.name][:whole]) == sorted(
            [*range(source.rows)] * (whole // source.rows)
        )
        assert len(seen[source.name]) == lock.rows_drawn(index)
    before = old.schedule().locate(np.arange(ROWS))
    names = [old.sources[s].name for s in before.source.tolist()]
    assert names == [lock.sources[s].name for s in place.source[:ROWS].tolist()]
    assert before.row.tolist() == place.row[:ROWS].tolist()

    report = verify_training(lock, read_log(tmp_path / "two"))
    assert (report.agrees, report.reached, report.problems) == (True, 160, [])
    other = verify_training(old, read_log(tmp_path / "two"))
    assert not other.agrees


def whole_rows(ids: torch.Tensor) -> list[list[int]]:
    """Return the rows of 32 tokens of a micro-batch, whatever it is cut into."""
    return ids.reshape(-1, 32).tolist()


def test_a_run_beyond_the_revision_is_refused_with_the_step_at_which_they_part(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    build_trainer(folder / "mixture.lock.json", tmp_path / "run", stop=18).fit()
    with pytest.raises(ValidationError) as refusal:
        build_trainer(folder / "new.lock.json", tmp_path / "run").fit()
    assert "144 rows of the older mixture" in refusal.value.what
    assert "goes its own way from row 96, after step 12" in refusal.value.what
    # what the message says to do
    shutil.rmtree(tmp_path / "run" / "step00000018")
    build_trainer(folder / "new.lock.json", tmp_path / "run", stop=13).fit()
    with pytest.raises(ValidationError, match="another mixture"):
        build_trainer(folder / "mixture.lock.json", tmp_path / "run").fit()
    with pytest.raises(ValidationError, match="trained on another mixture: 104 rows"):
        revise(str(folder / "mixture.lock.json"), str(tmp_path / "run"), str(folder / "new.yaml"))
    # a checkpoint by itself, and a lock that goes on with the run's
    at = str(tmp_path / "run" / "step00000012")
    again = revise(str(folder / "new.lock.json"), at, str(folder / "new.yaml"), dry_run=True)
    assert [older.rows for older in again.lock.extends] == [ROWS, ROWS]
