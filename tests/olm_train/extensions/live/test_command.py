"""`olm-train watch` shows a run that trains, and needs no torch for it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.browser import browser, needs_browser
from support.runs import command, environment, write_config
from support.runs import run as train

from olm_data.storage.store import Store
from olm_train.cli import cli


def test_a_run_in_a_store_is_served(s3: dict[str, str], tmp_path: Path) -> None:
    store = Store(f"s3://{s3['bucket']}/{tmp_path.name}/small")
    store.put("metrics.jsonl", b'{"step": 7, "tokens": 9, "rows": [0, 1]}\n')
    watching = subprocess.Popen(
        [sys.executable, "-m", "olm_train.cli", "watch", store.root, "--port", "0"],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert watching.stdout is not None
        url = re.search(r"http://\S+", watching.stdout.readline())
        assert url is not None
        with urllib.request.urlopen(f"{url[0]}data?run=0", timeout=600) as said:
            update = json.load(said)
        assert (update["name"], update["points"]["steps"]) == ("small", [7])
    finally:
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=600)
    assert watching.returncode == 0


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    answer = CliRunner().invoke(cli, ["watch", str(tmp_path)])
    assert answer.exit_code == 4
    assert "not a run folder" in answer.stderr


@pytest.mark.slow
@needs_browser
def test_a_page_follows_runs_while_they_train(tiny_mixture: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    configs = [write_config(tmp_path / f"{f.name}.yaml", tiny_mixture, f) for f in folders]
    assert train(configs[0]).returncode == 0
    for name in ("config.json", "starts.jsonl"):
        folders[1].mkdir(exist_ok=True)
        (folders[1] / name).write_bytes((folders[0] / name).read_bytes())
    words = ["-X", "importtime", "-m", "olm_train.cli", "watch", *map(str, folders), "--port", "0"]
    watching = subprocess.Popen(
        [sys.executable, *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert watching.stdout is not None
        url = re.search(r"http://\S+", watching.stdout.readline())
        assert url is not None
        with browser() as chromium:
            page = chromium.open(url[0])
            page.wait("document.querySelectorAll('#clip-0 ~ g path.train').length == 1")
            training = subprocess.Popen(
                command(configs[1]), env=environment(), stderr=subprocess.DEVNULL
            )
            page.wait("document.querySelectorAll('#clip-0 ~ g path.train').length == 2")
            page.wait(
                "[...document.querySelectorAll('.badge')].map(b => b.textContent).join()"
                " == 'finished,finished'"
            )
            assert training.wait(timeout=600) == 0
            page.wait("document.querySelectorAll('#olm-evaluations td').length >= 8")
            page.click("#olm-run svg", across=0.5, down=0.5)
            page.wait("document.querySelector('#olm-documents pre')")
            assert chromium.problems == []
    finally:
        watching.send_signal(signal.SIGINT)
        _, said = watching.communicate(timeout=600)
    assert watching.returncode == 0
    assert not re.search(r"\| +torch$", said, re.M)
