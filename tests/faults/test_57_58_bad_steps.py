"""FAULTS rows 57 and 58: steps that are not taken, and rows that are left out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import run_ranks
from support.runs import build_trainer, group_world, metrics, same_bits

from olm_data.extensions.show.steps import Batches
from olm_data.extensions.verify.training import verify_training
from olm_data.mixture.lock import Lock
from olm_data.rows.views import LockRows
from olm_data.run_log.log import RunLog, read_starts
from olm_data.run_log.metric_names import CE_LOSS, GRAD_NORM, NON_FINITE
from olm_data.run_log.run_folder import Run
from olm_train import BasicTrainModule
from olm_train.callbacks.base import Callback
from olm_train.distributed.world import World
from olm_train.stability.report import NonFiniteError

pytestmark = pytest.mark.slow  # two whole runs on two ranks


BAD = 10


ROWS = (72, 80)


"""Of step 10: eight rows a step."""


class PoisonedRow(Callback):
    """The rank that has a row gets a NaN from it, whenever it trains on it."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.hit = False

    def pre_train(self) -> None:
        self.trainer.train_module.model.norm.register_forward_hook(self._poison)

    def pre_step(self, batches: Any) -> None:
        self.hit = any(self.row in batch.rows.tolist() for batch in batches)

    def _poison(self, _module: object, _inputs: object, out: torch.Tensor) -> torch.Tensor:
        return out * torch.nan if self.hit and torch.is_grad_enabled() else out


def run(
    lock: Path, folder: Path, *options: str, world: World | None = None, row: int = ROWS[0]
) -> tuple[Any, NonFiniteError | None]:
    callbacks = {"poison": PoisonedRow(row)}
    trainer = build_trainer(lock, folder, *options, callbacks=callbacks, world=world)
    try:
        trainer.fit()
    except NonFiniteError as error:
        return trainer, error
    return trainer, None


def ranks(lock: Path, folder: Path) -> dict[str, Any]:
    """All three policies on one rank of a group: what each rank did."""
    told: dict[str, Any] = {}
    world = group_world()
    _, error = run(lock, folder / "halt", world=world)
    assert error is not None
    told["halt"] = (error.step, error.rows)
    for policy in ("skip", "rewind"):
        option = f"--train_module.non_finite={policy}"
        trainer, error = run(lock, folder / policy, option, world=world)
        told[policy] = (error, trainer.step, trainer.bad_steps.rewinds, trainer.data_loader.skip)
    return told


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_mixture: Path) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(ranks, 2, tiny_mixture, folder)


def test_57_every_rank_does_the_same(runs: tuple[Path, list[Any]]) -> None:
    _, (one, two) = runs
    assert one == two
    assert one["halt"] == (BAD, (ROWS,))
    assert one["skip"] == (None, 24, 0, ())
    assert one["rewind"] == (None, 23, 1, (ROWS,))  # the lock has 24 steps; one is left out


def test_57_the_documents_of_the_step_are_named(
    runs: tuple[Path, list[Any]], tiny_mixture: Path, tmp_path: Path
) -> None:
    folder, _ = runs
    report = json.loads((folder / "halt" / f"bad-step{BAD:08d}.json").read_text())
    assert (report["step"], report["loss"]) == (BAD, "nan")
    assert [row["row"] for row in report["rows"]] == list(range(*ROWS))
    for row in report["rows"]:
        for piece in row["documents"]:
            assert piece["input"].endswith(f"{row['source']}.jsonl")
            assert piece["position_kind"] == "byte"
    _, error = run(tiny_mixture, tmp_path)
    first = report["rows"][0]["documents"][0]
    assert f"{first['input']} byte {first['position']}" in str(error)
    assert "--data_loader.skip='[[72, 80]]'" in str(error)


def test_57_halt_logs_and_saves_nothing_of_the_step_or_after_it(
    runs: tuple[Path, list[Any]],
) -> None:
    folder = runs[0] / "halt"
    assert [line["step"] for line in metrics(folder) if "eval" not in line] == list(range(1, BAD))
    assert sorted(path.name for path in folder.glob("step*")) == ["step00000006"]


def test_57_skip_goes_on_and_log_and_verify_say_so(
    runs: tuple[Path, list[Any]], tiny_mixture: Path
) -> None:
    folder, lock = runs[0] / "skip", Lock.read(tiny_mixture)
    lines = [line for line in metrics(folder) if "eval" not in line]
    assert [line["step"] for line in lines if line.get("optim/step skipped")] == [BAD]
    assert lines[BAD - 1]["train/CE loss"] is None  # JSON has no NaN
    found = verify_training(lock, RunLog.read(folder))
    assert found.agrees
    assert found.not_taken == [BAD]
    assert sum(account.skipped for account in found.accounts) == 8
    assert sum(account.trained for account in found.accounts) == 23 * 8
    run = Run.read(str(folder))
    assert found.steps == 24
    batches = Batches(LockRows(lock), batch_sizes=run.batch_sizes, run=run)
    assert [batches.state(step) for step in (BAD - 1, BAD, 24)] == [
        "trained",
        "not taken",
        "trained",
    ]


