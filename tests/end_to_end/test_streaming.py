"""Training while `olm-data tokenize` writes: processes killed at random, and one command."""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.page_run import run_page
from support.pages import read_page
from support.runs import command, environment, metrics, write_config
from support.tokenizing import texts, write_jsonl

from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix

STREAMING = Path(__file__).parents[2] / "pipelines" / "streaming"
SLOW = "import time\n\ndef keep(record):\n    time.sleep(0.005)\n    return True\n"
MIXTURE = """\
version: 1
seed: 5
sequence_length: 32
order: arriving
sources:
  web: {data: web, max_epochs: 1}
stages:
  - {name: main, tokens: 81920, weights: {web: 1}}
"""
KILLS = 5


@pytest.mark.slow
def test_tokeniser_and_trainer_killed_at_random_come_to_the_run_that_begins_afterwards(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    text = write_jsonl(tmp_path / "web.jsonl", texts(2600))
    (tmp_path / "slow_text.py").write_text(SLOW)
    (tmp_path / "mix.yaml").write_text(MIXTURE)
    lock, run = tmp_path / "mix.lock.json", tmp_path / "run"
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    tokenize = [
        *(sys.executable, "-m", "olm_data", "tokenize", str(text), "--output"),
        *(str(tmp_path / "web"), "--tokenizer", str(tiny_tokenizer), "--filter", "slow_text:keep"),
        *("--shard-tokens", "2000", "--workers", "1"),
    ]
    options = (
        "--trainer.takeover_seconds=1",
        "--trainer.callbacks={checkpointer: {save_interval: 40}}",
    )
    config = write_config(tmp_path / "train.yaml", lock, run)
    train = command(config, *options)
    logs = [(tmp_path / name).open("w") for name in ("tokenize.log", "train.log")]

    def begin(words: list[str], log: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(words, env=env, stdout=logs[log], stderr=subprocess.STDOUT)

    running = [begin(tokenize, 0)]
    try:
        mixing = [sys.executable, "-m", "olm_data", "mix", str(tmp_path / "mix.yaml")]
        subprocess.run(mixing, env=env, check=True, timeout=1200)
        assert not Lock.read(lock).complete
        running.append(begin(train, 1))
        chance = random.Random(4)
        for kill in range(KILLS):
            which = kill % 2
            try:
                assert running[which].wait(chance.uniform(2, 9)) == 0
            except subprocess.TimeoutExpired:
                running[which].send_signal(signal.SIGKILL)
                running[which].wait()
                running[which] = begin((tokenize, train)[which], which)
        assert [process.wait(300) for process in running] == [0, 0], logs[1].name
    finally:
        for process in running:
            process.kill()
        for log in logs:
            log.close()
    said = (tmp_path / "train.log").read_text()
    assert "text has arrived" in said
    whole = mix(str(tmp_path / "mix.yaml")).lock
    shutil.copytree(tmp_path / "web", tmp_path / "after" / "web")
    shutil.copy(tmp_path / "mix.yaml", tmp_path / "after")
    after = mix(str(tmp_path / "after" / "mix.yaml"))
    assert after.lock.digest == whole.digest
    again = write_config(tmp_path / "again.yaml", Path(after.path), tmp_path / "again")
    subprocess.run(command(again, *options), env=env, check=True, timeout=1200)
    losses = [
        {line["step"]: line["train/CE loss"] for line in metrics(folder)}
        for folder in (run, tmp_path / "again")
    ]
    assert losses[0] == losses[1]
    verify = [sys.executable, "-m", "olm_data", "verify", str(run), "--lock", str(lock)]
    told = subprocess.run(verify, env=env, check=True, capture_output=True, text=True)
    assert told.stdout.startswith("agrees           yes\n")


@pytest.mark.slow
def test_one_command_tokenises_and_trains_as_text_arrives(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    shutil.copytree(STREAMING, here / "streaming", ignore=shutil.ignore_patterns("out"))
    (here / "streaming" / "out").mkdir()
    shutil.copy(tiny_tokenizer, here / "streaming" / "out" / "tokenizer.json")
    manifest = here / "streaming" / "mix.yaml"
    manifest.write_text(re.sub("600K", "100K", manifest.read_text()))
    text = write_jsonl(here / "text.jsonl", texts(9000))
    page = here / "page.md"
    page.write_text(f"```bash\nbash streaming/run.sh {text} 2>&1\n```\n")
    said = run_page(read_page("page", page), here, {}).all_said
    assert "finished at step 24" in said
    assert "agrees           yes" in said
    assert Lock.read(here / "streaming" / "out" / "mixture.lock.json").complete
