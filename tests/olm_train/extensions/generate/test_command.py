"""`olm-train generate` and `chat`, and texts of a run: one text or many, on one rank or several."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from support.distributed import run_ranks
from support.forked import python
from support.hf_talker import greedy, save_hf_talker, theirs
from support.hub_stub import HubStub
from support.runs import build_trainer, group_world
from support.talking import POSITIONS, save_talker

from olm_data.errors import OlmError, UsageError, shown
from olm_data.run_log.run_folder import SAMPLES, StepSamples, read_samples
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.distributed.preempt import Preempted
from olm_train.distributed.world import World
from olm_train.extensions.generate.chat import Chat
from olm_train.extensions.generate.chat import main as chat
from olm_train.extensions.generate.command import generate, main
from olm_train.extensions.generate.engine import TextRequest
from olm_train.extensions.generate.loaded import LoadedModel
from olm_train.extensions.generate.samples import SamplesCallback
from olm_train.extensions.generate.sampling import Sampling
from olm_train.extensions.generate.template import ChatTemplate

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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talker(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def loaded(saved: Path) -> LoadedModel:
    return LoadedModel.open(str(saved), "latest", print, device=torch.device("cpu"))


def new_chat(loaded: LoadedModel, notes: list[str], most: int = 6) -> Chat:
    return Chat(
        loaded, ChatTemplate(), Sampling(seed=4), system="S", max_new_tokens=most, note=notes.append
    )


def written(loaded: LoadedModel, prompt: str, seed: int, most: int = 6) -> str:
    asked = TextRequest(
        prompt=loaded.ids_of(prompt), sampling=Sampling(seed=seed), max_new_tokens=most,
        stop=("\nUser:",),
    )  # fmt: skip
    return loaded.engine().run([asked])[0].text


def test_an_answer_goes_on_from_all_that_was_said(loaded: LoadedModel) -> None:
    chat = new_chat(loaded, [])
    first = "".join(chat.answer("cat"))
    assert first == written(loaded, "S\n\nUser: cat\nAssistant:", 4)
    second = "".join(chat.answer("mat"))
    said = f"S\n\nUser: cat\nAssistant: {first.strip()}\nUser: mat\nAssistant:"
    assert second == written(loaded, said, 5)
    chat.forget()
    assert "".join(chat.answer("cat")) == written(loaded, "S\n\nUser: cat\nAssistant:", 6)


def test_what_was_heard_of_an_answer_counts_as_said(loaded: LoadedModel) -> None:
    chat = new_chat(loaded, [])
    answer = chat.answer("cat")
    heard = next(answer)
    answer.close()
    said = f"S\n\nUser: cat\nAssistant: {heard.strip()}\nUser: mat\nAssistant:"
    assert "".join(chat.answer("mat")) == written(loaded, said, 5)


def test_the_oldest_turns_go_where_there_is_no_room_and_it_is_told(loaded: LoadedModel) -> None:
    notes: list[str] = []
    chat = new_chat(loaded, notes)
    for _ in range(8):
        list(chat.answer("the cat"))
    assert notes[0] == (
        f"note: the oldest 2 turns are left out: the model looks at {POSITIONS} tokens"
    )
    with pytest.raises(UsageError, match=f"looks at {POSITIONS}"):
        list(chat.answer("the cat " * 50))
    assert "".join(chat.answer("a")) is not None


def test_the_command_answers_each_line(saved: Path, loaded: LoadedModel) -> None:
    words = [str(saved), "--seed", "4", "--temperature", "1", "--top-k", "0", "--system", "S"]
    words += ["--max-new-tokens", "6"]
    text = "cat\n\n/new\n/help\ncat\n/exit\nnever\n"
    result = CliRunner().invoke(chat, words, input=text)
    assert result.exit_code == 0, result.output
    prompt = "S\n\nUser: cat\nAssistant:"
    expected = [shown(written(loaded, prompt, seed)) for seed in (4, 5)]
    assert result.stdout == "".join(f"{each}\n" for each in expected)
    assert "there is no command /help: /new begins anew" in result.stderr


def test_a_template_is_read_and_a_long_line_ends_nothing(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    words = [str(saved), "--template", str(path), "--max-new-tokens", "2"]
    result = CliRunner().invoke(chat, words, input="the cat " * 80 + "\ncat\n")
    assert result.exit_code == 0, result.output
    assert "say it in fewer words" in result.stderr
    assert result.stdout.strip()
    assert CliRunner().invoke(chat, [*words[:2], str(tmp_path / "none")]).exit_code == 4


def test_a_model_of_transformers_answers_by_its_own_template(tmp_path: Path) -> None:
    folder = save_hf_talker(tmp_path / "talker")
    tokenizer = theirs(folder)[1]
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "cat"}]
    asked = {"add_generation_prompt": True, "return_dict": True}
    given = tokenizer.apply_chat_template(turns, **asked)["input_ids"]
    words = [str(folder), "--temperature", "0", "--system", "S", "--max-new-tokens", "9"]
    result = CliRunner().invoke(chat, words, input="cat\n")
    assert result.exit_code == 0, result.output
    expected = tokenizer.decode(greedy(folder, given, 9), clean_up_tokenization_spaces=False)
    assert result.stdout == f"{shown(expected)}\n"


@pytest.mark.slow
def test_on_a_terminal_it_asks_and_streams(saved: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "olm_train.cli", "chat", str(saved), "--max-new-tokens", "20"]
    try:
        with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave) as it:
            os.close(slave)
            seen = b""
            while b"> " not in seen:
                seen += os.read(master, 4096)
            os.write(master, b"\x1b[200~the\ncat\x1b[201~\n")  # pasted
            while seen.count(b"> ") < 2:
                seen += os.read(master, 4096)
            os.write(master, b"\x04")
            while not seen.endswith(b"\n"):
                seen += os.read(master, 4096)
            assert it.wait(600) == 0
    finally:
        os.close(master)
    assert b"/new begins anew" in seen
    assert seen.count(b"> ") == 2, "two lines that are pasted are one turn"


PROMPTS = ["the quick", "def f", "", "seven owls sleep", "a"]
END = ["--trainer.hard_stop={value: 3, unit: steps}"]
SPARSE = ["--trainer.callbacks.lm_evaluator.eval_interval=100"]


def texts(samples: StepSamples) -> list[str]:
    return [each.text for each in samples.texts]


def untimed(folder: Path) -> list[Any]:
    found = [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]
    return [{**each, "time": 0} for each in found]


@pytest.fixture(scope="module")
def sampled(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples") / "sampled"
    callback = SamplesCallback(
        prompts=PROMPTS, max_new_tokens=9, eval_interval=6, fixed_steps=[7], eval_on_startup=True,
        temperature=1.3, top_k=40, seed=5,
    )  # fmt: skip
    build_trainer(tiny_mixture, folder, *SPARSE, callbacks={"samples": callback}).fit()
    return folder


def test_texts_are_those_of_the_weights_of_each_step(sampled: Path) -> None:
    samples = read_samples(sampled)
    assert [each.step for each in samples] == [0, 6, 7, 12, 18, 24]
    assert samples[0].texts != samples[-1].texts
    for each in samples[1:]:
        assert [text.prompt for text in each.texts] == PROMPTS
        if each.step == 7:
            continue
        wish = Sampling(temperature=1.3, top_k=40, seed=5)
        step = str(each.step)
        again = generate(str(sampled), PROMPTS, checkpoint=step, max_new_tokens=9, sampling=wish)
        assert texts(each) == [sample.text for sample in again]


def test_each_option_has_its_effect(tiny_mixture: Path, sampled: Path, tmp_path: Path) -> None:
    other = SamplesCallback(
        prompts=PROMPTS[:2], max_new_tokens=1, temperature=0.0, eval_on_finish=True
    )
    build_trainer(tiny_mixture, tmp_path / "a", *SPARSE, *END, callbacks={"samples": other}).fit()
    (last,) = read_samples(tmp_path / "a")
    assert (last.step, last.temperature, len(last.texts)) == (3, 0.0, 2)
    longest = [max(map(len, texts(each))) for each in (last, read_samples(sampled)[-1])]
    assert longest[0] < longest[1]
    none = SamplesCallback(prompts=PROMPTS, eval_on_finish=False)
    build_trainer(tiny_mixture, tmp_path / "b", *SPARSE, *END, callbacks={"samples": none}).fit()
    assert read_samples(tmp_path / "b") == []


def test_a_prompt_that_is_too_long_is_refused_before_the_first_step(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    callback = SamplesCallback(prompts=["the quick " * 60])
    with pytest.raises(UsageError, match="looks at 32"):
        build_trainer(tiny_mixture, tmp_path, *SPARSE, callbacks={"samples": callback}).fit()
    with pytest.raises(OlmError):
        SamplesCallback(prompts=[])


class Stop(Callback):
    """Sends a signal before the texts of a step are written."""

    priority = 5

    def __init__(self, step: int) -> None:
        self.step = step

    def evaluate(self) -> None:
        if self.trainer.step == self.step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("step", [12, 24])
def test_a_run_that_is_stopped_writes_them_after_the_restart(
    tiny_mixture: Path, tmp_path: Path, sampled: Path, step: int
) -> None:
    def build(*more: Callback) -> Any:
        callback = SamplesCallback(
            prompts=PROMPTS, max_new_tokens=9, eval_interval=6, fixed_steps=[7],
            eval_on_startup=True, temperature=1.3, top_k=40, seed=5,
        )  # fmt: skip
        others = {f"other{n}": each for n, each in enumerate(more)}
        return build_trainer(
            tiny_mixture, tmp_path, *SPARSE, callbacks={"samples": callback, **others}
        )

    if step == 12:
        with pytest.raises(Preempted):
            build(Stop(step)).fit()
        assert [each.step for each in read_samples(tmp_path)] == [0, 6, 7]
    else:
        build(Stop(step)).fit()
    build().fit()
    assert untimed(tmp_path) == untimed(sampled)
    (tmp_path / SAMPLES).unlink()
    build().fit()  # it has ended: those of the last step are still to do
    assert untimed(tmp_path) == untimed(sampled)[-1:]


def sampled_on_ranks(lock: Path, folder: Path, *options: str) -> None:
    wish = {"prompts": PROMPTS, "max_new_tokens": 9, "eval_interval": 8, "temperature": 1.3}
    given = f"--trainer.callbacks.samples={json.dumps(wish)}"
    world = group_world() if dist.is_initialized() else None
    build_trainer(lock, folder, *SPARSE, given, *options, world=world).fit()


@pytest.mark.slow
def test_ranks_write_the_same_texts(tiny_mixture: Path, tmp_path: Path) -> None:
    sampled_on_ranks(tiny_mixture, tmp_path / "alone")
    expected = untimed(tmp_path / "alone")
    assert [each["step"] for each in expected] == [8, 16, 24]
    for name in ("fsdp", "ddp"):
        option = f"--train_module.dp_config.name={name}"
        run_ranks(sampled_on_ranks, 2, tiny_mixture, tmp_path / name, option)
        assert untimed(tmp_path / name) == expected, name
