"""`olm-data tokenize`, `verify` and `show` as commands: streams, exit codes, JSON, interruption."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from support.command import Olm, arguments, environment, inside, olm_data
from support.polling import wait_until
from support.tokenizing import digests, texts, write_jsonl

from olm_data import tokenize
from olm_data.commands.running import make_runner
from olm_data.errors import UsageError
from olm_data.extensions.slurm.runner import SlurmRunner
from olm_data.extensions.verify.datasets import verify
from olm_data.runners.local import LocalRunner
from olm_data.storage.store import Store
from olm_data.tokenization.recipe import read_recipe


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", [*texts(40), "", "spells <|endoftext|> here"])


def test_results_go_to_stdout_and_say_what_was_made_dropped_and_how_fast(
    olm: Olm, source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    words = ("--tokenizer", tiny_tokenizer, "--output", tmp_path / "out", "--holdout", "0.2")
    done = olm_data("tokenize", source, *words)
    assert done.returncode == 0, done.stderr
    parts = ("tokens  ", "validation\n", "1 empty", "special hits  ", "EOS <|endoftext|> (0)")
    assert [part for part in (*parts, "text bytes per second") if part not in done.stdout] == []
    assert f"next: olm-data verify {tmp_path / 'out'}" in done.stderr
    checked = olm("verify", tmp_path / "out", "--json")
    report = json.loads(checked.stdout)
    assert checked.returncode == 0
    assert report["ok"] is True
    assert report["documents"] == 41


def test_a_dry_run_shows_plan_and_sample_and_writes_nothing(
    olm: Olm, source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    words = ("tokenize", source, "--tokenizer", tiny_tokenizer, "--output", tmp_path / "out")
    shown = olm(*words, "--dry-run")
    assert shown.returncode == 0
    assert "would write" in shown.stdout
    assert "document 0  " in shown.stdout
    assert "  runner      local: 1 of " in shown.stdout
    assert re.search(r"  tokens      some [\d,]+, [\d,]+ bytes on disk", shown.stdout)
    slurm = ["--runner", "slurm", "--slurm", "time=1:00:00", "--workers", "8"]
    assert (
        "  runner      slurm: an array of 1, 1 at a time, --time=1:00:00; logs in "
        in olm(*words, "--dry-run", *slurm).stdout
    )
    refused = olm(*words, "--dry-run", "--slurm", "time=1:00:00")
    assert "no effect without runner: slurm" in refused.stderr  # as without --dry-run
    as_json = json.loads(olm(*words, "--dry-run", "--json").stdout)
    assert (as_json["format"], as_json["tasks"]) == ("olm-plan", [[0, 1]])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--seed", "3"), "no effect without sample or shuffle_documents"),
        (("--where", "score = 3"), "not a condition over columns"),
    ],
)
def test_options_that_mean_nothing_are_usage_errors(
    olm: Olm,
    source: Path,
    tiny_tokenizer: Path,
    tmp_path: Path,
    more: tuple[str, str],
    message: str,
) -> None:
    words = ("tokenize", source, "--tokenizer", tiny_tokenizer, "--output", tmp_path / "out")
    done = olm(*words, *more)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_own_files_need_a_tokenizer_and_an_output(olm: Olm, source: Path) -> None:
    done = olm("tokenize", source)
    assert done.returncode == 2
    assert "--tokenizer and --output" in done.stderr
    assert "olm-data tokenize" in done.stderr
    assert olm("tokenize").returncode == 2


def test_an_interrupted_run_exits_130_says_how_to_go_on_and_goes_on(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(3000))
    words = ("--tokenizer", tiny_tokenizer, "--shard-tokens", "1000", "--workers", "2")
    command = ("tokenize", source, *words, "--encoder", "hf", "--output")

    def interrupted() -> tuple[int, str]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        process = subprocess.Popen(
            arguments(*command, tmp_path / "out"),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        third = tmp_path / "out" / "shard-00002.json"
        wait_until(lambda: process.poll() is not None or third.exists(), "three shards")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        return process.returncode, errors

    # Again where a busy machine brings the signal after the end.
    code, errors = next((c, e) for c, e in (interrupted() for _ in range(5)) if c)
    assert code == 130
    assert "run the same command again to continue" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out" / "manifest.json").exists()
    again = olm_data(*command, tmp_path / "out")
    assert "finished before; they are kept" in again.stderr
    assert olm_data(*command, tmp_path / "whole").returncode == 0
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.slow
def test_with_json_stdout_is_events_and_the_last_line_is_the_result(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    words = ("tokenize", source, "--tokenizer", tiny_tokenizer, "--output", tmp_path / "out")
    done = olm_data(*words, "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("start", "done")
    assert {event["event"] for event in events} <= {"start", "progress", "note", "done"}
    assert events[-1]["documents"] == 41
    assert events[-1]["seconds"] >= 0
    refused = olm_data(*words, "--eos", "none", "--json")
    last = json.loads(refused.stdout.splitlines()[-1])
    assert (last["event"], last["exit_code"], refused.returncode) == ("error", 7, 7)
    assert "another dataset" in last["what"]
    assert str(tmp_path) in last["where"]
    wrong = olm_data("tokenize", source, "--no-such-option", "--json")
    assert json.loads(wrong.stdout)["exit_code"] == wrong.returncode == 2


def test_the_last_line_is_what_to_type_next_and_a_second_run_finds_all_done(
    olm: Olm, source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    output = tmp_path / "my tokens"
    words = ("tokenize", source, "--tokenizer", tiny_tokenizer, "--output", output)
    done = olm(*words)
    assert done.stderr.splitlines()[-1] == f"next: olm-data verify '{output}'"
    again = olm(*words)
    assert "already complete  yes\n" in again.stdout


def test_the_local_runner_has_the_workers_asked_for_or_a_core_each() -> None:
    runner = make_runner(read_recipe((), {"workers": 3}))
    assert isinstance(runner, LocalRunner)
    assert runner.workers == 3
    assert make_runner(read_recipe((), {})).workers >= 1


def test_slurm_gets_its_options() -> None:
    recipe = read_recipe((), {"runner": "slurm", "workers": 4, "slurm": ["time=1:00:00"]})
    assert isinstance(make_runner(recipe), SlurmRunner)


@pytest.mark.parametrize(
    ("fields", "option", "runner"),
    [
        ({"slurm": ["time=1"]}, "--slurm", "slurm"),
        ({"ray_address": "auto"}, "--ray-address", "ray"),
        ({"runner": "slurm", "workers": 2, "ray_address": "auto"}, "--ray-address", "ray"),
    ],
)
def test_an_option_of_another_runner_is_refused(
    fields: dict[str, object], option: str, runner: str
) -> None:
    with pytest.raises(UsageError, match=f"no effect without runner: {runner}") as caught:
        make_runner(read_recipe((), fields))
    assert caught.value.where == option


@pytest.mark.parametrize(("where", "workers"), [("inputs", None), ("output", 3), ("both", 3)])
def test_what_this_process_holds_in_memory_is_tokenised_by_it(
    where: str, workers: int | None, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    held = f"memory://bucket{tmp_path.name}"
    lines = b"".join(b'{"text": "text %d"}\n' % n for n in range(50))
    (tmp_path / "a.jsonl").write_bytes(lines)
    Store(held).put("in/a.jsonl", lines)
    source = str(tmp_path / "a.jsonl") if where == "output" else f"{held}/in/a.jsonl"
    output = str(tmp_path / "out") if where == "inputs" else f"{held}/{workers}"
    fields = {"workers": workers} if workers else {}
    plain = tokenize(tmp_path / "a.jsonl", tokenizer=tiny_tokenizer, output=tmp_path / "plain")
    made = tokenize(source, tokenizer=tiny_tokenizer, output=output, **fields)
    assert (made.documents, made.manifest.shards) == (50, plain.manifest.shards)
    assert verify(output).ok


def test_another_machine_or_command_is_refused_memory_before_any_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="no other machine sees"):
        make_runner(read_recipe((), {"runner": "slurm"}), ["/data/a.jsonl", "memory://b/out"])
    for words in (("-o", "memory://b/x"), ("--output=memory://b/x",)):
        said = inside(capsys, "tokenize", tmp_path, "--tokenizer", "gpt2", *words)
        assert (said.returncode, said.stdout) == (2, "")
        assert "one process holds" in said.stderr
