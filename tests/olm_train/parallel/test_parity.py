"""Layouts of ranks against one rank; what happens around their steps changes no bit of these."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.distributed import run_ranks
from support.parity_ranks import all_checks, begun, layouts_of, next_of, run_of, state_of
from support.parity_ranks import of as module_of
from support.runs import build_trainer, group_world, same_bits, steps_of, tensors
from support.training import assert_alike, load, weights

pytestmark = pytest.mark.xdist_group("parity")  # its fixtures are made once
QUICK, SLOW = ["in parts", "weighed", "dion"], ["recomputed", "both", "weighed", "dion"]


@dataclass
class Layouts:
    """Results of the ranks of a model, by rank, and the folder of the checkpoints."""

    model: str
    ranks: list[dict[Any, Any]]
    folder: Path

    @property
    def names(self) -> list[str]:
        return layouts_of(self.model, len(self.ranks))


@pytest.fixture(
    scope="module",
    params=["dense", pytest.param("experts", marks=pytest.mark.slow)],
)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def layouts(
    request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Layouts:
    folder = tmp_path_factory.mktemp("checkpoints")
    begun(None, model, folder)
    how = QUICK if request.param == 2 else SLOW
    ranks = run_ranks(all_checks, request.param, str(folder), model, how, timeout=1800)
    return Layouts(model, ranks, folder)


def test_every_layout_follows_one_rank(layouts: Layouts) -> None:
    """Gradients of each parameter, routers included, are summed once over all tokens."""
    model, ranks = layouts.model, layouts.ranks
    for how in sorted({key[2] for key in ranks[0] if key[0] == "run"}):
        alone = run_of(None, model, how)
        biases = [value for name, value in alone.weights.items() if name.endswith("router.bias")]
        assert all(bias.abs().max() > 0 for bias in biases)
        assert len(biases) == (2 if model == "experts" else 0)
        for name in layouts.names:
            for rank in ranks:
                assert_alike(rank["run", name, how], alone, (name, how))
        print(f"\n{model}, {how}, as one rank: {', '.join(layouts.names)}")


def test_an_interrupted_run_goes_on_to_the_bit(layouts: Layouts) -> None:
    keys = [key for key in layouts.ranks[0] if key[0] == "begun"]
    assert len(keys) == 2 * len(layouts.names)  # by AdamW and by Dion
    for key in keys:
        straight, again = layouts.ranks[0][key]
        assert again.bits == straight.bits, key
        assert all(rank[key][1].bits == again.bits for rank in layouts.ranks)


def test_a_run_goes_on_from_what_any_layout_saved(layouts: Layouts) -> None:
    """The bits of weights and optimiser in each layout, then the loss of the next step."""
    ranks, module, names = layouts.ranks, module_of(None, layouts.model), layouts.names
    print(f"\n{layouts.model}, {len(ranks)} ranks: weights and optimiser of another layout")
    for saved in (None, *names):
        for name, rank in product(names, ranks):
            assert rank["from", saved, name], (saved, name)
        if saved:  # rows of matrices lie in a checkpoint as in the model
            load(module, layouts.folder / saved)
            assert weights(module) == ranks[0]["begun", saved][0].initial
        print(f"  {saved or 'one rank'}, on one rank and {', '.join(names)}: the same bits")
    for name in names:
        saved, state, loss = ranks[0]["next", name]
        assert state == state_of(load(module, layouts.folder / saved)), (saved, name)
        expected = next_of(module)
        assert loss == pytest.approx(expected, rel=1e-6), (saved, name)
        assert all(rank["next", name] == (saved, state, loss) for rank in ranks)
        print(f"  {name} after {saved}: loss within {abs(loss / expected - 1):.1e}")


STRATEGIES = {
    "ddp": "{name: ddp}",
    "fsdp, kept whole": "{name: fsdp, reshard_after_forward: false}",
    "hsdp": "{name: hsdp, num_replicas: 1}",
}
BUSY = (
    "--trainer.callbacks.lm_evaluator.eval_interval=2",
    "--trainer.callbacks.lm_evaluator.eval_on_startup=true",
    "--trainer.callbacks.checkpointer={save_interval: 1, pre_train_checkpoint: true, "
    "save_async: true}",
    "--trainer.callbacks.replica_checker={interval: 1}",
    "--trainer.callbacks.replay_checker={steps: 2}",
)
QUIET = (
    "--trainer.callbacks.lm_evaluator=null",
    "--trainer.callbacks.checkpointer={save_interval: 100}",
)


def _fit(lock: Path, folder: Path, *options: str) -> None:
    build_trainer(lock, folder, *options, world=group_world()).fit()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluations_checkpoints_checks_and_resumes_change_no_bit_of_the_steps(
    strategy: str, tiny_mixture: Path, tmp_path: Path
) -> None:
    sharing = f"--train_module.dp_config={STRATEGIES[strategy]}"
    end = "--trainer.max_duration={value: 6, unit: steps}"
    for name, options, stops in (("quiet", QUIET, (6,)), ("busy", BUSY, (3, 6))):
        for stop in stops:
            stop_at = f"--trainer.hard_stop={{value: {stop}, unit: steps}}"
            run_ranks(_fit, 2, tiny_mixture, tmp_path / name, sharing, end, stop_at, *options)
    quiet, busy = (steps_of(tmp_path / name) for name in ("quiet", "busy"))
    assert len(quiet) == 6
    assert quiet == busy
    ends = [
        tensors(
            lambda: build_trainer(tiny_mixture, tmp_path / "none"), tmp_path / name / "step00000006"
        )
        for name in ("quiet", "busy")
    ]
    assert same_bits(*ends)
