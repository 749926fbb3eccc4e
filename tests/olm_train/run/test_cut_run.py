"""Runs whose rows, matrices or experts are cut over ranks: the log of one rank; they go on, and
are read, on any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import run_ranks
from support.runs import (
    build_trainer,
    config_values,
    group_world,
    metrics,
    same_bits,
    steps_of,
    tensors,
)

from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_data.extensions.ledger.files import ledger_files, read_ledger
from olm_data.run_log.metric_names import CE_LOSS, GRAD_NORM
from olm_train import load_model
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import export
from olm_train.distributed.world import World
from olm_train.estimate.sharding import Machine, candidates
from olm_train.parallel.config import DataParallelConfig
from olm_train.run.config import RunConfig
from olm_train.run.dry_run import describe

pytestmark = pytest.mark.xdist_group("cut")  # its fixtures are made once

HALF, END = 4, 10
CALLBACKS = "--trainer.callbacks."
WATCHED = (f"{CALLBACKS}gap_monitor.enabled=true", f"{CALLBACKS}replica_checker.enabled=true")
SHORTER = f"{CALLBACKS}sequence_length_scheduler={{min_sequence_length: 16, warmup_steps: 4}}"
TRUNCATED = SHORTER[:-1] + ", truncate: true, keep_multiple_of: 16}"
NOISE = f"{CALLBACKS}gradient_noise_scale.enabled=true"
LEDGER = f"{CALLBACKS}loss_ledger.enabled=true"
MEAN = f"{CALLBACKS}ema={{decay: 0.9}}"
CP, TP, EP = (f"--train_module.{axis}_config={{degree: 2}}" for axis in ("cp", "tp", "ep"))
NEEDED = "--train_module.cp_config.exchange=needed"
BY_ROW = "--train_module.rank_microbatch_size=32"
EXPERTS = (
    "--model.feed_forward={name: moe, n_experts: 4, top_k: 2, hidden_size: 16, "
    "balance: {name: bias, rate: 0.01}}"
)


@dataclass(frozen=True)
class Way:
    """A way to cut a run.

    Attributes:
        model: options of one rank too.
        cut: of two ranks.
        refused: options of callbacks that do not go with it, and a word of what is said.
        near: how far off losses may be; tenfold after evaluations and in norms.
    """

    model: tuple[str, ...]
    cut: tuple[str, ...]
    refused: dict[str, str]
    near: float = 1e-4


WAYS = {
    "context": Way(
        (), (CP, BY_ROW),
        {NOISE: "gradient of a whole micro-batch", TRUNCATED: "cannot be truncated"}, near=1e-5,
    ),
    "tensor": Way(("--model.vocab_multiple=64",), (TP,), {NOISE: "tp_config"}),
    "experts": Way((EXPERTS,), (EP,), {NOISE: "with train_module.ep_config"}),
}  # fmt: skip


def train_rank(lock: Path, folder: Path, way: Way) -> dict[str, str]:
    """All runs of one rank, and what was refused, by option."""
    world, refused = group_world(), {}

    def fit(name: str, *options: str, stop: int = END) -> None:
        options = (*way.model, *way.cut, *options)
        build_trainer(lock, folder / name, *options, stop=stop, world=world).fit()

    fit("cut", MEAN, LEDGER)
    for step in (HALF, END):
        fit("in two", MEAN, stop=step)
    fit("from one")
    fit("to one", stop=HALF)
    if CP in way.cut:
        fit("shorter", NEEDED, SHORTER)
    else:
        fit("watched", *WATCHED, stop=HALF)
    for option in way.refused:
        try:
            fit("refused", option, stop=2)
        except UsageError as error:
            refused[option] = str(error)
    return refused


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture(scope="module")
def runs(
    tiny_mixture: Path, way: Way, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """The folder of the runs, and what was refused."""
    folder = tmp_path_factory.mktemp("cut")

    def alone(name: str, *options: str, stop: int = END) -> None:
        build_trainer(tiny_mixture, folder / name, *way.model, *options, stop=stop).fit()

    alone("alone", MEAN, LEDGER)
    alone("from one", stop=HALF)
    alone("shorter alone", SHORTER)
    refused, _ = run_ranks(train_rank, 2, tiny_mixture, folder, way)
    alone("to one")
    return folder, refused


@pytest.fixture
def folder(runs: tuple[Path, dict[str, str]]) -> Path:
    return runs[0]


def evaluations(folder: Path) -> list[dict[str, dict[str, float]]]:
    return [line["eval"] for line in metrics(folder) if "eval" in line]


def assert_log(folder: Path, alone: Path, near: float) -> None:
    ours, theirs = steps_of(folder), steps_of(alone)
    assert [line["step"] for line in ours] == [*range(1, END + 1)]
    for mine, its in zip(ours, theirs, strict=True):
        for name in ("order", "train/tokens", "train/labels", "train/attention pairs"):
            assert mine[name] == its[name], name
        assert mine[CE_LOSS] == pytest.approx(its[CE_LOSS], rel=near)
        assert mine[GRAD_NORM] == pytest.approx(its[GRAD_NORM], rel=10 * near)


@pytest.mark.slow
def test_its_log_is_that_of_one_rank(folder: Path, way: Way) -> None:
    for name in ("cut", "from one", "to one"):
        assert_log(folder / name, folder / "alone", way.near)
    if CP in way.cut:
        assert_log(folder / "shorter", folder / "shorter alone", way.near)
    ours, theirs = (evaluations(folder / name) for name in ("cut", "alone"))
    assert len(ours) > 1  # on the way and at the end
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.keys() == its.keys()
        for name, found in mine.items():
            assert found == pytest.approx(its[name], rel=10 * way.near)


@pytest.mark.slow
def test_its_ledger_is_that_of_one_rank(folder: Path, way: Way) -> None:
    def content(folder: Path) -> dict[Any, float]:
        lines = [line for _, table in read_ledger(folder) for line in table.to_pylist()]
        found = {tuple(v for k, v in line.items() if k != "nats"): line["nats"] for line in lines}
        assert len(found) == len(lines)
        return found

    ours, theirs = (content(folder / name) for name in ("cut", "alone"))
    assert ours.keys() == theirs.keys()
    assert [ours[key] for key in theirs] == pytest.approx(list(theirs.values()), rel=10 * way.near)
    if EP not in way.cut:  # whose ranks read rows of their own
        assert {file.rank for file in ledger_files(folder / "cut")} == {0}


@pytest.mark.slow
def test_it_goes_on_with_the_same_bits(folder: Path, way: Way, tiny_mixture: Path) -> None:
    assert steps_of(folder / "in two") == steps_of(folder / "cut")

    def state(name: str) -> dict[str, Any]:
        last = folder / name / f"step{END:08}"
        return tensors(lambda: build_trainer(tiny_mixture, folder / "read", *way.model), last)

    assert same_bits(state("in two"), state("cut"))


@pytest.mark.slow
@pytest.mark.parametrize("mean", ["", "-ema"])
def test_its_checkpoint_is_exported_as_any_other(folder: Path, mean: str, tmp_path: Path) -> None:
    models = []
    for name in ("cut", "alone"):
        checkpoint = open_checkpoint(folder / name / f"step{END:08}{mean}", World())
        export(checkpoint, tmp_path / name)
        model, _ = load_model(tmp_path / name)  # with its tokenizer
        models.append(model)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(models[0](ids), models[1](ids), rtol=1e-3, atol=1e-4)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_callbacks_that_need_what_no_rank_has_are_refused(
    runs: tuple[Path, dict[str, str]], way: Way
) -> None:
    folder, refused = runs
    assert refused.keys() == way.refused.keys()
    for option, said in way.refused.items():
        assert said in refused[option]
    if CP not in way.cut:
        assert len(steps_of(folder / "watched")) == HALF


@pytest.fixture
def config(tiny_mixture: Path, tmp_path: Path) -> Values:
    return Values(config_values(tiny_mixture, tmp_path))


def said(config: Values, *options: str, ranks: int) -> str:
    for option in options:
        config.override(option)
    return describe(RunConfig.resolve(config), ranks)


SIZE = "--data_loader.global_batch_size=512"
AUTO = "--parallel=auto"


@pytest.mark.parametrize(
    ("options", "ranks", "words"),
    [
        ((SIZE, CP), 4, "4 ranks, 2 to a micro-batch, x 2 micro-batches of 128 tokens"),
        ((SIZE,), 4, "4 ranks x 1 micro-batch of 128 tokens"),
        ((SIZE, CP, AUTO), 4, "2 to a micro-batch"),
        ((SIZE, BY_ROW, CP, NEEDED), 4, "if documents are as long as rows"),
        ((EXPERTS, EP), 2, "2 ranks, experts dealt to 2, x 1 micro-batch"),
        ((EXPERTS, EP, AUTO), 2, "fsdp: cut over all ranks"),
    ],
)
def test_a_dry_run_says_what_ranks_share(
    config: Values, options: tuple[str, ...], ranks: int, words: str
) -> None:
    assert words in said(config, *options, ranks=ranks)


@pytest.mark.parametrize(
    ("options", "ranks", "words"),
    [
        ((SIZE, BY_ROW, CP), 4, "if documents are as long as rows"),
        ((EXPERTS,), 2, "experts dealt"),
        ((EXPERTS, EP, AUTO), 2, "ddp: whole"),
    ],
)
def test_a_dry_run_does_not_say_what_they_do_not(
    config: Values, options: tuple[str, ...], ranks: int, words: str
) -> None:
    assert words not in said(config, *options, ranks=ranks)


@pytest.mark.parametrize(
    ("options", "ranks", "words"),
    [
        (("--data_loader.global_batch_size=384", CP), 4, "on 2 times 2 ranks that share them"),
        ((CP,), 3, "degree 2 does not divide the 3 ranks"),
        (("--train_module.cp_config={degree: 4, exchange: ulysses}",), 4, "heads of keys"),
        ((EXPERTS, EP), 3, "degree 2 does not divide the 3 ranks"),
        ((EP,), 2, "no experts to deal"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(
    config: Values, options: tuple[str, ...], ranks: int, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        said(config, *options, ranks=ranks)


def test_copies_that_experts_cannot_be_dealt_in_are_no_candidates() -> None:
    machine = Machine(world_size=8, nodes=4, memory=1)
    for dealt, names in ((1, {"ddp", "hsdp", "fsdp"}), (2, {"hsdp", "fsdp"}), (4, {"fsdp"})):
        found = candidates(machine, DataParallelConfig(), dealt=dealt)
        assert {str(config.name) for _, config in found} == names
