"""The ledger says what the log says, piece by piece, whoever trained them; it changes nothing."""

from __future__ import annotations

import math
import shutil
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from support.distributed import run_ranks
from support.runs import STEPS, build_trainer, group_world, metrics, run, run_until, write_config

from olm_data.errors import UsageError
from olm_data.extensions.ledger.files import ledger_files, read_ledger
from olm_data.mixture.lock import Lock
from olm_data.rows.views import LockRows
from olm_data.run_log.log import ENDS, read_ends
from olm_data.run_log.metric_names import CE_LOSS, LABELS
from olm_data.storage.store import Store

pytestmark = pytest.mark.xdist_group("ledger")  # its fixtures are made once
ON = "--trainer.callbacks.loss_ledger={steps_per_file: 5}"
Piece = tuple[int, int, str, str, int, int, int, int, int]


def content(folder: Path) -> dict[Piece, float]:
    """Nats by all that says which piece it is; each piece once."""
    found: dict[Piece, float] = {}
    for _, table in read_ledger(folder):
        for line in table.to_pylist():
            nats = line.pop("nats")
            key = tuple(line.values())
            assert key not in found
            found[key] = nats
    return found


def by_step(folder: Path) -> dict[int, tuple[float, int]]:
    sums: dict[int, list[Any]] = defaultdict(lambda: [[], 0])
    for key, nats in content(folder).items():
        sums[key[0]][0].append(nats)
        sums[key[0]][1] += key[8]
    return {step: (math.fsum(nats), count) for step, (nats, count) in sums.items()}


def check_sums(folder: Path, steps: int = STEPS) -> None:
    """Each step's pieces are its logged loss, and all of its labels."""
    logged = [line for line in metrics(folder) if "eval" not in line]
    sums = by_step(folder)
    assert sorted(sums) == [line["step"] for line in logged] == list(range(1, steps + 1))
    for line in logged:
        nats, count = sums[line["step"]]
        assert count == line[LABELS]
        assert nats / count == pytest.approx(line[CE_LOSS], rel=1e-6)


def losses(folder: Path) -> list[Any]:
    return [[e[CE_LOSS], e["optim/total grad norm"]] for e in metrics(folder) if "eval" not in e]


def close(one: dict[Piece, float], other: dict[Piece, float]) -> None:
    assert one.keys() == other.keys()
    assert [other[key] for key in one] == pytest.approx(list(one.values()), rel=1e-4)


