"""The folders of pipelines/ one after the other, small: each begins with what the last one left."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
import yaml
from support.runs import metrics

import olm_data
from olm_data.mixture.mix import mix
from olm_train.run.command import main

PIPELINES = Path(__file__).parents[2] / "pipelines"
AFRESH = (
    "--trainer.load_path=null",
    "--trainer.load_trainer_state=true",
    "--trainer.load_optim_state=true",
)


def train(folder: Path, *options: str) -> list[float]:
    """Losses of the steps of a run in `folder`."""
    assert main([
        str(folder / "train.yaml"), "--trainer.max_duration={value: 6, unit: steps}",
        "--trainer.callbacks={checkpointer: {save_interval: 3}}",
        "--train_module.dp_config={name: ddp}", *options,
    ]) == 0  # fmt: skip
    return [line["train/CE loss"] for line in metrics(folder / "out" / "run")]


def compile_lock(folder: Path) -> None:
    """The folder's mixture, of 100K tokens in the place of its own, with what epochs that takes."""
    values = yaml.safe_load((folder / "mix.yaml").read_text())
    values["stages"][0]["tokens"] = 40 * 256 * 10
    for source in values["sources"].values():
        source["max_epochs"] = 100
    (folder / "small.yaml").write_text(yaml.safe_dump(values))
    mix(str(folder / "small.yaml"), str(folder / "out" / "mixture.lock.json"))


def go_on_with(folder: Path) -> list[float]:
    """Losses of a stage that begins with the one before; stopped and started, they are the same."""
    run = folder / "out" / "run"
    compile_lock(folder)
    other = train(folder, *AFRESH)
    shutil.rmtree(run)
    losses = train(folder)
    shutil.rmtree(run)
    train(folder, "--trainer.hard_stop={value: 4, unit: steps}")
    assert train(folder) == losses  # goes on in its own run, not from the stage before again
    assert other[0] > losses[0]
    return losses


@pytest.mark.slow
def test_each_stage_begins_with_what_the_last_one_left(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("quickstart", "midtrain", "long-context", "sft"):
        shutil.copytree(PIPELINES / name, tmp_path / name, ignore=shutil.ignore_patterns("out"))
    base, sft = tmp_path / "quickstart", tmp_path / "sft"
    tokenizer = str(tiny_tokenizer)
    for name, subset in (("code", "stdlib"), ("docs", "packages")):
        olm_data.tokenize(
            source="pylib",
            subset=subset,
            limit=100_000,
            tokenizer=tokenizer,
            output=str(base / "out" / "tokens" / name),
        )
    monkeypatch.chdir(base)
    compile_lock(base)
    train(base)

    for stage in ("midtrain", "long-context"):
        monkeypatch.chdir(tmp_path / stage)
        kept = go_on_with(tmp_path / stage)
    shutil.rmtree(tmp_path / "long-context" / "out" / "run")
    reset = train(tmp_path / "long-context", "--trainer.load_optim_state=false")
    assert reset[0] == kept[0]
    assert reset[2:] != kept[2:]

    monkeypatch.chdir(sft)
    runpy.run_path("chats.py")["main"](Path("out/chats.jsonl"))
    rows = Path("out/chats.jsonl").read_text().splitlines(keepends=True)
    Path("out/few.jsonl").write_text("".join(rows[:400]))
    olm_data.tokenize(
        "out/few.jsonl",
        format="chat",
        chat_template="tulu",
        tokenizer=tokenizer,
        output="out/tokens/chats",
        max_tokens=256,
        max_bad="1%",
    )
    go_on_with(sft)
