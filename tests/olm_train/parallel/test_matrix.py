"""Four ranks under DDP, FSDP2 and HSDP: what is exchanged when, who holds and writes what.

All checks of four ranks run in one launch (support/four_ranks.py). Whether they do what one rank
does: test_parity.py; two ranks: test_apply.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.distributed import run_ranks
from support.four_ranks import SAME_MATHS, STRATEGIES, all_checks
from support.training import MODEL

from olm_train.parallel.config import DataParallelConfig
from olm_train.parallel.mesh import CUT, WEIGHTS, Mesh

pytestmark = [
    pytest.mark.xdist_group("parallel"),  # its fixtures are made once
    pytest.mark.slow,
]
UNITS = MODEL.n_layers + 1
"""What FSDP2 gathers and reduces at a time: each block, and the rest."""
Ranks = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(all_checks, 4, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_both_exchanges_of_hsdp_happen_at_the_last_micro_batch_only(
    micro_batches: int, ranks: Ranks
) -> None:
    traffic = ranks[0]["hsdp", "traffic", micro_batches]
    assert traffic["_reduce_scatter_base_"] == UNITS
    # One for each unit of gradients between the replicas; counts and loss.
    assert traffic["allreduce_"] == UNITS + 2
    assert ranks[0]["fsdp", "traffic", micro_batches]["_reduce_scatter_base_"] == UNITS
    assert ranks[0]["fsdp", "traffic", micro_batches]["allreduce_"] == 2
    assert ranks[0]["ddp", "traffic", micro_batches] == {"allreduce_": 1 + 2}


@pytest.mark.parametrize("name", SAME_MATHS)
def test_reshard_policy_prefetch_and_offload_change_no_bit(name: str, ranks: Ranks) -> None:
    strategy, _ = SAME_MATHS[name]
    for rank in ranks:
        plain, run = rank[strategy], rank[name]
        assert run.bits == plain.bits


def test_the_reshard_policy_decides_what_the_backward_pass_gathers(ranks: Ranks) -> None:
    def gathers(key: Any) -> dict[str, int]:
        return {name: n for name, n in ranks[0][key].items() if "gather" in name}

    forward, backward = 2 * UNITS, 2 * MODEL.n_layers  # of two micro-batches
    assert gathers(("fsdp", "traffic", 2)) == {"_allgather_base_ of 4": forward + backward}
    assert gathers(("hsdp", "traffic", 2)) == {"_allgather_base_ of 2": forward + backward}
    assert gathers(("keep", "traffic")) == {"_allgather_base_ of 2": forward}
    assert gathers(("in twos", "traffic")) == {
        "_allgather_base_ of 4": forward,
        "_allgather_base_ of 2": backward,
    }


def test_prefetch_asks_for_a_blocks_weights_before_the_one_in_front_computes(ranks: Ranks) -> None:
    def asked_before(name: str) -> list[int]:
        """Gathers asked for before each block computes."""
        events = ranks[0][name, "asked"]
        blocks = [n for n, event in enumerate(events) if "block" in event]
        return [n - i for i, n in enumerate(blocks)]

    assert asked_before("offload") == [2, 3]  # the rest of the model, then block by block
    assert asked_before("prefetch") == [3, 3]


def test_a_replica_is_a_machine_unless_said_otherwise(ranks: Ranks) -> None:
    meshes = {
        "default": Mesh(dp_replicate=2, dp_shard=2),
        "four replicas": Mesh(dp_replicate=4),
        "one replica": Mesh(dp_shard=4),
    }
    for number, rank in enumerate(ranks):
        assert {*rank["meshes"]} == {*meshes}
        for name, groups in rank["meshes"].items():
            mesh = meshes[name]
            several = [axis for axis in WEIGHTS if mesh.degree(axis) > 1]
            assert [*groups] == ([*several] if "dp_shard" in several else [*several, "dp_shard"])
            for axis, group in groups.items():
                assert tuple(group) == mesh.group(number, axis)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_torch_shards_sums_and_writes_as_the_mesh_says(strategy: str, ranks: Ranks) -> None:
    mesh = DataParallelConfig(name=strategy, **STRATEGIES[strategy]).mesh(4, 2)
    found = [rank[strategy, "held"] for rank in ranks]
    for number, own in enumerate(found):
        same = [rank for rank, other in enumerate(found) if other["pieces"] == own["pieces"]]
        assert tuple(same) == mesh.group(number, *CUT.copies)
        assert own["norm"] == [axis for axis in CUT.parted + CUT.sharded if mesh.degree(axis) > 1]
    written = found[0]["written"]
    assert {shard for shard, _ in written} == {*range(mesh.dp_shard)}
    assert all(writer in mesh.group(shard, *CUT.copies) for shard, writer in written)
    assert {writer for _, writer in written} == {*range(4)}


def test_a_rank_that_does_not_come_is_named_with_the_last_step_of_each(ranks: Ranks) -> None:
    for rank in (0, 1, 3):
        said = ranks[rank]["lost"]
        # The first to give up breaks the connections of those that still wait.
        assert re.match(
            f"rank {rank} (timed out waiting for|lost its connection to) other ranks", said
        )
        assert "silent: rank 2; ranks 0-1, 3: 4 steps done; rank 2: 3 steps done" in said
        assert "comm.train_timeout_seconds" in said
