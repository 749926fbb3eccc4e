"""Two ranks under FSDP2, DDP and HSDP: what layouts of test_parity.py do not ask of them.

All checks of two ranks run in one pair of processes (support/parallel_checks.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.distributed import run_ranks
from support.model_options import FAMILIES
from support.parallel_checks import HALF, OPTIMIZERS, all_checks
from support.training import MODEL, ROWS, Run, build, digest, micro_batches, train, two_steps

from olm_data.errors import UsageError
from olm_train.model.decoder import Decoder
from olm_train.parallel.config import DataParallelConfig

pytestmark = pytest.mark.xdist_group("parallel")  # its fixtures are made once
STRATEGIES = ["fsdp", "ddp"]
Ranks = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def single() -> Run:
    return two_steps(build(), [ROWS])


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return run_ranks(all_checks, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moments_in_bfloat16_are_rounded_alike_on_all_copies(strategy: str, ranks: Ranks) -> None:
    alone = two_steps(build(optim=HALF), [ROWS])
    first, second = (rank[strategy, "half"] for rank in ranks)
    assert digest(first.weights) == digest(second.weights)
    assert first.losses == second.losses == pytest.approx(alone.losses, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_starts_with_the_same_bits_and_trains_alike(family: str, ranks: Ranks) -> None:
    alone = two_steps(build(model=MODEL.changed(**FAMILIES[family])), [ROWS])
    for strategy in STRATEGIES if family == "GPT-2" else ["fsdp"]:
        first, second = (rank[strategy, family] for rank in ranks)
        assert first.initial == second.initial == alone.initial
        assert first.losses == second.losses == pytest.approx(alone.losses, rel=1e-4)
        assert digest(first.weights) == digest(second.weights)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimiser_does_with_shards_what_it_does_with_whole_weights(
    name: str, ranks: Ranks
) -> None:
    first, second = (rank["optim", name] for rank in ranks)
    alone = train(build(optim=OPTIMIZERS[name]), [ROWS], steps=[1, 2, 3, 4])
    assert digest(first.weights) == digest(second.weights)
    assert first.losses == pytest.approx(alone.losses, rel=1e-4)
    for key, weight in alone.weights.items():
        # the sign of a momentum near zero is a matter of rounding: hold most weights to it
        far = ~torch.isclose(first.weights[key], weight, rtol=1e-3, atol=2e-4)
        assert far.float().mean() < 0.01


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_starts_from_the_same_bits_and_stays_near(
    strategy: str, single: Run, ranks: Ranks
) -> None:
    run = ranks[0][strategy, "bfloat16"]
    alone = two_steps(build(param_dtype="bfloat16"), [ROWS])
    assert run.initial == alone.initial == single.initial
    assert alone.losses != single.losses
    assert run.losses == pytest.approx(alone.losses, rel=5e-3)
    assert run.losses == pytest.approx(single.losses, rel=3e-2)


def test_gradients_are_exchanged_at_the_last_micro_batch_only(ranks: Ranks) -> None:
    def calls(strategy: str, kind: str) -> int:
        counts = ranks[0][strategy, "traffic"]
        return sum(count for name, count in counts.items() if kind in name)

    assert calls("fsdp", "reduce_scatter") == MODEL.n_layers + 1
    # Counts and loss, and one bucket of gradients, which is all this model fills.
    assert calls("ddp", "allreduce") == 3


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_gradients_reduced_at_each_micro_batch_are_those_of_the_step(
    strategy: str, single: Run, ranks: Ranks
) -> None:
    for kind in ("each", "each offloaded"):
        first, second = (rank[strategy, kind] for rank in ranks)
        assert digest(first.weights) == digest(second.weights)
        assert first.losses == pytest.approx(single.losses, rel=1e-5)
        assert first.norms == pytest.approx(single.norms, rel=1e-4)
    traffic, parameters = ranks[0][strategy, "each traffic"], MODEL.n_layers + 1
    calls = {
        kind: sum(count for name, count in traffic.items() if kind in name)
        for kind in ("reduce_scatter", "allreduce")
    }
    # Copies, here of one rank each, exchange at the last of four; counts and loss are summed too.
    expected = (4 * parameters, 2) if strategy == "fsdp" else (0, parameters + 2)
    assert (calls["reduce_scatter"], calls["allreduce"]) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_in_chunks_follows_one_rank_and_exchanges_nothing_more(
    strategy: str, single: Run, ranks: Ranks
) -> None:
    run = ranks[0][strategy, "chunked"]
    assert run.losses == pytest.approx(single.losses, rel=1e-5)
    assert run.norms == pytest.approx(single.norms, rel=1e-4)
    # Four chunks a micro-batch; the head is gathered once for them, and reduced once a step.
    assert ranks[0][strategy, "chunked traffic"] == ranks[0][strategy, "traffic"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_nan_on_one_rank_stops_all_before_the_weights_change(strategy: str, ranks: Ranks) -> None:
    expected = {"bad": 1.0, "unchanged": True}
    assert [rank[strategy, "non-finite"] for rank in ranks] == [expected, expected]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_of_whole_tensors_fits(strategy: str, ranks: Ranks) -> None:
    assert all(rank[strategy, "whole state fits"] for rank in ranks)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_over_ranks_adds_up_to_one_ranks(strategy: str, ranks: Ranks) -> None:
    module = build()
    (batch,) = micro_batches(1, [ROWS], module.world)
    loss, count = module.eval_batch(batch)
    for rank in ranks:
        assert rank[strategy, "eval"] == (pytest.approx(float(loss), rel=1e-6), int(count), True)


def test_fsdp_cuts_every_fp32_master_weight_and_ddp_wraps(ranks: Ranks) -> None:
    for rank in ranks:
        assert all(rank["shares"].values()), rank["shares"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_wrapped_at_world_size_one(strategy: str) -> None:
    module = build(strategy)
    assert type(module.model) is Decoder
    assert module._forward is module.model
    assert all(type(p) is torch.nn.Parameter for p in module.model.parameters())
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("options", "near"),
    [({"name": "fdsp"}, "fsdp"), ({"param_dtype": "bfloat"}, "bfloat16")],
    ids=str,
)
def test_misspelled_options_are_refused_with_the_nearest_name(
    options: dict[str, Any], near: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        DataParallelConfig(**options)
    assert near in str(refusal.value)
