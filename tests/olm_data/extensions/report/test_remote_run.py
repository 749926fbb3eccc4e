"""A run in a store is shown as it was at its last look, of which only what has changed is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ledgers import write_ledger
from support.polling import wait_until

from olm_data.errors import InputError, StorageError
from olm_data.extensions.report.remote_run import RemoteRun
from olm_data.extensions.report.run_view import RunView, open_views
from olm_data.run_log.log import End, append_end
from olm_data.storage.store import Store

LINE = '{{"step": {0}, "tokens": {0}, "rows": [{0}, {1}], "train/CE loss": 2.0}}\n'
NEVER = 3600.0


def log(*steps: int) -> bytes:
    return "".join(LINE.format(step, step + 1) for step in steps).encode()


@pytest.fixture
def store(s3: dict[str, str], request: pytest.FixtureRequest) -> Store:
    return Store(f"s3://{s3['bucket']}/{request.node.name}/run")


def steps(view: RunView) -> list[int]:
    return view.update().points.steps


def test_what_is_new_is_brought_and_what_was_cut_goes(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.extensions.report.remote_run.OVERLAP", 100)
    store.put("metrics.jsonl", log(1, 2))
    store.put("config.json", b"{}")
    store.put("step00000002/tensors/rank0", b"large")
    store.put("step00000002/manifest.json", b"{}")
    with RemoteRun(store.root, tmp_path / "run", NEVER) as remote:
        (view,) = open_views([tmp_path / "run"], None, {tmp_path / "run": remote.note})
        assert (view.name, steps(view)) == ("run", [1, 2])
        generation, before = view.update().token.split(".")[0], view.folder / "metrics.jsonl"
        inode = before.stat().st_ino
        store.put("metrics.jsonl", log(1, 2, 3))
        remote.look()
        assert steps(view) == [1, 2, 3]
        assert before.stat().st_ino == inode  # the end was appended
        store.put("metrics.jsonl", log(1, 3, 4, 5))
        remote.look()
        assert steps(view) == [1, 3, 4, 5]  # it has not only grown: read anew
        store.put("metrics.jsonl", log(1))
        remote.look()
        assert steps(view) == [1]
        assert view.update().token.split(".")[0] != generation
        words = view.update().words
        assert [event.kind for event in words.events] == ["checkpoint"]
        assert "every 3600 s" in words.notes[0]
        files = {p.relative_to(tmp_path / "run").as_posix() for p in tmp_path.rglob("*.json*")}
        assert files == {"metrics.jsonl", "config.json", "step00000002/manifest.json"}


def test_the_end_and_the_ledger_come_too(store: Store, tmp_path: Path) -> None:
    here = tmp_path / "here"
    write_ledger(here, {1: [("web", 1, 0, 0, 10, 3.0)]})
    append_end(here, End(step=1, time=2e9, reason="failed", by="OSError"))
    store.put("metrics.jsonl", log(1))
    for path in (here / "ends.jsonl", *(here / "ledger").iterdir()):
        store.put(path.relative_to(here).as_posix(), path.read_bytes())
    with RemoteRun(store.root, tmp_path / "run", NEVER) as remote:
        update = RunView(tmp_path / "run", "run").update()
        assert update.ledger.sources[0].losses == [3.0]
        assert update.words.status.word == "failed"
        store.delete("ledger/step00000001-rank0000.parquet")
        remote.look()
        assert not list((tmp_path / "run/ledger").iterdir())


def test_it_looks_by_itself_and_says_when_it_cannot(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("metrics.jsonl", log(1))
    with RemoteRun(store.root, tmp_path / "run", 0.05) as remote:
        view = RunView(tmp_path / "run", "run", note=remote.note)
        store.put("metrics.jsonl", log(1, 2))
        wait_until(lambda: steps(view) == [1, 2], "the second step")

        def refuse(self: Store, folder: str = "") -> None:
            raise StorageError("the store is away")

        monkeypatch.setattr(Store, "entries", refuse)
        wait_until(lambda: "the last look failed: the store is away" in remote.note(), "a word")
        monkeypatch.undo()


def test_where_there_is_no_run_it_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        RemoteRun(store.root, tmp_path / "run")
