"""Context parallelism: what one rank computes, whichever ranks have which tokens.

All checks of two ranks run in one launch, those of four in another (support/context_ranks.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from support.batches import make_batch
from support.context_ranks import (
    EXCHANGES,
    FOUR,
    LONG,
    MODELS,
    OTHER_SETS,
    QUICK,
    RECOMPUTED,
    STRATEGIES,
    all_checks,
    batches,
    compiled_checks,
    four_checks,
    of,
    steps,
)
from support.distributed import run_ranks
from support.expert_ranks import BALANCES, of_experts
from support.training import LENGTHS, ROWS, build, watched
from support.training import assert_alike as assert_near

from olm_data.errors import UsageError
from olm_train.distributed.world import World
from olm_train.model.decoder import build_decoder
from olm_train.model.head import Head
from olm_train.parallel.config import ContextParallelConfig, DataParallelConfig
from olm_train.parallel.context import require_tokens_alone
from olm_train.parallel.mesh import CUT, Mesh

pytestmark = pytest.mark.xdist_group("context")  # its fixtures are made once
Ranks = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def four() -> Ranks:
    return run_ranks(four_checks, 4)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    if request.param == 4:
        return request.getfixturevalue("four")
    return run_ranks(all_checks, 2, QUICK)


assert_alike = partial(assert_near, far=1e-6)


def exchanges(name: str, ranks: Ranks) -> tuple[str, ...]:
    return (FOUR if len(ranks) > 2 else QUICK)[name]


@pytest.mark.parametrize("model", [name for name in QUICK if name in MODELS])
def test_a_model_follows_one_rank(model: str, ranks: Ranks) -> None:
    expected = steps(build(model=of(model)))
    for rank, exchange in product(ranks, exchanges(model, ranks)):
        assert_alike(rank[model, exchange], expected, exchange)


@pytest.mark.parametrize("data", OTHER_SETS)
def test_so_do_documents_of_any_length(data: str, ranks: Ranks) -> None:
    expected = steps(build(model=of("window")), data)
    for rank, exchange in product(ranks, exchanges(data, ranks)):
        assert_alike(rank[data, exchange], expected, exchange)


def test_so_do_recomputed_activations_of_several_micro_batches(ranks: Ranks) -> None:
    expected = steps(build(model=of("grouped")), parts=2)
    for rank, name in product(ranks, RECOMPUTED):
        for exchange in exchanges(name, ranks):
            assert_alike(rank[name, exchange], expected, (name, exchange))


@pytest.mark.parametrize("balance", [name for name in BALANCES if name != "sequence_aux"])
def test_so_do_experts(balance: str, ranks: Ranks) -> None:
    expected = steps(build(model=of_experts(**BALANCES[balance])), parts=2)
    for rank in ranks:
        assert_alike(rank["experts", balance], expected)


@pytest.mark.slow
def test_two_readers_of_two_ranks_follow_one(four: Ranks) -> None:
    """With hsdp a copy of the weights lies on the ranks that share rows."""
    expected = steps(build(model=of("window")), parts=2)
    for rank, strategy in product(four, STRATEGIES):
        assert_alike(rank[strategy], expected, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(FOUR.keys() - QUICK.keys()))
def test_other_models_and_families_follow_one_rank(model: str, four: Ranks) -> None:
    expected = steps(build(model=of(model)))
    for rank, exchange in product(four, FOUR[model]):
        assert_alike(rank[model, exchange], expected, exchange)


@pytest.mark.slow
def test_compiled_blocks_follow_one_rank() -> None:
    expected = steps(build(model=of("window")))
    for rank in run_ranks(compiled_checks, 2):
        for exchange in EXCHANGES:
            assert rank[exchange].losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_document_is_no_function_of_another_one(exchange: str, ranks: Ranks) -> None:
    found = [rank["apart", exchange] for rank in ranks]
    places = torch.cat([each["own"] for each in found])
    assert places.sort().values.tolist() == list(range(4 * 256))
    changed = torch.cat([each["changed"] for each in found])
    assert set(changed.tolist()) <= set(range(150))
    assert len(changed) > 100
    module = build(model=of("window"))
    with torch.no_grad():
        batch = make_batch(LONG, vocab_size=8, seed=1)
        alone = batch.through(module.model, Head.logits).flatten(0, 1)
    for each in found:
        torch.testing.assert_close(each["logits"], alone[each["own"]], rtol=1e-5, atol=1e-6)


def test_keys_that_no_query_attends_to_change_no_bit(ranks: Ranks) -> None:
    for rank in ranks:
        needed, gathered = (rank["apart", exchange]["logits"] for exchange in EXCHANGES[:2])
        assert torch.equal(needed, gathered)
        for name in ("grouped", "window"):
            assert rank[name, "needed"].losses[0] == rank[name, "gather"].losses[0]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_without_a_label_changes_nothing(exchange: str, ranks: Ranks) -> None:
    module = build(model=of("grouped"))
    size = 128 // len(ranks)
    batch = make_batch([[size] * (len(ranks) - 1) + [1] * size], vocab_size=8)
    metrics = module.train_step([batch], 1, 6)
    expected = [float(metrics[name]) for name in ("train/CE loss", "optim/total grad norm")]
    for rank in ranks:
        assert rank["no label", exchange].losses == pytest.approx(expected, rel=1e-5)
    assert ranks[-1]["no label", exchange].metrics["own labels"] == 0


def test_different_rows_on_ranks_that_share_them_are_refused(ranks: Ranks) -> None:
    for rank in ranks:
        assert "ranks 0 and 1 share micro-batches, and were given different rows" in rank["refused"]


def test_the_host_waits_for_no_device(ranks: Ranks) -> None:
    assert [rank["waits"] for rank in ranks] == [[{}] * len(EXCHANGES)] * len(ranks)


def test_a_loader_of_torch_gives_readers_their_rows(ranks: Ranks) -> None:
    rows = make_batch(LENGTHS, vocab_size=8)
    metrics = build(model=of("grouped")).train_step([(rows.input_ids, rows.labels)], 1, 6)
    for rank in ranks:
        assert rank["torch"] == (pytest.approx(float(metrics["train/CE loss"]), rel=1e-6), ROWS)


def test_losses_of_labels_are_shown_as_on_one_rank(ranks: Ranks) -> None:
    seen = watched(build(model=of("grouped")), batches(1, LENGTHS, 2, World()))
    for rank in ranks:
        for (rows, labels, losses), found in zip(seen, rank["seen"], strict=True):
            assert torch.equal(found[0], rows)
            assert torch.equal(found[1], labels)
            torch.testing.assert_close(found[2], losses)


# ---- one process ---------------------------------------------------------------------------------


def test_weights_are_cut_over_ranks_that_share_rows_too() -> None:
    assert DataParallelConfig().mesh(8, cp=4) == Mesh(dp_shard=2, cp=4)
    mesh = DataParallelConfig(name="hsdp", num_replicas=2).mesh(8, cp=2)
    assert mesh == Mesh(dp_replicate=2, dp_shard=2, cp=2)
    assert mesh.degree(*CUT.sharded) == 4
    assert DataParallelConfig(name="ddp").mesh(8, cp=2) == Mesh(dp_replicate=4, cp=2)


@pytest.mark.parametrize(
    ("heads", "degree", "tp", "message"),
    [
        (2, 4, 1, "set it to 2, or set"),
        (1, 2, 1, "exchange: gather"),
        (2, 2, 2, "as many each of 1 heads of keys"),
    ],
)
def test_heads_that_cannot_be_dealt_are_refused_with_what_to_set(
    heads: int, degree: int, tp: int, message: str
) -> None:
    model = build_decoder(replace(of("grouped"), n_kv_heads=heads), device="meta")
    config = ContextParallelConfig(degree=degree, exchange="ulysses")
    if tp > 1:
        require_tokens_alone(config, model)
    with pytest.raises(UsageError, match=message):
        require_tokens_alone(config, model, tp)


def test_what_needs_whole_documents_on_a_rank_is_refused_by_name() -> None:
    model = build_decoder(of_experts(**BALANCES["sequence_aux"]), device="meta")
    with pytest.raises(UsageError, match="sequence_aux"):
        require_tokens_alone(ContextParallelConfig(degree=2), model)
    model = build_decoder(of("grouped"), device="meta")
    model.blocks[1].attention = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(UsageError, match="attention by Linear"):
        require_tokens_alone(ContextParallelConfig(degree=2), model)
