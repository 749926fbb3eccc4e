"""Initial values: truncated normal streams, what each parameter gets, and each rank draws."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.distributed import run_ranks
from support.runs import build_trainer
from support.training import MODEL, build, digest, full
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from olm_data.errors import UsageError
from olm_train.checkpoint.load import open_checkpoint
from olm_train.distributed.world import World
from olm_train.extensions.hf_export.command import export
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import CHUNK, CUTOFF, RULE, Workspace, init_parameters, parameter_key

CONFIG = DecoderConfig(
    vocab_size=600, d_model=64, n_layers=3, n_heads=4, attention={"qk_norm": "head"}
)


def weights(
    config: DecoderConfig, seed: int = 7, threads: int | None = None
) -> dict[str, torch.Tensor]:
    model = Decoder(config)
    init_parameters(model, seed, threads=threads)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_same_seed_same_bits_other_seed_other_bits() -> None:
    first, again, other = weights(CONFIG), weights(CONFIG), weights(CONFIG, seed=8)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, other[name]) == (value.ndim == 1)


def test_an_option_leaves_the_weights_it_does_not_touch() -> None:
    tied = weights(CONFIG.changed(head={"tied": True}, attention={"qk_norm": None}))
    full = weights(CONFIG)
    assert set(full) - set(tied) == {
        "lm_head.weight",
        *(f"blocks.{i}.attention.{which}_norm.weight" for i in range(3) for which in "qk"),
    }
    for name, value in tied.items():
        assert torch.equal(value, full[name])


def test_biases_and_rows_that_pad_the_vocabulary_are_zeros() -> None:
    plain = weights(CONFIG)
    for name, value in weights(
        CONFIG.changed(attention={"bias": "all"}, feed_forward={"bias": True}, vocab_multiple=128)
    ).items():
        if name.endswith(".bias"):
            assert not value.any()
        elif name in ("embeddings.weight", "lm_head.weight"):
            assert torch.equal(value[:600], plain[name])
            assert value.shape == (640, 64)
            assert not value[600:].any()
        else:
            assert torch.equal(value, plain[name])


def test_norm_weights_are_ones_or_zeros_that_are_added_to_one() -> None:
    for zero_centred in (False, True):
        for name, value in weights(CONFIG.changed(norm={"zero_centred": zero_centred})).items():
            assert value.ndim == 2 or (value == 1 - zero_centred).all(), name


def test_global_random_state_has_no_part_in_it() -> None:
    torch.manual_seed(1)
    first = weights(CONFIG)
    before = torch.get_rng_state()
    second = weights(CONFIG)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_deviations_are_as_documented() -> None:
    for name, value in weights(CONFIG).items():
        if value.ndim == 1:
            assert (value == 1).all()
            continue
        residual = name.endswith(("w_out.weight", "w_down.weight"))
        std = 0.02 / (6**0.5 if residual else 1)
        assert abs(value.std().item() / (0.9866 * std) - 1) < 0.05  # truncation at 3 costs 1.3 %
        assert value.abs().max() <= 3 * std
        assert abs(value.mean().item()) < 0.1 * std


def test_t3_golden_weights() -> None:
    """Frozen bit for bit: other values need another name of the rule."""
    assert RULE == "sliced-1"
    assert parameter_key(7, "blocks.1.attention.w_qkv.weight") == 0x56281A034859FA9D
    drawn = weights(CONFIG)
    first = drawn["blocks.1.attention.w_qkv.weight"][100, :2]
    assert [x.hex() for x in first.tolist()] == ["-0x1.1d17c00000000p-7", "0x1.ca08b60000000p-8"]
    last = drawn["blocks.2.feed_forward.w_down.weight"][63, -2:]
    assert [x.hex() for x in last.tolist()] == ["-0x1.bb135c0000000p-8", "-0x1.cd43a80000000p-9"]


@pytest.mark.parametrize("threads", [2, 5])
def test_t3_threads_and_pieces_leave_every_bit(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights(CONFIG)
    monkeypatch.setattr("olm_train.model.init.PIECE", 997)
    found = weights(CONFIG, threads=threads)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_t3_an_error_in_a_thread_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workspace, "fill", lambda *_: (_ for _ in ()).throw(MemoryError("drawn")))
    with pytest.raises(MemoryError, match="drawn"):
        weights(CONFIG, threads=3)


def test_t3_weights_of_another_dtype_are_the_fp32_ones_rounded() -> None:
    """As on another device, the values are drawn in fp32 on the CPU and then copied."""
    model = Decoder(CONFIG, dtype=torch.bfloat16)
    init_parameters(model, 7)
    for name, value in weights(CONFIG).items():
        assert torch.equal(dict(model.named_parameters())[name], value.bfloat16())


def test_t3_parameters_do_not_resemble_each_other() -> None:
    drawn = {n: v.flatten()[:4096] for n, v in weights(CONFIG).items() if v.ndim == 2}
    table = torch.corrcoef(torch.stack(list(drawn.values()))) - torch.eye(len(drawn))
    assert table.abs().max() < 5 / 64


def test_t3_the_rule_is_named_in_the_configuration_and_another_one_is_refused(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path)
    assert trainer.config["initial_values"] == RULE
    with pytest.raises(UsageError, match="initial_values is one of sliced-1, not 'torch-1'"):
        build_trainer(tiny_mixture, tmp_path, "--initial_values=torch-1")


KEY = 0x0123456789ABCDEF
COUNT = 1 << 21
MASS = math.erf(CUTOFF / math.sqrt(2))
"""Share of a normal distribution within the cutoff."""


def draw(count: int, *, key: int = KEY, start: int = 0, std: float = 1.0) -> NDArray[np.float32]:
    out = np.full(count, np.nan, dtype=np.float32)
    Workspace().fill(out, key, start, std)
    return out


@pytest.fixture(scope="module")
def sample() -> NDArray[np.float64]:
    return draw(COUNT).astype(np.float64)


@given(start=st.integers(0, 3 * CHUNK), count=st.integers(0, CHUNK + 3))
@settings(max_examples=40, deadline=None)
def test_t3_a_slice_is_what_it_is_in_the_whole(start: int, count: int) -> None:
    whole = draw(4 * CHUNK + 3)
    assert np.array_equal(draw(count, start=start), whole[start : start + count])


@pytest.mark.parametrize("start", [2**32 - 3, 2**40 + 1, 2**63 - 2])
def test_t3_numbers_far_out_are_as_good_and_no_repetition(start: int) -> None:
    far = draw(4096, start=start)
    assert np.array_equal(far[7:], draw(4089, start=start + 7))
    assert abs(far.mean()) < 0.1
    assert not np.array_equal(far, draw(4096, start=start % 2))


def test_t3_every_value_lies_within_the_cutoff() -> None:
    ends = np.array([-(2**31), -(2**31) + 1, -1, 0, 1, 2**31 - 1], dtype=np.int32)
    out = np.empty(ends.size, dtype=np.float32)
    Workspace()._normal(ends, 0.02, out)
    assert np.abs(out).max() <= CUTOFF * 0.02
    assert out[0] == -out[-1] == pytest.approx(-CUTOFF * 0.02, rel=2e-5)
    assert out[3] == 0
    assert out[4] == -out[2] > 0


def test_t3_moments_are_those_of_the_truncated_distribution(sample: NDArray[np.float64]) -> None:
    density = math.exp(-(CUTOFF**2) / 2) / math.sqrt(2 * math.pi)
    second = 1 - 2 * CUTOFF * density / MASS
    fourth = 3 * second - 2 * CUTOFF**3 * density / MASS
    for power, expected in ((1, 0.0), (2, second), (3, 0.0), (4, fourth)):
        values = sample**power
        error = values.std() / math.sqrt(COUNT)
        assert abs(values.mean() - expected) < 4 * error, power


def test_t3_distribution_passes_kolmogorov_and_smirnov(sample: NDArray[np.float64]) -> None:
    ordered = np.sort(sample)[::16]
    exact = np.array([math.erf(x / math.sqrt(2)) for x in ordered]) / (2 * MASS) + 0.5
    distance = np.abs(exact - np.arange(0, COUNT, 16) / COUNT).max()
    assert distance * math.sqrt(COUNT) < 1.63  # one sample in a hundred is beyond


def test_t3_neighbours_and_streams_are_independent(sample: NDArray[np.float64]) -> None:
    def correlation(other: NDArray[np.float64]) -> float:
        size = min(other.size, sample.size)
        return abs(np.corrcoef(sample[:size], other[:size])[0, 1]) * math.sqrt(size)

    for lag in (1, 2, 3, 64, 4096):
        assert correlation(sample[lag:]) < 4, lag
        assert correlation(sample[lag:] ** 2) < 4, lag
    for key in (KEY + 1, KEY ^ (1 << 63), 0):
        assert correlation(draw(COUNT, key=key).astype(np.float64)) < 4, key


def test_t3_pairs_fill_the_plane(sample: NDArray[np.float64]) -> None:
    """Neighbours by the cells of a 64 x 64 grid of equal shares: chi-square."""
    edges = np.quantile(sample, np.linspace(0, 1, 65)[1:-1])
    cells = np.searchsorted(edges, sample)
    for first, second in ((cells[0::2], cells[1::2]), (cells[1:-1:2], cells[2::2])):
        counts = np.bincount(first * 64 + second, minlength=4096)
        expected = first.size / 4096
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - 4095) < 4 * math.sqrt(2 * 4095)


def test_t3_golden_values() -> None:
    """Frozen bit for bit: a change here is a change of the starting point of every run."""
    assert [value.hex() for value in draw(4).tolist()] == [
        "-0x1.10402a0000000p+0",
        "0x1.b0b8980000000p-3",
        "0x1.13f0700000000p-1",
        "-0x1.b682920000000p-2",
    ]
    found = hashlib.sha256(draw(300_001, std=0.02).astype("<f4").tobytes()).hexdigest()
    assert found == "16cf5c31ac90e041cae60030b021772df5e25a2863ca9260327bb8f07bed5482"


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp, three threads": {"threads": 3},
    "ddp": {"strategy": "ddp"},
    "hsdp": {"strategy": "hsdp", "sharing": {"num_replicas": 2}},
}


def counted(draw: Callable[[], Any]) -> int:
    """Return how many elements `draw` draws."""
    fill, drawn = Workspace.fill, 0

    def count(self: Workspace, out: Any, *arguments: Any) -> None:
        nonlocal drawn
        drawn += out.size
        fill(self, out, *arguments)

    Workspace.fill = count  # type: ignore[method-assign]
    try:
        draw()
    finally:
        Workspace.fill = fill  # type: ignore[method-assign]
    return drawn


def first_weights() -> dict[str, Any]:
    """On each rank: the digest of the whole model, elements drawn, elements of matrices here."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    results = {}
    for name, options in LAYOUTS.items():
        if name == "hsdp" and world.size % 2:
            continue
        threads = options.get("threads")
        module = build(options.get("strategy", "fsdp"), world=world, sharing=options.get("sharing"))
        drawn = counted(lambda: init_parameters(module.model, 5, threads=threads))  # noqa: B023
        here = sum(
            (p.to_local() if isinstance(p, DTensor) else p).numel()
            for p in module.model.parameters()
            if p.ndim == 2
        )
        results[name] = (digest(full(module)["model"]), drawn, here)
    return results | {"columns": _by_columns(world)}


