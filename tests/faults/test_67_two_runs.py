"""Row 67: two runs on one save folder, at once or as a zombie that wakes up (audit row S2)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.command import environment
from support.polling import wait_until
from support.runs import build_trainer, metrics, stop, stopped, write_config
from support.store_proxy import Proxy, ignore_condition

from olm_data.errors import ConflictError, ResourceError, StorageError, UsageError
from olm_data.storage.lease import LeaseLostError, Record
from olm_data.storage.store import Store
from olm_train.callbacks.base import Callback
from olm_train.checkpoint import save as under_test
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import candidates
from olm_train.distributed.world import World
from olm_train.trainer import Trainer

DRIVER = str(Path(__file__).parents[1] / "support" / "two_runs.py")
EVERY = "--trainer.callbacks.checkpointer.save_interval={}".format
PLAIN = ("--trainer.callbacks.lm_evaluator.enabled=false", "--trainer.takeover_seconds=1")


def content(folder: str) -> dict[str, str]:
    """The sha256 of every file of a save folder."""
    store = Store(folder)
    return {entry.name: store.sha256(entry.name) for entry in store.entries()}


def sound(folder: str) -> list[int]:
    """The steps of the checkpoints there, each of which verifies."""
    store = Store(folder)
    return [open_checkpoint(store.url(name), World()).step for name in candidates(folder)]


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "run")
    server = request.getfixturevalue("s3")
    return f"s3://{server['bucket']}/{tmp_path.name}"


def work(folder: str, path: Path) -> list[str]:
    """The option for a machine's own work_dir, for a remote save folder."""
    return [f"--trainer.work_dir={path}"] if "://" in folder else []


# ---- a zombie, in this process: quick ----------------------------------------------------------


def sleep_until_taken_over(zombie: Trainer, second: Trainer) -> dict[str, str]:
    """Let a run show no sign of life until a second one has taken over, and ended."""
    for lease in zombie._holding._leases:
        lease._stop.set()
        lease._thread.join()
    lease = zombie._holding._leases[0]
    last = Record.decode(lease.fence.store.read(lease.fence.name))
    assert last is not None
    wait_until(lambda: time.monotonic() - last.clock > last.takeover, "the take-over time")
    second.fit()
    return content(second.save_folder)


