"""The ledger says what the log says, piece by piece, here and in a store; it changes nothing."""

from __future__ import annotations

import math
import shutil
import signal
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.distributed import run_ranks
from support.ledgers import write_ledger
from support.runs import STEPS, build_trainer, group_world, metrics, run, run_until, write_config
from support.small_datasets import random_shards, write_mixture

from olm_data.errors import UsageError
from olm_data.extensions.ledger.files import ledger_files, read_ledger
from olm_data.mixture.lock import Lock
from olm_data.rows.reader import RowReader
from olm_data.rows.views import LockRows
from olm_data.run_log.log import ENDS, read_ends
from olm_data.run_log.metric_names import CE_LOSS, LABELS
from olm_data.storage.store import Store
from olm_train.extensions.ledger.loss_ledger import LedgerSender, PieceAddresses, fetch_ledger

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


@pytest.fixture
def store(s3: dict[str, str], request: pytest.FixtureRequest) -> Store:
    return Store(f"s3://{s3['bucket']}/{request.node.name}")


def pieces(loss: float) -> list[tuple[str, int, int, int, int, float]]:
    return [("web", 1, 0, 0, 10, loss)]


def nats_by_step(folder: Path) -> dict[int, float]:
    """Nats by step; each step once."""
    lines = [line for _, table in read_ledger(folder) for line in table.to_pylist()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["nats"] / 10 for line in lines}


def send(store: Store, folder: Path) -> None:
    LedgerSender(store).send([file.path for file in ledger_files(folder)])


def names(store: Store) -> list[str]:
    return [entry.name for entry in store.entries("ledger")]


def test_a_machine_without_it_gets_all_up_to_the_checkpoint(store: Store, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write_ledger(here, {step: pieces(step) for step in range(1, 7)})
    send(store, here)
    there.mkdir()
    fetch_ledger(store, there, 3)
    assert nats_by_step(there) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert names(store) == [f"ledger/step0000000{n}-rank0000.parquet" for n in (1, 3)]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    fetch_ledger(store, elsewhere, 6)
    assert nats_by_step(elsewhere) == nats_by_step(
        there
    )  # what lies beyond is cut in the store too


def test_what_a_machine_has_of_a_lost_history_goes(store: Store, tmp_path: Path) -> None:
    here, stale = tmp_path / "here", tmp_path / "stale"
    write_ledger(here, {step: pieces(1.0) for step in range(1, 5)})
    send(store, here)
    write_ledger(stale, {step: pieces(9.0) for step in range(1, 3)})
    write_ledger(stale, {step: pieces(9.0) for step in range(2, 4)})
    fetch_ledger(store, stale, 4)
    assert nats_by_step(stale) == dict.fromkeys(range(1, 5), 1.0)


def test_a_new_run_begins_with_none_in_either_place(store: Store, tmp_path: Path) -> None:
    write_ledger(tmp_path, {1: pieces(1.0)})
    send(store, tmp_path)
    fetch_ledger(store, tmp_path, None)
    assert (names(store), ledger_files(tmp_path)) == ([], [])


def test_without_one_in_the_store_that_of_the_machine_is_cut(store: Store, tmp_path: Path) -> None:
    write_ledger(tmp_path, {step: pieces(1.0) for step in range(1, 5)})
    fetch_ledger(store, tmp_path, 2)
    assert sorted(nats_by_step(tmp_path)) == [1, 2]


def test_a_file_is_sent_once(store: Store, tmp_path: Path) -> None:
    write_ledger(tmp_path, {1: pieces(1.0)})
    sender, written = LedgerSender(store), [file.path for file in ledger_files(tmp_path)]
    sender.send(written)
    written[0].write_bytes(b"")
    sender.send(written)
    assert store.size(names(store)[0])


LENGTH = 32


@pytest.fixture(scope="module", params=["concat", "best_fit", "document"])
def lock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of several shards, gone through more than once; the first stage in short rows."""
    rng = np.random.default_rng(3)
    shards = {
        name: random_shards(n, rng.integers(1, 60, (3, 40)).tolist()) for n, name in enumerate("ab")
    }
    return write_mixture(
        tmp_path_factory.mktemp(request.param),
        shards,
        stages=[(LENGTH * 200, {"a": 3, "b": 1}), (LENGTH * 150, {"a": 1, "b": 1})],
        sequence_length=LENGTH,
        packing=request.param,
        lengths=(8, LENGTH),
    )


def test_addresses_lead_to_the_tokens_of_the_batch(lock: Path) -> None:
    reader, addresses = RowReader(lock), PieceAddresses(Lock.read(lock))
    datasets = reader.lock.open_datasets()
    rows = np.random.default_rng(1).permutation(350)[:60].astype(np.int64)
    origin = reader.schedule.locate(rows)
    epochs = dict(zip(rows.tolist(), origin.epoch.tolist(), strict=True))
    for some, parts in ((rows[rows < 200], LENGTH // 8), (rows[rows >= 200], 1)):
        batch = reader.read(some, parts)
        size = batch.input_ids.size
        ends = np.append(batch.cu_seqlens[batch.cu_seqlens < size], size).astype(np.int64)
        labels, ids = batch.labels.reshape(-1), batch.input_ids.reshape(-1)
        real = [i for i, (a, b) in enumerate(pairwise(ends)) if (labels[a:b] >= 0).any()]
        begin = ends[:-1][real]
        none = np.zeros(len(real))
        found = addresses.entries(
            1, some, begin, np.diff(ends)[real], tokens=none.astype(np.int64), nats=none
        )
        for i, at in enumerate(begin.tolist()):
            dataset, number = datasets["ab".index(found.source[i])], int(found.document[i])
            assert dataset.shard_of(number)[0] == found.shard[i]
            assert found.row[i] == some[at // LENGTH]
            assert found.epoch[i] == epochs[int(found.row[i])]
            first, last = dataset.document_span(number)
            start, stop = int(found.start[i]), int(found.stop[i])
            assert 0 <= start < stop <= last - first
            # the ids are random: no other place of the dataset has them
            wanted = dataset.read(first + start, first + stop).tolist()
            assert ids[at : at + stop - start].tolist() == wanted
            # what is left of the piece is padding
            assert (labels[at + stop - start : ends[real[i] + 1]] == -100).all()
