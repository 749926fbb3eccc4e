"""`olm-train export`: one command for both formats; what it says, refuses and leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.hf_exports import OLMO2, read, receipt_of, trained

from olm_data.model_receipt import ModelReceipt
from olm_train.extensions.hf_export.command import main


@pytest.fixture(scope="module")
def run(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export-command") / "run"
    trained(tiny_mixture, folder, OLMO2)
    return folder


def test_a_run_becomes_a_folder_and_says_what_was_proved(run: Path, tmp_path: Path) -> None:
    hf = str(tmp_path / "hf")
    done = CliRunner().invoke(main, [str(run), "--to", "hf", "--output", hf])
    assert done.exit_code == 0, done.output
    for part in ("model class  Olmo2ForCausalLM", "step         2", "greedy tokens  ", "loss"):
        assert part in done.stdout
    assert done.stderr.endswith(f"written: {hf}\n")
    again = CliRunner().invoke(main, [str(run), "--to", "hf", "--output", hf])
    assert again.stderr.endswith(f"already there: {hf}\n")


def test_each_option_has_its_effect(run: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}")
    options = ["--dtype", "float16", "--shard-size", "20KB", "--context", "77", "--verify", "files"]
    options += ["--write-tied-head", "--chat-template", str(template), "--json"]
    hf = tmp_path / "hf"
    done = CliRunner().invoke(main, [str(run), "--to", "hf", "--output", str(hf), *options])
    assert done.exit_code == 0, done.output
    receipt = receipt_of(hf)
    assert json.loads(done.stdout)["claim"] == read(hf / "olm-export.json")["claim"]
    assert (receipt.claim.dtype, receipt.claim.shard_bytes) == ("float16", 20_000)
    assert receipt.claim.tied_head is False  # the head of this model is its own
    assert receipt.verified.model is None
    assert isinstance(receipt, ModelReceipt)
    assert len(list(hf.glob("model-*.safetensors"))) > 2
    assert read(hf / "config.json")["max_position_embeddings"] == 77
    assert (hf / "chat_template.jinja").read_text() == template.read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dtype", "float32"], "--dtype is for --to hf"),
        (["--verify", "files"], "--verify is for --to hf"),
        (["--to", "hf", "--shard-size", "big"], "'big' is not a size"),
    ],
)
def test_options_without_effect_or_sense_are_refused(
    run: Path, tmp_path: Path, options: list[str], says: str
) -> None:
    out = str(tmp_path / "out")
    done = CliRunner().invoke(main, [str(run), "--output", out, *options])
    assert done.exit_code == 2
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_template_that_is_not_there_is_refused(run: Path, tmp_path: Path) -> None:
    options = ["--to", "hf", "--chat-template", str(tmp_path / "none")]
    done = CliRunner().invoke(main, [str(run), "--output", str(tmp_path / "out"), *options])
    assert done.exit_code == 4
    assert "there is no such template" in done.stderr


def test_an_export_writes_over_an_export_and_nothing_else(run: Path, tmp_path: Path) -> None:
    def export(output: Path) -> Result:
        return CliRunner().invoke(main, [str(run), "--output", str(output)])

    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    done = export(run)
    assert done.exit_code == 7
    assert "holds config.json" in done.stderr
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    mine = tmp_path / "tokenizer.json"
    mine.write_text("mine")
    assert export(tmp_path).exit_code == 7
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    for _ in range(2):
        assert export(tmp_path / "new").exit_code == 0