@pytest.mark.parametrize(
    ("folder", "moment", "machines"),
    [
        ("local", "between steps", 1),
        ("s3", "before the manifest", 2),
        pytest.param("local", "the last step", 1, marks=pytest.mark.slow),
        pytest.param("s3", "between steps", 1, marks=pytest.mark.slow),
    ],
    indirect=["folder"],
)
def test_67_s2_a_zombie_finds_out_before_it_changes_a_byte(
    tiny_mixture: Path,
    tmp_path: Path,
    folder: str,
    moment: str,
    machines: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [work(folder, tmp_path / f"work-{n}") for n in (1, machines)]
    end = 4 if moment == "the last step" else 6
    first = build_trainer(tiny_mixture, folder, *PLAIN, *places[0], EVERY(2), stop(end))
    second = build_trainer(tiny_mixture, folder, *PLAIN, *places[1], EVERY(5), stop(5))
    after: dict[str, str] = {}

    class Sleeps(Callback):
        trainer = first

        def post_step(self) -> None:
            if first.step == 3 and moment != "before the manifest":
                after.update(sleep_until_taken_over(first, second))

    real = under_test._Save._finish

    def finish(save: Any, entries: Any) -> None:
        if save.contents.step == 4 and not after:
            after.update(sleep_until_taken_over(first, second))
        real(save, entries)

    if moment == "before the manifest":
        monkeypatch.setattr(under_test._Save, "_finish", finish)
    first.callbacks["sleeps"] = Sleeps()
    with pytest.raises(LeaseLostError) as lost:
        first.fit()
    assert lost.value.exit_code == 7
    assert content(folder) == after
    assert sound(folder) == [5, 2]
    assert second.step == 5
    assert [line["step"] for line in metrics(second.work_dir)] == [1, 2, 3, 4, 5]


def test_67_s2_a_checkpoint_that_verifies_is_never_replaced(
    tiny_mixture: Path, tmp_path: Path, folder: str
) -> None:
    """Also not by the holder: one that a zombie published in the moment after its check."""

    class Appears(Callback):
        def post_step(self) -> None:
            if self.trainer.step == 3:
                for step in (2, 4):  # the second start holds lease 2
                    build_trainer(
                        tiny_mixture, tmp_path / "theirs", *PLAIN, EVERY(2), stop(step)
                    ).fit()
                copy(Store(str(tmp_path / "theirs")), Store(folder), "step00000004")

    where = work(folder, tmp_path / "work")
    run = build_trainer(
        tiny_mixture, folder, *PLAIN, *where, EVERY(4), stop(6), callbacks={"x": Appears()}
    )
    with pytest.raises(ConflictError, match="that verifies is there already"):
        run.fit()
    there = {name: sha for name, sha in content(folder).items() if name.startswith("step")}
    assert there == {
        name: sha
        for name, sha in content(str(tmp_path / "theirs")).items()
        if name.startswith("step00000004")
    }
    again = build_trainer(tiny_mixture, folder, *PLAIN, *where, EVERY(4), stop(6))
    again.fit()
    assert sound(folder) == [6, 4]


def copy(source: Store, target: Store, name: str) -> None:
    for entry in source.entries(name):
        target.put(entry.name, source.read(entry.name)) if target.remote else _place(
            Path(target.url(entry.name)), source.read(entry.name)
        )


def _place(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_67_s2_a_start_right_after_a_clean_end_waits_for_nothing(
    tiny_mixture: Path, tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        options = (*PLAIN[:1], *work(folder, tmp_path / "work"), stop(step))
        build_trainer(tiny_mixture, folder, *options).fit()
    assert "waiting" not in capsys.readouterr().err
    assert list(Store(folder).sizes("lease-")) == ["lease-000003.json"]
    manifests = [open_checkpoint(Store(folder).url(name), World()) for name in candidates(folder)]
    assert [found.manifest.fence for found in manifests] == [3, 2, 1]


def test_67_s2_one_trainer_may_fit_again(tiny_mixture: Path, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, *PLAIN, stop(1))
    for number, step in ((1, 1), (2, 2)):
        trainer.stop_step = step
        trainer.fit()
        assert trainer.checkpoints.fence is not None
        assert trainer.checkpoints.fence.number == number
    assert sound(str(tmp_path)) == [2, 1]


def test_67_s2_a_failed_pointer_does_not_stand_in_the_way_of_ones_own_checkpoint(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = under_test.write_pointer, []

    def pointer(folder: str, step: int) -> None:
        if not failed:
            failed.append(step)
            raise ResourceError("the disk fails once")
        real(folder, step)

    monkeypatch.setattr(under_test, "write_pointer", pointer)
    trainer = build_trainer(tiny_mixture, tmp_path, *PLAIN, EVERY(2), stop(2))
    trainer.fit()
    assert failed == [2]
    assert (tmp_path / "latest").read_text() == "step00000002\n"


def test_67_s2_a_store_that_ignores_conditions_is_refused_at_the_door(
    tiny_mixture: Path, tmp_path: Path, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"s3://{proxy.server['bucket']}/{tmp_path.name}"
    options = (*PLAIN, f"--trainer.work_dir={tmp_path}", stop(1))
    proxy.inject(ignore_condition, conditional=True, times=None)
    with pytest.raises(StorageError, match="ignores conditional writes") as refused:
        build_trainer(tiny_mixture, folder, *options).fit()
    assert "trainer.single_writer: true" in str(refused.value.fix)
    assert Store(folder).entries() == []
    options += ("--trainer.single_writer=true",)
    build_trainer(tiny_mixture, folder, *options).fit()
    assert "nothing keeps a second run" in capsys.readouterr().err
    assert sound(folder) == [1]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("takeover_seconds=0.5", "takeover_seconds is at least 1 and at most 3600, not 0.5"),
        ("takeover_seconds=1e9", "takeover_seconds is at least 1 and at most 3600, not 1"),
        ("single_writer=true", "no effect with a local save_folder"),
    ],
)
def test_67_s2_values_without_sense_are_refused(
    tiny_mixture: Path, tmp_path: Path, option: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        build_trainer(tiny_mixture, tmp_path, f"--trainer.{option}")


# ---- real processes ----------------------------------------------------------------------------


class Runs:
    """Starts runs as processes on one configuration."""

    def __init__(self, tmp_path: Path, lock: Path, folder: str) -> None:
        self.tmp_path, self.folder = tmp_path, folder
        self.config = write_config(tmp_path / "train.yaml", lock, Path("unused"))
        self.count = 0

    def start(self, what: str, step: int, *options: str, ranks: int = 1) -> subprocess.Popen[str]:
        self.count += 1
        launcher = [sys.executable]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        where = work(self.folder, self.tmp_path / f"machine-{self.count}")
        options = (f"--trainer.save_folder={self.folder}", *PLAIN, *where, *options)
        codes, tests = str(self.tmp_path / f"code-{self.count}"), str(Path(__file__).parents[1])
        return subprocess.Popen(
            [*launcher, DRIVER, codes, what, str(step), str(self.config), *options],
            env=environment({"PYTHONPATH": f"{environment()['PYTHONPATH']}:{tests}"}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def runs(tmp_path: Path, tiny_mixture: Path, folder: str) -> Runs:
    return Runs(tmp_path, tiny_mixture, folder)


def go(*processes: subprocess.Popen[str]) -> None:
    """Wait until all are ready, and let them go at once."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "READY\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


@pytest.mark.slow
def test_67_s2_of_two_at_once_one_goes_on_and_the_other_exits_7(runs: Runs) -> None:
    flag = runs.tmp_path / "go on"
    alive = "--trainer.takeover_seconds=60"  # a second without a sign of life is no death
    both = [runs.start(str(flag), 3, EVERY(2), stop(6), alive) for _ in range(2)]
    go(*both)
    loser = wait_until(lambda: next((p for p in both if p.poll() is not None), None), "a loser")
    _, said = loser.communicate()
    assert loser.returncode == 7, said
    assert "another process trains into this folder" in said
    assert re.search(r"why: process \d+ on \S+ holds lease 1\n", said)
    flag.touch()
    winner = next(process for process in both if process is not loser)
    _, said = winner.communicate()
    assert winner.returncode == 0, said
    assert sound(runs.folder) == [6, 4, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "ranks"), [("s3", 1), ("local", 2)], indirect=["folder"])
def test_67_s2_a_zombie_that_wakes_up_exits_7_on_every_rank_and_has_changed_no_byte(
    runs: Runs, tiny_mixture: Path, ranks: int
) -> None:
    zombie = runs.start("pause", 3, EVERY(2), stop(12), ranks=ranks)
    go(zombie)
    sleeper = wait_until(lambda: stopped(zombie.pid), "a paused process")
    second = build_trainer(
        tiny_mixture,
        runs.folder,
        *(*PLAIN, *work(runs.folder, runs.tmp_path / "second"), EVERY(5), stop(10)),
    )
    wait_until(lambda: _tries(second), "the take-over")
    after = content(runs.folder)
    os.kill(sleeper, signal.SIGCONT)
    _, said = zombie.communicate()
    assert zombie.returncode == (7 if ranks == 1 else 1), said
    assert "another process has taken over" in said
    codes = [(runs.tmp_path / f"code-1-{rank}").read_text() for rank in range(ranks)]
    assert codes == ["7"] * ranks
    assert content(runs.folder) == after
    assert sound(runs.folder) == [10, 5, 2]


def _tries(trainer: Trainer) -> bool:
    """Whether a run went to its end; it is refused while the paused one looks alive."""
    try:
        trainer.fit()
    except LeaseLostError:
        raise
    except ConflictError:
        return False
    return True


@pytest.mark.slow
def test_67_s2_a_start_right_after_a_crash_here_waits_for_nothing(
    runs: Runs, tiny_mixture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crashed = runs.start("kill", 3, EVERY(2), "--trainer.takeover_seconds=3600")
    go(crashed)
    crashed.communicate()
    assert crashed.returncode == -signal.SIGKILL
    build_trainer(
        tiny_mixture,
        runs.folder,
        *(*PLAIN, *work(runs.folder, runs.tmp_path / "machine-1"), EVERY(2), stop(4)),
    ).fit()
    assert "waiting" not in capsys.readouterr().err
    assert sound(runs.folder) == [4, 2]