@pytest.fixture(scope="module")
def plain(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run with a ledger."""
    folder = tmp_path_factory.mktemp("plain")
    build_trainer(tiny_mixture, folder, ON).fit()
    return folder


def test_sums_are_the_logged_losses_and_the_pieces_those_of_the_rows(
    tiny_mixture: Path, plain: Path
) -> None:
    check_sums(plain)
    shown = LockRows(Lock.read(tiny_mixture))
    rows = Counter(row for _, row, *_ in content(plain))
    for step, row, source, shard, document, start, stop, epoch, tokens in content(plain):
        view = shown.view(row)
        assert (view.source, view.epoch) == (source, epoch)
        assert any(
            (p.shard, p.document, p.start) == (shard, document, start) and p.stop >= stop
            for p in view.pieces
        )
        assert row // 8 + 1 == step
        assert 0 < tokens <= stop - start
    assert len(rows) == 8 * STEPS
    # the interval, and the checkpoint of every sixth step
    assert [f.first for f in ledger_files(plain)] == [1, 6, 7, 12, 13, 18, 19, 24]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--train_module.loss={name: chunked, chunk_size: 24}"],
        ["--train_module.loss={z_loss_multiplier: 0.001}"],
        ["--train_module.loss={name: linear_cross_entropy}"],
    ],
    ids=["plain", "chunked", "z-loss", "linear_cross_entropy"],
)
def test_a_run_has_the_same_bits_with_and_without(
    tiny_mixture: Path, tmp_path: Path, options: list[str]
) -> None:
    stop = "--trainer.hard_stop={value: 3, unit: steps}"
    build_trainer(tiny_mixture, tmp_path / "with", ON, stop, *options).fit()
    build_trainer(tiny_mixture, tmp_path / "without", stop, *options).fit()
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    check_sums(tmp_path / "with", 3)
    assert not (tmp_path / "without/ledger").exists()


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["compiled", "chunked"])
def test_a_compiled_run_has_the_same_bits_with_and_without(
    tiny_mixture: Path, tmp_path: Path, loss: str
) -> None:
    options = (
        "--trainer.hard_stop={value: 2, unit: steps}",
        "--model.n_layers=1",
        "--train_module.compile_model=true",
        f"--train_module.loss={{name: {loss}}}",
    )
    build_trainer(tiny_mixture, tmp_path / "with", ON, *options).fit()
    build_trainer(tiny_mixture, tmp_path / "without", *options).fit()
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    check_sums(tmp_path / "with", 2)


def train_rank(lock: Path, folder: Path, strategy: str) -> None:
    option = f"--train_module.dp_config.name={strategy}"
    build_trainer(lock, folder, ON, option, world=group_world()).fit()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_two_ranks_write_what_one_does(
    tiny_mixture: Path, tmp_path: Path, plain: Path, strategy: str
) -> None:
    run_ranks(train_rank, 2, tiny_mixture, tmp_path, strategy)
    check_sums(tmp_path)
    close(content(plain), content(tmp_path))
    assert {file.rank for file in ledger_files(tmp_path)} == {0, 1}


def test_another_micro_batch_writes_the_same(
    tiny_mixture: Path, tmp_path: Path, plain: Path
) -> None:
    stop = "--trainer.hard_stop={value: 7, unit: steps}"
    small = "--train_module.rank_microbatch_size=64"
    build_trainer(tiny_mixture, tmp_path, ON, stop, small).fit()
    close({key: n for key, n in content(plain).items() if key[0] <= 7}, content(tmp_path))


def test_a_resume_replaces_what_lies_beyond_its_checkpoint_and_a_new_run_all(
    tiny_mixture: Path, tmp_path: Path, plain: Path
) -> None:
    def stop(step: int) -> str:
        return f"--trainer.hard_stop={{value: {step}, unit: steps}}"

    build_trainer(tiny_mixture, tmp_path, ON, stop(8)).fit()
    newest = next(path for path in tmp_path.glob("step*08"))
    newest.rename(tmp_path / "gone")  # it goes on from step 6
    build_trainer(tiny_mixture, tmp_path, ON, stop(11)).fit()
    check_sums(tmp_path, 11)
    want = {key: nats for key, nats in content(plain).items() if key[0] <= 11}
    assert content(tmp_path) == want
    for folder in tmp_path.glob("step*"):
        folder.rename(tmp_path / f"gone-{folder.name}")
    build_trainer(tiny_mixture, tmp_path, ON, stop(3), "--trainer.load_strategy=never").fit()
    check_sums(tmp_path, 3)


@pytest.mark.slow
def test_a_run_that_goes_on_on_another_machine_has_its_ledger_whole(
    tiny_mixture: Path, tmp_path: Path, plain: Path, s3: dict[str, str]
) -> None:
    remote = f"s3://{s3['bucket']}/{tmp_path.name}"

    def train(machine: str, stop: int) -> None:
        build_trainer(
            tiny_mixture,
            tmp_path,
            ON,
            f"--trainer.save_folder={remote}",
            f"--trainer.work_dir={tmp_path / machine}",
            f"--trainer.hard_stop={{value: {stop}, unit: steps}}",
        ).fit()

    train("first", 15)
    assert read_ends(tmp_path / "first") != []
    assert Store(remote).read(ENDS) == (tmp_path / "first" / ENDS).read_bytes()
    train("second", 24)
    assert content(tmp_path / "second") == content(plain)
    sent = Store(remote).child("ledger")
    kept = {f.path.name: f.path.read_bytes() for f in ledger_files(tmp_path / "second")}
    assert {entry.name: sent.read(entry.name) for entry in sent.entries()} == kept
    assert len(read_ends(tmp_path / "second")) == 2
    assert Store(remote).read(ENDS) == (tmp_path / "second" / ENDS).read_bytes()


def test_files_end_where_the_options_say(tiny_mixture: Path, tmp_path: Path) -> None:
    stop = "--trainer.hard_stop={value: 4, unit: steps}"
    more = "--trainer.callbacks.loss_ledger={max_rows_per_file: 8}"
    build_trainer(tiny_mixture, tmp_path / "a", more, stop).fit()
    assert [file.first for file in ledger_files(tmp_path / "a")] == [1, 2, 3, 4]
    off = "--trainer.callbacks.loss_ledger={enabled: false}"
    build_trainer(tiny_mixture, tmp_path / "b", off, stop).fit()
    assert ledger_files(tmp_path / "b") == []


def test_a_loss_that_has_only_a_sum_is_refused(tiny_mixture: Path, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, ON)
    loss = trainer.train_module._loss  # type: ignore[attr-defined]
    trainer.train_module._loss = lambda *a, **m: loss(*a, **m)._replace(by_label=None)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="got no losses"):
        trainer.fit()


def test_a_ledger_that_cannot_be_written_is_said_and_the_run_goes_on(
    tiny_mixture: Path, tmp_path: Path, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger").write_text("in the way")
    build_trainer(tiny_mixture, tmp_path, ON, "--trainer.hard_stop={value: 12, unit: steps}").fit()
    said = capsys.readouterr().err
    assert said.count("could not be written to ledger/") == 1
    assert "warning: ledger/ has no losses of steps 1 to 12 of rank 0\n" in said
    (tmp_path / "ledger").unlink()
    build_trainer(tiny_mixture, tmp_path, ON).fit()
    assert "note: ledger/ begins after step 12\n" in capsys.readouterr().err
    assert losses(tmp_path) == losses(plain)
    assert content(tmp_path) == {key: n for key, n in content(plain).items() if key[0] > 12}


def test_pieces_that_were_not_written_when_the_run_was_killed_are_named_at_the_resume(
    tiny_mixture: Path, tmp_path: Path, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(plain, tmp_path / "run")
    shutil.rmtree(folder / "step00000024")
    (folder / "ledger/step00000018-rank0000.parquet").unlink()
    build_trainer(tiny_mixture, folder, ON).fit()
    said = capsys.readouterr().err
    assert "warning: ledger/ has no losses of step 18 of rank 0: they were not" in said
    assert content(folder) == {key: n for key, n in content(plain).items() if key[0] != 18}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_any_step_no_step_is_there_twice_and_none_is_missing(
    tiny_mixture: Path, tmp_path: Path, plain: Path, ranks: int
) -> None:
    config = write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")
    for step in (3, 17) if ranks == 1 else (8,):  # at 17 a file lies beyond the checkpoint
        code, said = run_until(f"step {step:2}/", signal.SIGKILL, config, ON, ranks=ranks)
        assert code != 0, said
        by_step(tmp_path / "run")  # no piece twice, also before the resume
    done = run(config, ON, ranks=ranks)
    assert done.returncode == 0, done.stderr
    check_sums(tmp_path / "run")
    close(content(plain), content(tmp_path / "run"))