def test_57_rewind_is_a_run_that_never_had_the_rows(
    runs: tuple[Path, list[Any]], tiny_mixture: Path, tmp_path: Path
) -> None:
    def same(line: dict[str, Any]) -> dict[str, Any]:
        return {name: line[name] for name in ("step", "rows", "order", "train/CE loss")}

    folder, lock = runs[0] / "rewind", Lock.read(tiny_mixture)
    assert [(s.step, s.bad) for s in read_starts(folder)] == [(0, ()), (6, (ROWS,))]
    found = verify_training(lock, RunLog.read(folder))
    assert found.agrees
    assert sum(account.skipped for account in found.accounts) == 8
    assert (found.steps, found.skipped) == (23, [ROWS])
    # By hand: stop at the checkpoint, leave the rows out, go on.
    build_trainer(tiny_mixture, tmp_path, "--trainer.hard_stop={value: 6, unit: steps}").fit()
    rest = (f"--data_loader.skip=[{list(ROWS)}]", "--trainer.max_duration={value: 23, unit: steps}")
    build_trainer(tiny_mixture, tmp_path, *rest).fit()
    ours, byhand = [
        [same(line) for line in metrics(where) if "eval" not in line]
        for where in (folder, tmp_path)
    ]
    assert [line["rows"] for line in ours] == [line["rows"] for line in byhand]
    assert [line["order"] for line in ours] == [line["order"] for line in byhand]


def test_57_a_restart_keeps_leaving_the_rows_out(tiny_mixture: Path, tmp_path: Path) -> None:
    option, stop = (
        "--train_module.non_finite=rewind",
        "--trainer.hard_stop={value: 11, unit: steps}",
    )
    trainer, error = run(tiny_mixture, tmp_path, option, stop)
    assert (error, trainer.bad_steps.rewinds) == (None, 1)
    for folder in tmp_path.glob("step*11"):  # as if it had been killed before it saved this one
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        folder.rmdir()
    trainer, error = run(tiny_mixture, tmp_path, option)
    assert (error, trainer.bad_steps.rewinds, trainer.step) == (None, 0, 23)
    assert trainer.data_loader.skip == (ROWS,)
    assert json.loads((tmp_path / "config.json").read_text())["data_loader"]["skip"] == [list(ROWS)]
    assert verify_training(Lock.read(tiny_mixture), RunLog.read(tmp_path)).agrees


def test_57_rewinding_ends_where_it_may_not_or_cannot_go_on(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    option = "--train_module.non_finite=rewind"
    _, error = run(tiny_mixture, tmp_path / "never", option, "--trainer.max_rewinds=0")
    assert error is not None
    _, error = run(tiny_mixture, tmp_path / "first", option, row=8)  # no checkpoint yet
    assert error is not None
    assert error.step == 2


def test_57_weights_are_those_of_the_step_before(tiny_mixture: Path, tmp_path: Path) -> None:
    option = (
        "--trainer.metrics_collect_interval=7"  # the host learns of it at step 12, before it saves
    )
    trainer, error = run(tiny_mixture, tmp_path / "bad", option)
    assert error is not None
    assert trainer.step > BAD
    good = build_trainer(
        tiny_mixture, tmp_path / "good", f"--trainer.hard_stop={{value: {BAD - 1}, unit: steps}}"
    )
    good.fit()
    one, other = [
        {f"{part}.{name}": t for part, found in t_.items() for name, t in found.items()}
        for t_ in (trainer.train_module.state_dict(), good.train_module.state_dict())
    ]
    assert same_bits(one, other)


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_57_one_of_loss_and_gradient_is_enough(bad: str) -> None:
    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return output.sum() + torch.inf if bad == "loss" else (0 * output).sqrt().sum()

    model = torch.nn.Linear(2, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    module = BasicTrainModule(model, torch.optim.SGD, loss, optim={"lr": 0.1})
    told = module.train_step([(torch.ones(3, 2), torch.ones(3))], 1, 1)
    finite = [math.isfinite(told[name]) for name in (CE_LOSS, GRAD_NORM)]
    assert finite == [bad != "loss", bad != "gradient"]
    assert told[NON_FINITE] == 1
    assert same_bits(before, model.state_dict())


STEPS = "--trainer.max_duration={value: 12, unit: steps}"


SKIP = "--data_loader.skip=[[32, 48]]"  # steps 5 and 6


def orders(folder: Path) -> list[str]:
    return [line["order"] for line in metrics(folder) if "eval" not in line]


def test_58_skipped_steps_are_recorded_and_change_the_digests_deterministically(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    build_trainer(tiny_mixture, tmp_path / "whole", STEPS).fit()
    build_trainer(tiny_mixture, tmp_path / "one", STEPS, SKIP).fit()
    other = STEPS, SKIP, "--train_module.rank_microbatch_size=32", "--data_loader.prefetch=0"
    build_trainer(tiny_mixture, tmp_path / "other", *other).fit()
    whole, one = orders(tmp_path / "whole"), orders(tmp_path / "one")
    assert one == orders(tmp_path / "other")
    assert one[:4] == whole[:4]
    assert one[4:10] == whole[6:]  # what follows comes two steps earlier, otherwise the same
    assert [start.skip for start in read_starts(tmp_path / "one")] == [((32, 48),)]
    found = verify_training(Lock.read(tiny_mixture), RunLog.read(tmp_path / "one"))
    assert found.agrees
    assert sum(account.skipped for account in found.accounts) == 16
