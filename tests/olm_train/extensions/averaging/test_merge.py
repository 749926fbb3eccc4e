"""Means of weights: shares, running means in fp64, and checkpoints merged."""

from __future__ import annotations

import json
import math
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.forked import forked
from support.runs import SIX_STEPS, build_trainer, environment, one_step_trainer, six_steps

from olm_data.errors import ConflictError, OlmError, UsageError, ValidationError
from olm_data.storage.store import Store
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.load import Checkpoint, open_checkpoint
from olm_train.checkpoint.manifest import CheckpointManifest, FileEntry
from olm_train.checkpoint.merged import Merge, folder_of_paths, merge_of
from olm_train.distributed.world import World
from olm_train.extensions.averaging import merge as module
from olm_train.extensions.averaging import weighting as averaging
from olm_train.extensions.averaging.command import main as merge_command
from olm_train.extensions.averaging.merge import merge_checkpoints
from olm_train.extensions.averaging.weighting import (
    RunningMean,
    Weighting,
    fraction,
    shares,
    shares_of_factors,
)
from olm_train.extensions.downstream.command import main as evaluate
from olm_train.extensions.generate.command import main as generate
from olm_train.extensions.hf_export.command import main as export


@pytest.fixture(scope="module")
def run(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return six_steps(tiny_mixture, tmp_path_factory.mktemp("merging") / "run")


@pytest.fixture
def three(run: Path) -> list[Checkpoint]:
    return [opened(run / f"step{step:08d}") for step in (2, 4, 6)]


def opened(folder: Path | str) -> Checkpoint:
    return open_checkpoint(folder, World())


def weights(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    names = [name for name in checkpoint.index.tensors if name.startswith("model.")]
    tensors = {name: torch.empty(checkpoint.index.tensors[name].shape) for name in names}
    checkpoint.load_tensors(tensors, World())
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ("uniform", [1 / 3, 1 / 3, 1 / 3]),
        ("linear", [1 / 6, 2 / 6, 3 / 6]),
        ("decay", shares("decay", 3)),
        ([1, 2, 5], [1 / 8, 2 / 8, 5 / 8]),
        ([0, 0, 1], [0, 0, 1]),
    ],
)
def test_three_checkpoints_have_the_mean_that_numpy_computes(
    three: list[Checkpoint], tmp_path: Path, given: Weighting | list[float], counts: list[float]
) -> None:
    folder, merge = merge_checkpoints(three, given, tmp_path / "out")
    found, parts = weights(opened(folder)), [weights(each) for each in three]
    assert found.keys() == parts[0].keys()
    for name, got in found.items():
        exact = sum(
            s * part[name].astype(np.float64) for s, part in zip(counts, parts, strict=True)
        )
        np.testing.assert_allclose(got, exact, rtol=6e-8, atol=0)
    assert [part.share for part in merge.of] == pytest.approx(counts)
    assert merge_of(opened(folder)) == merge
    assert not opened(folder).names("optim")