def _by_columns(world: World) -> tuple[str, int, int]:
    """The same for matrices cut over their columns, and a model that is whole on some ranks."""
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("copies", "parts"))
    model = Decoder(MODEL)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(
                torch.full_like(parameter, torch.nan),
                mesh,
                [Replicate(), Shard(parameter.ndim - 1)],
            )
            setattr(module, name, torch.nn.Parameter(cut))
    drawn = counted(lambda: init_parameters(model, 5))
    whole = {name: p.data.full_tensor() for name, p in model.named_parameters()}
    here = sum(p.to_local().numel() for p in model.parameters() if p.ndim == 2)
    return digest(whole), drawn, here


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_t3_each_rank_draws_its_own_part_and_the_whole_is_the_same_bits(ranks: int) -> None:
    expected = digest(full(build())["model"])
    for results in run_ranks(first_weights, ranks):
        assert {"fsdp", "ddp", "columns"} < results.keys()
        for layout, (found, drawn, here) in results.items():
            assert found == expected, layout
            assert drawn == here, layout


def test_t3_nothing_is_drawn_before_a_load(tiny_mixture: Path, tmp_path: Path) -> None:
    def begin(folder: str, *more: str, stop: int = 2) -> int:
        def draw() -> None:
            nonlocal trainer
            trainer = build_trainer(tiny_mixture, tmp_path / folder, *more, quiet=True, stop=stop)
            trainer.restore()

        return counted(draw)

    trainer: Any = None
    matrices = begin("run")
    assert matrices == sum(p.numel() for p in trainer.train_module.model.parameters() if p.ndim > 1)
    trainer.fit()
    assert begin("run", stop=3) == 0
    assert trainer.step == 2
    weights = full(trainer.train_module)["model"]
    exported = tmp_path / "exported"
    export(open_checkpoint(tmp_path / "run" / "step00000002", World()), exported)
    no_state = ("--trainer.load_trainer_state=false", "--trainer.load_optim_state=false")
    for place, more in (("run", ()), ("run", no_state), ("exported", no_state)):
        path = f"--trainer.load_path={tmp_path / place}"
        assert begin(f"{place}{len(more)}", path, *more, stop=3) == 0
        assert digest(full(trainer.train_module)["model"]) == digest(weights)


def test_t3_weights_that_are_there_are_not_drawn_again_and_none_are_not_trained(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path)
    module = trainer.train_module
    batches = next(iter(trainer.data_loader))
    trainer.data_loader.close()
    with pytest.raises(AssertionError, match="neither ensure_weights nor load_state_dict"):
        module.train_step(batches, 1, 2)
    with pytest.raises(AssertionError, match="neither ensure_weights nor load_state_dict"):
        module.eval_batch(batches[0])
    mine = {"model": {name: torch.ones_like(p) for name, p in module.state_dict()["model"].items()}}
    module.load_state_dict(mine)
    assert counted(lambda: trainer.restore()) == 0
    assert all(bool((p == 1).all()) for p in module.model.parameters())
