"""`olm-data tokenize`, `mix` and what commands share: options, streams, exit codes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.command import Olm, arguments, environment, inside, olm_data
from support.polling import wait_until
from support.small_datasets import random_shards, write_dataset
from support.tokenizing import digests, texts, write_jsonl

from olm_data import tokenize
from olm_data.cli import cli
from olm_data.command import CountParam
from olm_data.commands.recipe_options import recipe_options
from olm_data.commands.running import make_runner
from olm_data.errors import UsageError
from olm_data.extensions.slurm.runner import SlurmRunner
from olm_data.extensions.verify.datasets import verify
from olm_data.packing.packings import PACKINGS
from olm_data.runners.local import LocalRunner
from olm_data.storage.store import Store
from olm_data.tokenization.recipe import read_recipe
from olm_train.cli import cli as trainer


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


FIELDS = ("text_column", "keep", "limit", "special", "strict_inputs", "slurm", "holdout")


given: list[dict[str, Any]] = []


@click.command()
@recipe_options(*FIELDS, helps={"text_column": "Help of the command's own."})
def command(given: dict[str, Any]) -> None:
    globals()["given"].append(given)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--text-column content", {"text_column": "content"}),
        ("--keep url,score,", {"keep": ["url", "score"]}),
        ("--strict-inputs --special error", {"strict_inputs": True, "special": "error"}),
        ("--slurm --time=1 --slurm --mem=2", {"slurm": ("--time=1", "--mem=2")}),
        ("--holdout 1/8", {"holdout": "1/8"}),
    ],
)
def test_the_command_gets_the_options_that_were_set(words: str, expected: dict[str, Any]) -> None:
    done = CliRunner().invoke(command, words.split())
    assert done.exit_code == 0, done.output
    assert given[-1] == expected


@pytest.mark.parametrize(
    ("words", "says"), [("--special plane", "plain"), ("--strict-input", "--strict-inputs")]
)
def test_what_a_field_does_not_take_is_refused(words: str, says: str) -> None:
    done = CliRunner().invoke(command, words.split())
    assert (done.exit_code, says in done.output) == (2, True), done.output


def test_help_is_that_of_the_field_or_of_the_command() -> None:
    text = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    assert "Help of the command's own." in text
    assert all("--" + name.replace("_", "-") in text for name in FIELDS)


BOTH = [(cli, name) for name in cli.list_commands(click.Context(cli))]


BOTH += [
    (trainer, name)
    for name in trainer.list_commands(click.Context(trainer))
    if name not in ("run", "config", "lm-eval")
]


@pytest.mark.parametrize(("group", "name"), BOTH)
def test_every_command_takes_the_common_options(group: click.Group, name: str) -> None:
    context = click.Context(group)
    command = group.get_command(context, name)
    assert group.get_command(context, name) is command
    names = [option for parameter in command.params for option in parameter.opts]
    assert len(names) == len(set(names)), names
    assert {"-q", "--quiet", "-v", "--verbose", "--debug"} <= set(names)
    assert ("-o" in names) == ("--output" in names)


@pytest.fixture
def words(tmp_path: Path, tiny_tokenizer: Path) -> list[str | Path]:
    source = write_jsonl(tmp_path / "a.jsonl", texts(9))
    return ["tokenize", source, "--tokenizer", tiny_tokenizer, "-o", tmp_path / "out"]


def test_quiet_says_the_result_alone_and_verbose_what_was_done(
    words: list[str | Path], tmp_path: Path, olm: Olm
) -> None:
    quiet = olm(*words, "-q")
    assert quiet.returncode == 0, quiet.stderr
    assert quiet.stderr == ""
    assert quiet.stdout.startswith("output ")
    loud = olm("verify", tmp_path / "out", "-v")
    assert f"read {tmp_path}/out/manifest.json" in loud.stderr
    last = loud.stderr.splitlines()[-1]
    assert last.startswith("took ")
    assert " s of CPU, " in last
    silent = olm("verify", tmp_path / "out")
    assert "manifest.json" not in silent.stderr


def test_quiet_still_tells_warnings_and_errors(words: list[str | Path], olm: Olm) -> None:
    assert "error: " in olm(*words, "--eos", "nothing", "-q").stderr
    both = olm(*words, "-q", "-v")
    assert (both.returncode, "-q and -v contradict each other" in both.stderr) == (2, True)


def test_quiet_prints_no_table(tiny_mixture: Path, tmp_path: Path, olm: Olm) -> None:
    manifest = next(tiny_mixture.parent.glob("*.yaml"), None)
    if manifest is None:
        manifest = tiny_mixture.parent / "quiet.yaml"
        stage = "{name: main, tokens: 1K, weights: {prose: 1}}"
        source = "{data: ./prose, max_epochs: 9}"
        lines = ["version: 1", "seed: 1", "sequence_length: 32", f"sources: {{prose: {source}}}"]
        manifest.write_text("\n".join([*lines, f"stages: [{stage}]", ""]))
    done = olm("mix", manifest, "-o", tmp_path / "quiet.lock.json", "-q")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"written: {tmp_path}/quiet.lock.json (digest ")


@pytest.mark.parametrize(
    ("text", "number"), [("32K", 32_000), ("32768", 32_768), ("1.5m", 1_500_000)]
)
def test_counts_are_taken_as_people_write_them(text: str, number: int) -> None:
    command = click.Command("x", params=[click.Option(["--most"], type=CountParam(1))])
    assert command.make_context("x", ["--most", text]).params == {"most": number}
    with pytest.raises(click.BadParameter, match="'lots' is not a valid integer"):
        command.make_context("x", ["--most", "lots"])


@pytest.mark.parametrize("package", ["olm_data", "olm_train"])
def test_a_package_runs_as_its_program(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", package, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(package.replace("_", "-"))


COMPARE = ("mix", "--compare-packing")


LENGTHS = [[5, 3, 9, 24, 1, 1, 6], [1, 1, 1], [40, 8, 8, 8], [2, 30, 1], [7] * 20, [64, 16, 17]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "web"
    shards = random_shards(1, LENGTHS)
    write_dataset(path, [[ids + 1 for ids in shard] for shard in shards], vocab_size=50_001)
    return path


def test_a_sample_says_that_it_is_one(dataset: Path) -> None:
    result = CliRunner().invoke(
        cli, [*COMPARE, str(dataset), "--documents", "10", "--sequence-length", "8,16"]
    )
    assert result.exit_code == 0, result.output
    assert "the first 10 documents of 40" in result.stdout
    assert result.stdout.count("rows of") >= 2


def test_json_and_page_hold_the_same_numbers(dataset: Path, tmp_path: Path) -> None:
    page = tmp_path / "packing.html"
    result = CliRunner().invoke(cli, [*COMPARE, str(dataset), "--json", "--html", str(page)])
    found = json.loads(result.stdout)
    assert [one["packing"] for one in found] == list(PACKINGS)
    assert f"{found[0]['tokens']:,}" in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tree"], "--tree is for a lock; this writes none"),
        (["--dry-run"], "--dry-run is for a lock; this writes none"),
        (["--sequence-length", "8,x"], "are not sequence lengths"),
    ],
)
def test_options_without_effect_are_refused(dataset: Path, words: list[str], message: str) -> None:
    error = CliRunner().invoke(cli, [*COMPARE, str(dataset), *words]).exception
    assert isinstance(error, UsageError)
    assert message in str(error)
    for option in ("--documents", "--sequence-length", "--html"):
        error = CliRunner().invoke(cli, ["mix", "manifest.yaml", option, "8"]).exception
        assert f"{option} is for --compare-packing" in str(error)
