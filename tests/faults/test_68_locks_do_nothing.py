"""Row 68: a file system whose flock always succeeds, in every process (audit row S9)."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.command import arguments, environment
from support.inline_runner import Around, InlineRunner
from support.polling import wait_until
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import ConflictError
from olm_data.extensions.verify.datasets import verify
from olm_data.rows.shard_cache import RemoteShard, ShardCache
from olm_data.storage.disk import abandoned, scratch
from olm_data.storage.exclusive import exclusive
from olm_data.storage.store import Store


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """No lock does anything, here and in processes with the environment that this returns."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import fcntl\nfcntl.flock = lambda *_: None\n")
    return environment({"PYTHONPATH": f"{folder}:{environment()['PYTHONPATH']}"})


@pytest.mark.parametrize(
    "verb",
    ["import", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("tokenize", "add"))],
)
def test_68_s9_the_second_command_exits_7_and_the_first_ones_bytes_are_right(
    verb: str, tiny_tokenizer: Path, tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl", texts(40)), tmp_path / "out"
    tokens = tmp_path / "foreign" / "part.npy"
    tokens.parent.mkdir()
    tokens.write_bytes(bytes(64))
    words: dict[str, list[str | Path]] = {
        "tokenize": [source, "--tokenizer", tiny_tokenizer, "--output", out],
        "add": [out, source],
        "import": [tokens.parent, "--tokenizer", tiny_tokenizer, "--dtype", "uint16", "-o", out],
    }
    if verb == "add":
        out.mkdir()
        made = make_dataset([write_jsonl(tmp_path / "b.jsonl", texts(9))], tiny_tokenizer, out)
        with exclusive(Store(out)):
            refused(arguments(verb, *words[verb]), elsewhere)
        assert verify(str(out)).ok
        assert made.manifest.totals.documents == 9
        return
    told: list[None] = []
    meanwhile = Around(lambda: told.append(refused(arguments(verb, *words[verb]), elsewhere)))
    made = make_dataset([source], tiny_tokenizer, out, runner=meanwhile)
    assert len(told) == 1
    assert verify(str(out)).ok
    undisturbed = make_dataset([source], tiny_tokenizer, tmp_path / "undisturbed")
    assert made.manifest.digest == undisturbed.manifest.digest
    assert not list(out.glob(".lease-*"))


def refused(command: list[str], surroundings: dict[str, str]) -> None:
    second = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert second.returncode == 7, second.stderr
    assert "another process is writing this output" in second.stderr
    assert f"process {os.getpid()} on " in second.stderr
    assert "FileNotFoundError" not in second.stderr


ZOMBIE = """
import os, signal, sys
from olm_data.runners import local
from olm_data.storage import lease
lease.acquire.__kwdefaults__["takeover"] = 1.0
from olm_data.storage import exclusive
exclusive.exclusive.__wrapped__.__kwdefaults__["takeover"] = 1.0
real = local.LocalRunner.run
def run(self, *arguments, **options):
    print("AT WORK", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    real(self, *arguments, **options)
local.LocalRunner.run = run
from olm_data.cli import main
sys.argv[0] = "olm-data"
main()
"""


@pytest.mark.slow
def test_68_s9_a_tokeniser_that_wakes_up_exits_7_and_changes_no_byte(
    tiny_tokenizer: Path, tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl", texts(40)), tmp_path / "out"
    words = [source, "--tokenizer", tiny_tokenizer, "--output", out, "--workers", "1"]
    script = tmp_path / "zombie.py"
    script.write_text(f"if __name__ == '__main__':\n{_indented(ZOMBIE)}")
    with subprocess.Popen(
        [sys.executable, script, "tokenize", *map(str, words), "--encoder", "hf"],
        env=elsewhere,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as zombie:
        stat = Path(f"/proc/{zombie.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "a pause")
        wakes = Wakes(zombie)
        wait_until(lambda: _made(source, tiny_tokenizer, out, wakes), "the take-over")
    assert zombie.returncode == 7, wakes.said
    assert "another process has taken over" in wakes.said
    assert verify(str(out)).ok


class Wakes(InlineRunner):
    """Wakes a process when the work begins, and goes on when that one has ended."""

    def __init__(self, sleeper: subprocess.Popen[str]) -> None:
        super().__init__()
        self.sleeper, self.said = sleeper, ""

    def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
        there = {path: _sha256(path) for path in _files(job.splits[0])}
        self.sleeper.send_signal(signal.SIGCONT)
        _, self.said = self.sleeper.communicate()
        assert {path: _sha256(path) for path in there} == there  # shards may come: the same bytes
        assert not job.splits[0].exists("manifest.json")
        super().run(job, tasks, total, **callbacks)


@pytest.mark.slow
def test_68_s9_two_mixes_at_once_leave_one_right_lock(
    tiny_tokenizer: Path, tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    make_dataset([write_jsonl(tmp_path / "a.jsonl", texts(200))], tiny_tokenizer, tmp_path / "a")
    manifest = tmp_path / "m.yaml"
    manifest.write_text(
        "version: 1\nseed: 1\nsequence_length: 32\npacking: best_fit\n"
        "sources: {a: {data: a, max_epochs: 4}}\n"
        "stages: [{name: main, tokens: 2048, weights: {a: 1}}]\n"
    )
    both = [
        subprocess.Popen(
            arguments("mix", manifest), env=elsewhere, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [process.communicate()[1] for process in both]
    codes = {process.returncode for process in both}
    assert codes in ({0}, {0, 7}), said
    assert not list(tmp_path.glob(".staging-*"))
    again = subprocess.run(
        arguments("mix", manifest), env=elsewhere, capture_output=True, text=True
    )
    assert again.stderr.startswith("unchanged: "), again.stderr


def _made(source: Path, tokenizer: Path, out: Path, runner: InlineRunner) -> bool:
    try:
        made = make_dataset([source], tokenizer, out, runner=runner)
    except ConflictError:  # while the sleeper looks alive
        return False
    return made.manifest.totals.documents == 40


def _files(store: Store) -> list[Path]:
    """All files there, but those that are refreshed: heartbeat and lease."""
    found = [path for path in Path(store.root).rglob("*") if path.is_file()]
    return [path for path in found if path.parent.name != "run" and ".lease-" not in path.name]


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.strip().splitlines())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_68_s9_a_living_writers_temporary_folder_is_not_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    pid = os.fork()
    if pid == 0:
        with scratch():
            os._exit(9)
    os.waitpid(pid, 0)
    with scratch() as mine:
        (dead,) = abandoned(remove=True)
        assert dead != mine
        assert mine.exists()
        assert not dead.exists()


def test_68_s9_two_that_fetch_one_shard_at_once_get_it_whole(tmp_path: Path) -> None:
    source = Store(tmp_path / "dataset")
    data = os.urandom(1 << 20)
    source.put("shard", data)
    shard = RemoteShard(source, {"shard": (len(data), hashlib.sha256(data).hexdigest())})
    caches = [ShardCache(tmp_path / "cache", 1 << 30) for _ in range(2)]
    inside, found = threading.Barrier(2), []

    def stopped() -> bool:
        inside.wait()  # both are in the middle of it
        return False

    def fetch(cache: ShardCache) -> None:
        found.append(cache.fetch(shard, dict, stopped=stopped))

    threads = [threading.Thread(target=fetch, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [caches[0].path(shard)] * 2
    assert (found[0] / "shard").read_bytes() == data
    assert not list((tmp_path / "cache").glob(".partial-*"))
