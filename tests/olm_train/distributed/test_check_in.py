"""Ranks check in once each; who is missing or of another run is named. See faults/test_45."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from support.ports import free_port

from olm_data.errors import ResourceError, UsageError
from olm_train.distributed import world as module
from olm_train.distributed.world import check_in, meets_on_loopback


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_without_a_place_is_refused_before_anything_is_opened(rank: int, size: int) -> None:
    with pytest.raises(UsageError, match=f"rank {rank} of {size}"):
        check_in(rank, size, timedelta(seconds=1))


@pytest.mark.usefixtures("place")
def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(ResourceError, match=r"2 of 3 ranks did not come within .*: 1, 2"):
        check_in(0, 3, timedelta(seconds=2))


@pytest.mark.usefixtures("place")
def test_alone_it_is_there_at_once() -> None:
    store = check_in(0, 1, timedelta(seconds=600))
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("others", [0, 3])
def test_a_meeting_place_that_is_gone_replaces_no_reason(others: int) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    guest = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    met = dist.PrefixStore("check-in 0", guest)
    del host
    for _ in range(3):
        module._leave(met, 1, others)


@pytest.mark.parametrize(
    ("address", "loopback"), [("127.0.0.1", True), ("localhost", True), ("10.0.0.1", False)]
)
def test_an_address_of_this_machine_alone_is_known(
    address: str, loopback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    assert meets_on_loopback() == loopback
