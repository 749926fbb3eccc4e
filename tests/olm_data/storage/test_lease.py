"""The lease: one holder, taken over by rule, and never against what it says."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.clouds import environment
from support.polling import wait_until
from support.store_proxy import Exchange, Proxy, answer, passing, store_proxy

from olm_data.errors import ConflictError
from olm_data.storage import lease as under_test
from olm_data.storage.exclusive import exclusive
from olm_data.storage.lease import (
    BYTES,
    Fence,
    Lease,
    LeaseLostError,
    Record,
    Seen,
    acquire,
    put_if,
    read_versioned,
)
from olm_data.storage.process import this_process
from olm_data.storage.store import Store

TAKEOVER = 1.0
"""The shortest take-over time, so that a test that waits for it is quick."""


def ignore(text: str) -> None:
    raise AssertionError(f"it waited: {text}")


def take(store: Store, note: Callable[[str], None] = ignore, takeover: float = 60.0) -> Lease:
    return acquire(store, prefix="lease-", busy="busy", fix="wait", note=note, takeover=takeover)


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store(tmp_path / "run")
    server = request.getfixturevalue("s3")
    return Store(f"s3://{server['bucket']}/{tmp_path.name}")


@pytest.fixture
def held(store: Store) -> Iterator[Lease]:
    lease = take(store)
    yield lease
    lease.release(keep=True)


def left(store: Store, **changes: object) -> Record:
    """Leave a lease of another machine's process, alive as far as anybody can know."""
    process = this_process()._replace(host="elsewhere", machine="0" * 16)
    record = Record(
        fence=4,
        id="theirs",
        **process._asdict(),
        job="",
        attempt=0,
        time=0.0,
        clock=0.0,
        beat=7,
        takeover=TAKEOVER,
    )
    record = msgspec.structs.replace(record, **changes)
    if not store.remote:
        Path(store.root).mkdir(exist_ok=True)
    put_if(store, "lease-000004.json", record.encode(), over=None)
    return record


def test_a_second_one_is_refused_at_once_and_told_who_holds(store: Store, held: Lease) -> None:
    with pytest.raises(ConflictError) as refused:
        take(store)
    assert refused.value.exit_code == 7
    assert f"process {os.getpid()} on " in refused.value.why
    assert refused.value.why.endswith("holds lease 1")
    held.check()


def test_what_is_given_back_is_taken_at_once_and_numbers_go_on(store: Store) -> None:
    for number in (1, 2, 3):
        lease = take(store)
        assert lease.fence.number == number
        lease.release(keep=True)
    assert list(store.sizes("lease-")) == ["lease-000003.json"]
    take(store).release(keep=False)
    assert store.sizes("lease-") == {}


