"""FAULTS row 74: without extras every command works, or names the extra and what to type."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from support.command import environment
from support.tokenizing import texts, write_jsonl

from olm_data.cli import cli
from olm_data.extras import DISTRIBUTION, EXTRAS, install
from olm_train.cli import cli as trainer

SUMMARIES = cli.list_commands(click.Context(cli))
COMMANDS = trainer.list_commands(click.Context(trainer))
REPOSITORY = Path(__file__).resolve().parents[2]
CLI = "olm_data.cli"
WORKS = "works"
BROUGHT = {"awkward": "gigatoken", "markupsafe": "jinja2"}
BROUGHT |= {"comet_ml": "comet-ml", "lm_eval": "lm-eval"}
"""Packages that come with another one, or are imported by another name."""

Case = tuple[list[str], str]
"""A command, and the extra that it must name, or `WORKS`."""


def cases(folder: Path, tokenizer: Path) -> list[Case]:
    """Every command; those of `olm-data` in their order, on s3:// and with what needs an extra."""
    text = write_jsonl(folder / "a.jsonl", texts(20))
    tokens, far = str(folder / "tokens"), "s3://bucket/place"
    (folder / "mix.yaml").write_text(
        f"version: 1\nseed: 1\nsequence_length: 16\nsources: {{web: {{data: {tokens}}}}}\n"
        "stages:\n  - {name: main, tokens: 64, weights: {web: 1}}\n"
    )
    lock = str(folder / "mix.lock.json")
    (folder / "train.yaml").write_text(f"data_loader: {{mixture: {lock}}}\n")
    words = ["--tokenizer", str(tokenizer), "--encoder", "auto", "--workers", "1", "--output"]
    do = [CLI, "tokenize", str(text), *words]
    olm: list[Case] = [
        ([CLI, "train-tokenizer", far, "--vocab-size", "300", "--output", tokens + ".json"], "s3"),
        ([*do, tokens], WORKS),
        ([*do, far], "s3"),
        ([CLI, "tokenize", f"{far}/a.jsonl", *words, tokens + "2"], "s3"),
        ([CLI, "tokenize", "--source", "hf:some/name", *words, tokens + "3"], "hub"),
        ([CLI, "tokenize", str(text), *words, tokens + "4", "--runner", "ray"], "ray"),
        ([*do, tokens + "5", "--encoder", "gigatoken"], "fast"),
        ([CLI, "status", far], "s3"),
        ([CLI, "work", far, "--tasks", "0"], "s3"),
        ([CLI, "add", far, str(text)], "s3"),
        ([CLI, "import", far, "--tokenizer", str(tokenizer), "--output", tokens + "6"], "s3"),
        ([CLI, "import", "--help"], WORKS),
        ([CLI, "mix", tokens, "--compare-packing"], WORKS),
        ([CLI, "mix", tokens, "--compare-packing", "--html", lock + ".html"], "report"),
        ([CLI, "mix", str(folder / "mix.yaml")], WORKS),
        ([CLI, "export", far, "--output", tokens + "7", "--to", "megatron"], "s3"),
        ([CLI, "push", "--help"], WORKS),
        ([CLI, "pull", "--help"], WORKS),
        ([CLI, "verify", tokens], WORKS),
        ([CLI, "verify", far], "s3"),
        ([CLI, "stats", tokens], WORKS),
        ([CLI, "eval-set", "--help"], WORKS),
        ([CLI, "stats", tokens, "--html", tokens + ".html"], "report"),
        ([CLI, "show", "document", tokens, "0"], WORKS),
        ([CLI, "show", "document", far, "0"], "s3"),
        ([CLI, "show", "step", lock, "1", "--global-batch", "32"], WORKS),
        ([CLI, "show", "step", far, "1", "--global-batch", "32"], "s3"),
        ([CLI, "verify", "--help"], WORKS),
        ([CLI, "report", lock, "--output", lock + ".html"], "report"),
        ([CLI, "doctor", str(folder)], WORKS),
        ([CLI, "doctor", far], "s3"),
        ([CLI, "doctor", "gs://bucket/place"], "gcs"),
        ([CLI, "doctor", "az://bucket/place"], "azure"),
        ([CLI, "tokenize", "https://host/a.jsonl", *words, tokens + "7"], "http"),
        ([CLI, "doctor", far, "--clean"], "s3"),
    ]
    words = {
        "run": [str(folder / "train.yaml")],
        "config": [str(folder / "train.yaml")],
        "export": [str(folder), "--output", str(folder / "out")],
        "evaluate": [str(folder), "--data", tokens],
        "generate": [str(folder)],
        "chat": [str(folder)],
        "serve": [str(folder)],
    }
    no_torch = {"watch", "notify"}  # they go on for ever: test_watch, test_notify
    names = [name for name in COMMANDS if name not in no_torch]
    brings = {"lm-eval": "eval"}
    return olm + [
        (["olm_train.cli", name, *words.get(name, [])], brings.get(name, "train")) for name in names
    ]


def check(python: str, found: list[Case], *flags: str, where: Path) -> None:
    """Run all cases in one process of `python` and look at what each says."""
    script = REPOSITORY / "tests/support/core_only.py"
    done = subprocess.run(
        [python, str(script), *flags],
        input=json.dumps([command for command, _ in found]),
        capture_output=True,
        text=True,
        check=False,
        cwd=where,
        env={k: v for k, v in environment().items() if flags or k != "PYTHONPATH"},
    )
    assert done.stdout, done.stderr
    answers = json.loads(done.stdout)
    wrong = [
        f"{command}: exit {code}\n{said}"
        for (command, extra), (code, said) in zip(found, answers, strict=True)
        if "Traceback" in said
        or code != (0 if extra == WORKS else 2)
        or (extra != WORKS and ", which is not installed\n" not in said)
        or (extra != WORKS and f"  fix: {install(extra)}" not in said)
    ]
    assert not wrong, "\n".join(wrong)


def test_74_u3_every_command_names_its_missing_extra(tiny_tokenizer: Path, tmp_path: Path) -> None:
    found = cases(tmp_path, tiny_tokenizer)
    assert {command[1] for command, _ in found if command[0] == CLI} == set(SUMMARIES)
    check(sys.executable, found, "--hide", where=tmp_path)


@pytest.mark.slow  # a new environment and an installation from the package index
def test_74_u3_an_installation_of_the_core_alone(tiny_tokenizer: Path, tmp_path: Path) -> None:
    python = tmp_path / "core/bin/python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "core")], check=True)
    constraints = str(REPOSITORY / "constraints.txt")
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", constraints]
    checkout = tmp_path / "checkout"  # a build leaves files where it runs
    for name in ("olm_data", "olm_train"):
        shutil.copytree(REPOSITORY / name, checkout / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, checkout / name)
    subprocess.run([*pip, str(checkout)], check=True, cwd=tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    check(str(python), cases(work, tiny_tokenizer), where=work)


def test_u2_one_name_that_is_ours_in_messages_and_pages() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    others = {"dev", "chat"}  # jinja2 comes with `report`
    assert set(EXTRAS.values()) == set(project["optional-dependencies"]) - others
    required = "\n".join(map(str, project["optional-dependencies"].values()))
    for package, extra in EXTRAS.items():
        brought = BROUGHT.get(package, package)
        assert brought in required, (package, extra)
    for pattern in ("olm_data/**/*.py", "olm_train/**/*.py", "docs/**/*.md", "*.md"):
        for path in REPOSITORY.glob(pattern):
            assert "olm[" not in path.read_text(), path