def test_only_one_tensor_is_in_memory_at_a_time(
    three: list[Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    whole = module.fill

    def fill(tensors: dict[str, torch.Tensor], *rest: object) -> None:
        asked.append(len(tensors))
        whole(tensors, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "fill", fill)
    merge_checkpoints(three, "uniform", tmp_path / "out")
    names = [name for name in three[0].index.tensors if name.startswith("model.")]
    assert asked == [1] * 3 * len(names)


def test_a_merge_of_a_merge_counts_each_checkpoint_once(
    three: list[Checkpoint], tmp_path: Path
) -> None:
    two, _ = merge_checkpoints(three[:2], "uniform", tmp_path / "two")
    both, merge = merge_checkpoints([opened(two), three[2]], "uniform", tmp_path / "both")
    whole, _ = merge_checkpoints(three, "uniform", tmp_path / "whole")
    assert [part.share for part in merge.of] == pytest.approx([2 / 3, 1 / 3])
    assert (merge.count, merge.first, merge.last) == (3, 2, 6)
    for name, tensor in weights(opened(whole)).items():
        np.testing.assert_allclose(weights(opened(both))[name], tensor, rtol=2e-7, atol=1e-9)
    with pytest.raises(UsageError, match="a merge has no one step"):
        merge_checkpoints([opened(two), three[2]], "linear", tmp_path / "linear")


def test_a_run_begins_with_merged_weights(
    three: list[Checkpoint], tiny_mixture: Path, tmp_path: Path
) -> None:
    folder, _ = merge_checkpoints(three, "uniform", tmp_path / "out")
    trainer = build_trainer(
        tiny_mixture,
        tmp_path / "new",
        *SIX_STEPS,
        f"--trainer.load_path={folder}",
        "--trainer.load_trainer_state=false",
        "--trainer.load_optim_state=false",
    )
    trainer.restore()
    state = trainer.train_module.state_dict()["model"]
    for name, tensor in weights(opened(folder)).items():
        assert state[name.removeprefix("model.")].numpy().tobytes() == tensor.tobytes()


def test_paths_of_the_configuration_count_from_where_they_did(
    three: list[Checkpoint], run: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    beside, _ = merge_checkpoints(three, "uniform", run / "last3")
    assert b"paths_from" not in (Path(beside) / "merge.json").read_bytes()
    deep, _ = merge_checkpoints(three, "uniform", tmp_path / "a/b/c/merged")
    again, _ = merge_checkpoints([opened(deep)], "uniform", tmp_path / "again")
    bucket, _ = merge_checkpoints(three, "uniform", f"memory://{uuid.uuid4().hex}/merged")
    for folder in (three[0].folder, beside, deep, again, bucket):
        merged = opened(folder)
        assert folder_of_paths(merged) == str(run)
        mixture = Path(folder_of_paths(merged), merged.config["data_loader"]["mixture"])
        assert mixture.resolve() == tiny_mixture


def test_the_same_merge_again_stay(three: list[Checkpoint], tmp_path: Path) -> None:
    folder, _ = merge_checkpoints(three, "uniform", tmp_path / "out")
    before = Path(folder, "manifest.json").stat().st_mtime_ns
    assert merge_checkpoints(three, "uniform", tmp_path / "out")[0] == folder
    assert Path(folder, "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(ConflictError, match="another checkpoint is there"):
        merge_checkpoints(three, "linear", tmp_path / "out")


def test_another_merge_of_the_same_start_is_refused_and_not_taken_for_saved(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    class TwoMerges(Callback):
        def post_train(self) -> None:
            weights = {"w": torch.zeros(2)}
            ways: tuple[Weighting, ...] = ("uniform", "uniform", "linear")
            for weighting in ways:
                merge = Merge(weights=weighting, first=1, last=1, count=1)
                self.trainer.checkpoints.save_merged(weights, merge, "both")

    trainer = one_step_trainer(tiny_mixture, tmp_path)
    trainer.callbacks.add("two", TwoMerges())
    with pytest.raises(ConflictError, match="another checkpoint is there"):
        trainer.fit()
    merge = merge_of(opened(tmp_path / "step00000001-both"))
    assert merge is not None
    assert merge.weights == "uniform"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1, 2], "2 weights for 3"),
        ([1, -1, 1], "no weights of a mean"),
        ([0, 0, 0], "no weights of a mean"),
        ([1, float("inf"), 1], "no weights of a mean"),
    ],
)
def test_weights_that_are_none_are_refused(
    three: list[Checkpoint], tmp_path: Path, given: list[float], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        merge_checkpoints(three, given, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_by_step_want_the_order_of_steps(three: list[Checkpoint], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="of the steps 6, 4, 2"):
        merge_checkpoints(three[::-1], "linear", tmp_path / "out")


def test_what_lies_in_the_output_is_never_replaced(three: list[Checkpoint], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(ConflictError, match="something else"):
        merge_checkpoints(three, "uniform", tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"
    with pytest.raises(UsageError, match="name of a checkpoint that a run goes on from"):
        merge_checkpoints(three, "uniform", tmp_path / "step00000099")


def test_checkpoints_of_different_models_are_refused(
    three: list[Checkpoint], tiny_mixture: Path, tmp_path: Path
) -> None:
    build_trainer(
        tiny_mixture, tmp_path / "wide", *SIX_STEPS, "--model.feed_forward.hidden_size=48"
    ).fit()
    with pytest.raises(ValidationError, match="not of one model"):
        merge_checkpoints(
            [three[0], opened(tmp_path / "wide" / "step00000006")], "uniform", tmp_path / "out"
        )


@pytest.mark.parametrize("change", [{"version": 2}, {"count": 0}, {"count": "many"}])
def test_a_merge_json_of_others_is_not_believed(
    three: list[Checkpoint], tmp_path: Path, change: dict[str, object]
) -> None:
    folder, _ = merge_checkpoints(three, "uniform", tmp_path / "out")
    path = Path(folder, "merge.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    before = CheckpointManifest.read(Store(folder))
    kept = (entry for entry in before.files if entry.name != "merge.json")
    files = (*kept, FileEntry.of(Path(folder), "merge.json"))
    Path(folder, "manifest.json").write_bytes(replace(before, files=files).encode())
    with pytest.raises(OlmError, match=r"merge\.json"):
        merge_of(opened(folder))


def test_what_it_writes_is_read_by_generate_evaluate_and_export(
    run: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "merged")
    command = [str(run / "step00000002"), str(run / "step00000004"), str(run), "--out", out]
    words = ("merge", *command, "--weights", "1,2,3")
    done = forked("olm_train.cli", *words, environment=environment(), timeout=600)
    assert done.returncode == 0, done.stderr
    shares = [line.split()[-1] for line in done.stdout.splitlines()[-3:]]
    assert shares == ["16.6667%", "33.3333%", "50.0000%"]
    assert done.stderr.endswith(f"the mean of 3 weights: {out}\n")
    held = str(tiny_mixture.parent / "held")
    losses = {}
    for model in (str(run), out):
        found = CliRunner().invoke(evaluate, [model, "--data", held, "--json"])
        assert found.exit_code == 0, found.output
        losses[model] = json.loads(found.stdout)["datasets"][held]["CE loss"]
    assert losses[out] != losses[str(run)]
    assert CliRunner().invoke(generate, [out, "--max-new-tokens", "3"]).exit_code == 0
    written = CliRunner().invoke(export, [out, "--output", str(tmp_path / "exported")])
    assert written.exit_code == 0, written.output
    again = CliRunner().invoke(evaluate, [str(tmp_path / "exported"), "--data", held, "--json"])
    assert json.loads(again.stdout)["datasets"][held]["CE loss"] == losses[out]


def test_weights_by_name_and_json(run: Path, tmp_path: Path) -> None:
    given = [str(run / "step00000004"), str(run), "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(merge_command, [*given, "--weights", "linear", "--json"])
    assert found.exit_code == 0, found.output
    merge = json.loads(found.stdout)
    assert (merge["weights"], merge["first"], merge["last"], merge["count"]) == ("linear", 4, 6, 2)
    assert [part["share"] for part in merge["of"]] == pytest.approx([1 / 3, 2 / 3])


def test_what_is_neither_name_nor_numbers_is_a_usage_error(run: Path, tmp_path: Path) -> None:
    given = [str(run), "-o", str(tmp_path / "out"), "--weights", "cosine"]
    found = CliRunner().invoke(merge_command, given)
    assert found.exit_code == 2
    assert "'cosine' is neither uniform, linear, decay nor numbers" in found.stderr


WEIGHTINGS: tuple[Weighting, ...] = ("uniform", "linear", "decay")


def running(
    values: list[torch.Tensor], weighting: Weighting
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = RunningMean({"w": values[0]})
    for number, value in enumerate(values, start=1):
        mean.update({"w": value}, fraction(weighting, number))
    return mean.mean["w"], mean.tensors


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@given(count=st.integers(1, 60), seed=st.integers(0, 1000), drift=st.floats(0, 3))
@settings(max_examples=30)
def test_the_mean_is_that_of_float64_rounded_once(
    weighting: Weighting, count: int, seed: int, drift: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(40, generator=draw)
    values = [start + drift * torch.randn(40, generator=draw) for _ in range(count)]
    exact = np.stack([value.numpy().astype(np.float64) for value in values])
    wanted = np.tensordot(np.array(shares(weighting, count)), exact, axes=1)
    got, _ = running(values, weighting)
    # rounded once to fp32, and each of the updates in fp64 loses 2^-48 of what it adds up
    rounding = np.spacing(np.abs(wanted).astype(np.float32)) / 2
    updates = count * 2.0**-48 * np.abs(exact).max(0)
    assert (np.abs(got.numpy() - wanted) <= rounding + updates).all()


def test_thousands_of_steps_lose_nothing_where_plain_fp32_does() -> None:
    draw = torch.Generator().manual_seed(0)
    values = [1 + 1e-3 * torch.randn(500, generator=draw) for _ in range(3000)]
    exact = np.stack([value.numpy().astype(np.float64) for value in values]).mean(0)
    got, _ = running(values, "uniform")
    plain = torch.zeros(500)
    for number, value in enumerate(values, start=1):
        plain.lerp_(value, 1 / number)
    assert np.array_equal(got.numpy(), exact.astype(np.float32))
    assert not np.array_equal(plain.numpy(), exact.astype(np.float32))


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("count", [1, 2, 7, 500])
def test_fractions_of_a_running_mean_come_to_the_shares(weighting: Weighting, count: int) -> None:
    got = [0.0] * count
    for number in range(count):
        part = fraction(weighting, number + 1)
        got = [share * (1 - part) for share in got]
        got[number] = part
    assert got == pytest.approx(shares(weighting, count), abs=1e-14)
    assert sum(shares(weighting, count)) == pytest.approx(1)


def test_shares_are_what_the_names_say() -> None:
    assert shares("uniform", 4) == [0.25] * 4
    assert shares("linear", 3) == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    root = math.sqrt
    assert shares("decay", 3) == pytest.approx(
        [root(1 / 3), root(2 / 3) - root(1 / 3), 1 - root(2 / 3)]
    )
    assert shares_of_factors([0.9, 0.4]) == pytest.approx([0.1, 0.5, 0.4])
    assert shares_of_factors([]) == [1.0]


@pytest.mark.parametrize("factors", [[0.5, 0.6], [1.1], [0.5, -0.1], [math.nan]])
def test_factors_that_are_no_decay_are_refused(factors: list[float]) -> None:
    with pytest.raises(UsageError, match="no decay"):
        shares_of_factors(factors)


def sgd(data: torch.Tensor, rates: list[float]) -> list[torch.Tensor]:
    """The weights before and after each step of torch's SGD, whose gradients are the data."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, data.shape[1], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    seen = [weight.detach().clone()]
    for row, rate in zip(data, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        loss = (row * weight).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(weight.detach().clone())
    return seen


def test_a_merge_of_a_constant_run_is_the_decayed_run() -> None:
    """Exactly, where the gradients do not depend on the weights."""
    data = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    factors = [1 - math.sqrt(number / 13) for number in range(1, 13)]
    constant = sgd(data, [0.1] * 12)
    decayed = sgd(data, [0.1 * factor for factor in factors])
    merged = sum(s * w for s, w in zip(shares("decay", 13), constant, strict=True))
    torch.testing.assert_close(merged, decayed[-1], rtol=1e-13, atol=1e-13)
    assert not torch.allclose(merged, constant[-1], rtol=1e-3)


def test_what_has_no_mean_is_left_out_and_precision_is_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(averaging, "_AT_ONCE", 3)  # several groups
    values = {"a": torch.ones(2, 2).bfloat16(), "b": torch.zeros(3), "n": torch.ones(2).long()}
    mean = RunningMean(values)
    mean.update(values, 1)
    mean.update({**values, "a": torch.full((2, 2), 2.0).bfloat16(), "b": torch.ones(3)}, 0.5)
    assert mean.tensors.keys() == {"mean.a", "mean.b", "carry.a", "carry.b"}
    assert mean.mean["a"].dtype == torch.float32
    assert mean.mean["a"].unique().tolist() == [1.5]
    assert mean.mean["b"].unique().tolist() == [0.5]