def test_the_lease_of_a_process_that_died_here_is_taken_at_once(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        take(Store(tmp_path))
        os._exit(9)
    os.waitpid(child, 0)
    take(Store(tmp_path)).release(keep=True)


def test_a_number_that_another_process_got_since_is_no_holder(tmp_path: Path) -> None:
    process = this_process()
    left(Store(tmp_path), **process._replace(started=process.started - 1)._asdict())
    take(Store(tmp_path)).release(keep=True)


def test_one_that_shows_signs_of_life_is_refused_and_one_that_does_not_is_taken_over(
    store: Store,
) -> None:
    record, said, begun = left(store), [], time.monotonic()
    lease = take(store, said.append)
    assert time.monotonic() - begun >= TAKEOVER
    assert said == [
        f"waiting up to 1 s in {store.root}: process {record.pid} on elsewhere holds lease 4"
    ]
    assert (lease.fence.number, list(store.sizes("lease-"))) == (5, ["lease-000005.json"])
    lease.release(keep=True)


def test_one_sign_of_life_is_enough(tmp_path: Path) -> None:
    store, record = Store(tmp_path), left(Store(tmp_path), takeover=6.0)

    def beat(text: str) -> None:
        changed = msgspec.structs.replace(record, beat=record.beat + 1)
        put_if(store, "lease-000004.json", changed.encode(), over=Seen(record.encode(), ""))

    with pytest.raises(ConflictError, match="busy"):
        take(store, beat, takeover=6.0)


@pytest.mark.parametrize("wall", [0.0, 4e9])
def test_clocks_of_two_machines_are_never_compared(tmp_path: Path, wall: float) -> None:
    """A holder whose clocks are far off is neither taken over early nor kept for ever."""
    left(Store(tmp_path), time=wall, clock=wall)
    said: list[str] = []
    take(Store(tmp_path), said.append).release(keep=True)
    assert len(said) == 1


def test_a_later_start_of_the_same_slurm_job_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
    left(Store(tmp_path), job="slurm c 12", takeover=3600.0)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    take(Store(tmp_path)).release(keep=True)


@pytest.mark.parametrize("job", ["slurm c 13", "slurm d 12", "slurm c 12"])
def test_another_job_or_another_run_of_the_same_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    for name, value in (("JOB_ID", "12"), ("CLUSTER_NAME", "c"), ("RESTART_COUNT", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    left(Store(tmp_path), job=job, attempt=1)
    said: list[str] = []
    take(Store(tmp_path), said.append).release(keep=True)
    assert len(said) == 1


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff" * 2000, b"[" * BYTES, b'{"takeover": 1e99}'], ids=str
)
def test_bytes_that_are_no_lease_hold_for_the_take_over_time(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "lease-000009.json").write_bytes(data)
    said: list[str] = []
    lease = take(Store(tmp_path), said.append, takeover=TAKEOVER)
    assert said == [f"waiting up to 1 s in {tmp_path}: lease 9 cannot be read"]
    assert lease.fence.number == 10
    lease.release(keep=True)


def test_a_folder_in_the_way_is_a_conflict_and_no_endless_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lease-000001.json").mkdir()
    with pytest.raises(ConflictError, match="cannot be read"):
        take(Store(tmp_path), takeover=TAKEOVER)


def overtake(store: Store) -> None:
    left(store, takeover=3600.0)


def test_who_was_taken_over_finds_out_by_the_check_and_gives_nothing_back(
    store: Store, held: Lease
) -> None:
    theirs = left(store, fence=4, takeover=3600.0).encode()
    with pytest.raises(LeaseLostError) as lost:
        held.check()
    assert lost.value.exit_code == 7
    assert lost.value.why == f"process {os.getpid()} on elsewhere holds lease 4"
    held.release(keep=False)
    assert store.read("lease-000004.json") == theirs
    assert held.lost is not None


def test_who_finds_the_lease_gone_or_anothers_has_lost_it(store: Store, held: Lease) -> None:
    other = Fence(held.fence.store, held.fence.prefix, held.fence.number, "another")
    with pytest.raises(LeaseLostError):
        other.check()
    store.delete(held.fence.name)
    with pytest.raises(LeaseLostError):
        held.check()


def test_the_holder_shows_signs_of_life_and_learns_of_its_loss_without_asking(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    lease = take(store, takeover=TAKEOVER)
    first = store.read(lease.fence.name)
    wait_until(lambda: store.read(lease.fence.name) != first, "a sign of life")
    overtake(store)
    wait_until(lambda: lease.lost, "its loss")
    lease.release(keep=True)


def test_a_store_that_is_down_costs_a_warning_and_not_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    lease = take(Store(tmp_path), said.append, takeover=TAKEOVER)

    def down(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    with monkeypatch.context() as patch:
        patch.setattr(under_test, "read_versioned", down)
        wait_until(lambda: said, "a warning")
    assert said == ["warning: the lease cannot be kept fresh: no route to host"]
    lease.check()
    lease.release(keep=True)


def test_an_error_in_a_body_that_was_taken_over_is_told_as_that(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / ".staging-theirs").mkdir()

    def work() -> None:
        with exclusive(store, prefix="lease-"):
            assert not (tmp_path / ".staging-theirs").exists()
            overtake(store)
            (tmp_path / ".staging-theirs").mkdir()
            raise FileNotFoundError("a staging folder that the other one cleared")

    with pytest.raises(LeaseLostError):
        work()
    assert (tmp_path / ".staging-theirs").exists()  # nothing of the other one is cleared


def test_a_lease_names_no_secret_and_has_one_size(store: Store, held: Lease) -> None:
    data = store.read(held.fence.name)
    assert len(data) == BYTES
    assert set(msgspec.json.decode(data)) == set(Record.__struct_fields__)


# ---- paused between the look at the own lease and its next sign of life ------------------------
class Pause:
    """Holds the first write of a lease back, once the holder has made sure that it is his own."""

    def __init__(self) -> None:
        self.reached, self.over = threading.Event(), threading.Event()

    def fault(self, exchange: Exchange) -> None:
        """The request waits on its way to the store, as where the whole machine stands still."""
        self.hold()
        passing(exchange)

    def hold(self) -> None:
        self.reached.set()
        self.over.wait(600)


@pytest.fixture(params=["local", "s3", "gs", "az"])
def paused(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Store, Lease, Pause]]:
    """A store, a lease in it, and its first sign of life, on its way to the store."""
    kind, pause = request.param, Pause()
    if kind == "local":
        store, real = Store(tmp_path / "run"), under_test.put_if

        def held(*args: object, **named: object) -> None:
            if named["over"] is not None and not pause.reached.is_set():
                pause.hold()
            real(*args, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(under_test, "put_if", held)
        lease = take(store, takeover=TAKEOVER)
        assert pause.reached.wait(600)
        yield store, lease, pause
    else:
        server = request.getfixturevalue("s3" if kind == "s3" else f"{kind}_server")
        with store_proxy(server) as proxy:
            names = (
                {"AWS_ENDPOINT_URL": proxy.url} if kind == "s3" else environment(kind, proxy.url)
            )
            for name, value in names.items():
                monkeypatch.setenv(name, value)
            store = Store(f"{kind}://{server['bucket']}/{tmp_path.name}")
            lease = take(store, takeover=TAKEOVER)
            writes = r"uploadType" if kind == "gs" else r"lease-000001"
            proxy.inject(pause.fault, method="POST" if kind == "gs" else "PUT", key=writes)
            assert pause.reached.wait(600)
            yield store, lease, pause
            pause.over.set()
            lease.release(keep=True)
    pause.over.set()
    lease.release(keep=True)


def succeed(store: Store) -> Lease:
    """Take over from a holder that shows no sign of life any more."""

    def tries() -> Lease | None:
        try:
            return take(store, lambda text: None, takeover=TAKEOVER)
        except ConflictError:  # it looks alive still
            return None

    return wait_until(tries, "the take-over")


def test_one_that_wakes_up_does_not_bring_its_lease_back(
    paused: tuple[Store, Lease, Pause],
) -> None:
    store, zombie, pause = paused
    second = succeed(store)
    pause.over.set()
    wait_until(lambda: zombie.lost, "its loss")
    second.check()
    second.release(keep=True)
    assert list(store.sizes("lease-")) == ["lease-000002.json"]


def test_one_that_wakes_up_does_not_write_over_another_lease_of_its_number(
    paused: tuple[Store, Lease, Pause],
) -> None:
    store, zombie, pause = paused
    succeed(store).release(keep=False)
    third = take(store)
    assert third.fence.number == zombie.fence.number
    pause.over.set()
    wait_until(lambda: zombie.lost, "its loss")
    third.check()
    third.release(keep=True)


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_one_that_gives_back_late_does_not_remove_another_lease_of_its_number(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked, and sleeps; two others come and go; the third has its number."""
    place = str(tmp_path / "run")
    if kind == "s3":
        place = f"s3://{request.getfixturevalue('s3')['bucket']}/{tmp_path.name}"
    store, real = Store(place), under_test.delete_if
    others: list[Lease] = []

    def late(*args: Any, **named: Any) -> None:
        monkeypatch.setattr(under_test, "delete_if", real)
        zombie._renew(released=True)  # for the next one to start at once
        take(store).release(keep=False)
        others.append(take(store))
        real(*args, **named)

    zombie = take(store)
    monkeypatch.setattr(under_test, "delete_if", late)
    zombie.release(keep=False)
    (third,) = others
    assert third.fence.number == zombie.fence.number
    third.check()
    third.release(keep=False)
    assert list(store.sizes("lease-")) == []


def test_a_sign_of_life_that_comes_late_does_not_take_back_what_was_given_back(
    paused: tuple[Store, Lease, Pause], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lease, pause = paused
    beating = lease._thread
    monkeypatch.setattr(lease, "_thread", threading.Thread())
    lease._thread.start()  # release does not wait for the one that is paused
    lease.release(keep=True)
    pause.over.set()
    beating.join(600)
    seen = read_versioned(store, lease.fence.name, BYTES)
    record = Record.decode(seen.data)
    assert record.released


def test_a_store_that_refuses_the_condition_is_said_once_and_the_lease_is_kept_fresh(
    proxy: Proxy, tmp_path: Path
) -> None:
    def refuses(exchange: Exchange) -> None:
        old = "If-Match" in exchange.handler.headers
        (answer(501, "NotImplemented") if old else passing)(exchange)

    proxy.inject(refuses, method="PUT", times=None)
    store, said = Store(f"s3://{proxy.server['bucket']}/{tmp_path.name}"), list[str]()
    lease = take(store, said.append, takeover=TAKEOVER)
    first = store.read(lease.fence.name)
    wait_until(lambda: store.read(lease.fence.name) != first, "a sign of life")
    lease.release(keep=True)
    assert [text for text in said if "refuses If-Match" in text] == said
    assert len(said) == 1
