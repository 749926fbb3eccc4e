"""`olm-train new`: a folder for a text that is there, whose commands train it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.tokenizing import texts, write_jsonl

from olm_data.cli import cli
from olm_data.errors import InputError
from olm_train.estimate.gpus import GPUS
from olm_train.extensions.new.command import look, main, mix_yaml, readme, train_yaml
from olm_train.extensions.new.plan import ENOUGH, MOST_EPOCHS, plan
from olm_train.run.command import main as train

PLAN = plan(10**6, None, None)


def new(*words: str) -> str:
    return CliRunner().invoke(main, words, catch_exceptions=False).stdout


def test_the_commands_it_writes_train_on_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("web", "books"):
        (tmp_path / "text" / name).mkdir(parents=True)
        write_jsonl(tmp_path / "text" / name / "a.jsonl", texts(60))
    monkeypatch.chdir(tmp_path)
    assert "olm-1m" in new("mine", "--data", "text")
    monkeypatch.chdir(tmp_path / "mine")
    (block,) = re.findall(r"```bash\n(.*?)```", Path("README.md").read_text(), re.S)
    for line in block.splitlines():
        program, *words = shlex.split(line, comments=True)
        if program == "olm-data":
            cli.main(words, standalone_mode=False)
    small = ["--model.d_model=32", "--model.n_layers=1", "--trainer.callbacks.lm_evaluator=null"]
    stop = "--trainer.hard_stop={value: 2, unit: steps}"
    assert train(["train.yaml", *small, stop]) == 0


@pytest.mark.parametrize("size", [10**5, 10**8, 10**11])
@pytest.mark.parametrize("gpu", [None, GPUS["h100"]])
def test_text_is_enough_and_never_repeated_too_often(size: int, gpu: object) -> None:
    made = plan(size, None, gpu)  # type: ignore[arg-type]
    assert made.epochs <= MOST_EPOCHS
    assert made.trained <= 1.01 * ENOUGH * made.model.num_params
    assert made.batch % made.microbatch == 0
    assert made.microbatch % made.row == 0
    if made.recipe:
        assert made.batch % (made.recipe.gpus * made.microbatch) == 0
        assert made.microbatch <= made.recipe.module.rank_microbatch_size


def test_the_files_say_what_the_text_is_enough_for() -> None:
    for size, why, share in (
        (10**6, "our smallest; more text would be better", "0.9"),
        (10**8, "the largest for which the text is enough", "20"),
        (10**11, "our largest for a CPU", "18"),
    ):
        made = plan(size, None, None)
        assert f"M parameters: {why}\n" in train_yaml(made, ["a"])
        assert f"about: {share} for each parameter, 20 are enough" in mix_yaml(made, ["a"])
    assert plan(10**6, "olm-1m", None).why == "as asked for"


def test_more_text_takes_a_larger_model() -> None:
    sizes = [plan(10**n, None, GPUS["h100"]).model.num_params for n in range(5, 12)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 4


def test_a_preset_goes_by_its_published_name_too(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(5))
    words = ["--data", str(tmp_path / "a.jsonl"), "--preset", "gpt2-124m", "--json"]
    assert json.loads(new(str(tmp_path / "mine"), *words))["preset"] == "gpt2-small"
    for wrong, code in ((["--preset", "gpt2-smal"], 2), ([], 7)):
        words = [str(tmp_path / "mine"), "--data", str(tmp_path / "a.jsonl"), *wrong]
        assert CliRunner().invoke(main, words).exit_code == code


def test_compressed_text_counts_more_and_no_text_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt.gz").write_bytes(b"1234")
    (text / "b.md").write_bytes(b"1234")
    assert look(text).sources == {"text": (text, 16)}
    (text / "c").mkdir()
    (text / "c" / "d.exe").write_bytes(b"1234")
    assert look(text).others == 1
    with pytest.raises(InputError, match="1 file of no known format"):
        look(text / "c")


def test_sources_have_names_that_a_manifest_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("my notes", "web"):
        (tmp_path / "all of it" / name).mkdir(parents=True)
        (tmp_path / "all of it" / name / "a.txt").write_text("a")
    assert set(look(tmp_path / "all of it").sources) == {"my-notes", "web"}
    (tmp_path / "all of it" / "my_notes").mkdir()
    (tmp_path / "all of it" / "my_notes" / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path / "all of it")
    assert look(Path()).sources == {"all-of-it": (Path(), 3)}  # two would have one name
    assert "tokenize '../my notes' --" in readme(PLAN, "mine", {"my-notes": "../my notes"})
