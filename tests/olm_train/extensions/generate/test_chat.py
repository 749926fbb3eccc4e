"""`olm-train chat`: an answer for each line, as it is written; what no longer fits is told."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.hf_talker import greedy, save_hf_talker, theirs
from support.talking import POSITIONS, save_talker

from olm_data.errors import UsageError, shown
from olm_train.extensions.generate.chat import Chat, main
from olm_train.extensions.generate.engine import TextRequest
from olm_train.extensions.generate.loaded import LoadedModel
from olm_train.extensions.generate.sampling import Sampling
from olm_train.extensions.generate.template import ChatTemplate


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
    result = CliRunner().invoke(main, words, input=text)
    assert result.exit_code == 0, result.output
    prompt = "S\n\nUser: cat\nAssistant:"
    expected = [shown(written(loaded, prompt, seed)) for seed in (4, 5)]
    assert result.stdout == "".join(f"{each}\n" for each in expected)
    assert "there is no command /help: /new begins anew" in result.stderr


def test_a_template_is_read_and_a_long_line_ends_nothing(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    words = [str(saved), "--template", str(path), "--max-new-tokens", "2"]
    result = CliRunner().invoke(main, words, input="the cat " * 80 + "\ncat\n")
    assert result.exit_code == 0, result.output
    assert "say it in fewer words" in result.stderr
    assert result.stdout.strip()
    assert CliRunner().invoke(main, [*words[:2], str(tmp_path / "none")]).exit_code == 4


def test_a_model_of_transformers_answers_by_its_own_template(tmp_path: Path) -> None:
    folder = save_hf_talker(tmp_path / "talker")
    tokenizer = theirs(folder)[1]
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "cat"}]
    asked = {"add_generation_prompt": True, "return_dict": True}
    given = tokenizer.apply_chat_template(turns, **asked)["input_ids"]
    words = [str(folder), "--temperature", "0", "--system", "S", "--max-new-tokens", "9"]
    result = CliRunner().invoke(main, words, input="cat\n")
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
