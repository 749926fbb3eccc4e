"""`olm-train generate`: reads only what verifies; one text or many, on one rank or several."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.distributed import run_ranks
from support.forked import python
from support.hf_talker import greedy, save_hf_talker, theirs
from support.hub_stub import HubStub
from support.runs import build_trainer, group_world

from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.distributed.world import World
from olm_train.extensions.generate.command import generate, main
from olm_train.extensions.generate.sampling import Sampling

pytestmark = pytest.mark.xdist_group("generate")  # its fixtures are made once
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def run_folder(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate") / "run"
    build_trainer(
        tiny_mixture,
        folder,
        "--trainer.callbacks.checkpointer.save_interval=12",
        "--train_module.optim.lr=3e-2",
        "--model.vocab_multiple=96",
    ).fit()
    return folder


def test_command_prints_the_text_and_writes_the_sample(run_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "sample.json"
    arguments = [str(run_folder), "--prompt", "the quick", "--max-new-tokens", "9"]
    result = CliRunner().invoke(main, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    written = json.loads(output.read_text())
    assert result.stdout == f"the quick{written['text']}\n"
    assert len(written["ids"]) <= 9
    assert written["checkpoint"] == "step00000024"


def test_rows_that_pad_the_vocabulary_are_saved_and_never_drawn(run_folder: Path) -> None:
    model = evaluation_model(open_checkpoint(run_folder / "step00000024", World()))
    assert len(model.embeddings.weight) == 576 > model.config.vocab_size == 512
    assert not model.embeddings.weight[512:].any()
    wild = Sampling(temperature=50.0)
    drawn = generate(str(run_folder), ["the"] * 4, max_new_tokens=25, sampling=wild, samples=3)
    assert max(max(sample.ids) for sample in drawn) < 512
    assert len({sample.ids for sample in drawn}) == 3  # a seed of its own each, whatever the row


def test_a_named_checkpoint_is_another_model(run_folder: Path) -> None:
    texts = {
        name: generate(str(run_folder), ["def f"], checkpoint=name, sampling=GREEDY)[0].ids
        for name in ("12", "step00000024")
    }
    assert texts["12"] != texts["step00000024"]
    assert generate(str(run_folder), [""], max_new_tokens=3)[0].prompt == ""  # begins a document


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["none"], 4, "there is no such folder"),
        (["{run}", "--checkpoint", "7"], 4, "there is no checkpoint 7"),
        (["{run}", "--top-k", "x"], 2, "not a valid integer"),
        (["{run}", "--top-p", "0"], 2, "top_p is above 0 and at most 1"),
        (["{run}", "--prompt", "a", "--prompts", "b"], 2, "exclude each other"),
        (["{run}", "--prompts", "nowhere.jsonl"], 4, "no such file of prompts"),
        (["{run}", "--prompt", "the quick " * 40], 2, "the model looks at 32 at most"),
    ],
)
def test_mistakes_have_a_message(
    run_folder: Path, arguments: list[str], code: int, says: str
) -> None:
    result = CliRunner().invoke(main, [text.format(run=run_folder) for text in arguments])
    assert result.exit_code == code
    assert says in result.output


def test_many_prompts_are_what_each_is_alone(run_folder: Path, tmp_path: Path) -> None:
    texts = ["the quick brown", "def f", "", "a lazy dog while seven", "owls"]
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text} | ({"seed": 7} if text == "owls" else {}) for text in texts]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--max-new-tokens", "12", "--temperature", "1.5", "--seed", "3"]
    words += ["--top-p", "0.95", "--min-p", "0.001", "--repetition-penalty", "1.2", "--stop", "x"]
    output = tmp_path / "texts.jsonl"
    many = [str(run_folder), "--prompts", str(file), "--batch", "3", *words]
    result = CliRunner().invoke(main, [*many, "--output", str(output)])
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert CliRunner().invoke(main, many).stdout == output.read_text()
    assert [each["seed"] for each in written] == [3, 3, 3, 3, 7]
    assert {each["top_p"] for each in written} == {0.95}
    for text, one in zip(texts[:2], written, strict=False):
        alone = tmp_path / "one.json"
        arguments = [str(run_folder), "--prompt", text, *words, "--output", str(alone)]
        assert CliRunner().invoke(main, arguments).exit_code == 0
        assert json.loads(alone.read_text()) == one


def test_a_file_of_other_lines_is_refused(run_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    for text, says in (("[1]\n", "line 1 is no prompt"), ("\n", "there is no prompt")):
        file.write_text(text)
        result = CliRunner().invoke(main, [str(run_folder), "--prompts", str(file)])
        assert (result.exit_code, says in result.output) == (4, True), result.output


def on_ranks(run_folder: str, texts: list[str]) -> list[str]:
    samples = generate(run_folder, texts, max_new_tokens=8, world=group_world())
    return [sample.text for sample in samples]


@pytest.mark.slow
def test_ranks_share_the_prompts(run_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    texts = ["the", "def f", "seven owls", "a", "fox"]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    words = [str(run_folder), "--prompts", str(file), "--max-new-tokens", "8"]
    alone = CliRunner().invoke(main, words).stdout
    command = [python(), "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "-m", "olm_train.generate", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == alone
    first = [json.loads(line)["text"] for line in alone.splitlines()[:2]]
    assert run_ranks(on_ranks, 3, str(run_folder), texts[:2]) == [first] * 3  # one has no prompt


def test_a_model_of_transformers_writes_what_transformers_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    folder = save_hf_talker(tmp_path / "hub/models/lab/talker")
    ids = theirs(folder)[1]("the cat")["input_ids"]
    plain = greedy(folder, ids, 20)
    (sample,) = generate(str(folder), ["the cat"], max_new_tokens=20, sampling=GREEDY)
    assert (list(sample.ids), sample.finish, sample.checkpoint) == (plain, "length", "talker")
    ends = json.loads((folder / "generation_config.json").read_text())
    last = max(plain, key=plain.index)  # the one that is written first as late as any
    ends["eos_token_id"] = [5, last]  # of several, one that it writes
    (folder / "generation_config.json").write_text(json.dumps(ends))
    expected = greedy(folder, ids, 20)
    assert 0 < len(expected) < 20
    with HubStub(tmp_path / "hub").running() as stub:
        for name, value in stub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home/hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        words = ["hf://lab/talker", "--prompt", "the cat", "--temperature", "0"]
        words += ["--max-new-tokens", "20", "--output", str(tmp_path / "sample.json")]
        found = CliRunner().invoke(main, words)
    assert found.exit_code == 0, found.output
    written = json.loads((tmp_path / "sample.json").read_text())
    assert (written["ids"], written["finish"]) == (expected, "stop")
    assert written["checkpoint"].startswith("lab/talker@")
