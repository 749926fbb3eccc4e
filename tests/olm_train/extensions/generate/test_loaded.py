"""A model is loaded with all that makes its prompts and texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.hf_talker import save_hf_talker, theirs
from support.model_options import CONFIG, stirred
from support.small_tokenizer import train
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from olm_data.errors import InputError, UsageError, ValidationError
from olm_train.extensions.generate.loaded import LoadedModel, PromptIds
from olm_train.extensions.generate.template import Message


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loaded")
    model = stirred(
        CONFIG.changed(vocab_size=300, positions={"name": "learned", "max_positions": 20})
    )
    tokenizer = Tokenizer.from_file(str(train(folder / "tokenizer.json")))
    model.save(folder / "model", tokenizer)
    return folder / "model"


def test_a_saved_model_writes_up_to_its_positions(saved: Path) -> None:
    loaded = LoadedModel.open(str(saved), "latest", print, device=torch.device("cpu"))
    assert (loaded.rules.begins, loaded.rules.eos, loaded.context) == (None, 0, 20)
    engine = loaded.engine(2)
    from olm_train.extensions.generate.engine import TextRequest

    (text,) = engine.run([TextRequest(prompt=loaded.ids_of("abc"), max_new_tokens=50)])
    assert text.finish == "stop" or len(loaded.ids_of("abc")) + len(text.ids) == 20


def test_prompts_begin_as_documents_do(saved: Path) -> None:
    tokenizer = Tokenizer.from_file(str(saved / "tokenizer.json"))
    ids = tuple(tokenizer.encode("cat").ids)
    assert PromptIds(tokenizer, None, 0, 300, "here")("cat") == ids
    assert PromptIds(tokenizer, 5, 0, 300, "here")("cat") == (5, *ids)
    assert PromptIds(tokenizer, None, 0, 300, "here")("") == (0,)
    with pytest.raises(UsageError, match="no token"):
        PromptIds(tokenizer, None, None, 300, "here")("")
    with pytest.raises(ValidationError, match="knows only 3"):
        PromptIds(tokenizer, None, 0, 3, "here")("cat")


def test_a_prompt_that_the_tokenizer_cannot_encode_is_an_error_of_the_tokenizer() -> None:
    words = Tokenizer(WordLevel({"the": 0, "cat": 1}))  # and no token for other words
    words.pre_tokenizer = Whitespace()
    ids_of = PromptIds(words, None, 0, 2, "here")
    assert ids_of("the cat") == (0, 1)
    for asked in (ids_of, ids_of.plain):
        with pytest.raises(InputError, match="fails to encode this prompt"):
            asked("the dog")


@pytest.mark.parametrize("begin", [True, False])
def test_conversations_of_a_model_of_transformers_have_its_ids(tmp_path: Path, begin: bool) -> None:
    folder = save_hf_talker(tmp_path / "talker", begin=begin)
    loaded = LoadedModel.open(str(folder), "latest", print, device=torch.device("cpu"))
    tokenizer = theirs(folder)[1]
    assert list(loaded.ids_of("the cat")) == tokenizer("the cat")["input_ids"]
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0]['content'] }}")  # spells no token that begins it
    for path in (None, own):
        template = loaded.template(path)
        said = template.prompt([Message("user", "the cat")])
        expected = tokenizer.apply_chat_template(
            [{"role": "user", "content": "the cat"}],
            add_generation_prompt=True,
            return_dict=True,
            chat_template=None if path is None else path.read_text(),
        )["input_ids"]
        assert list(loaded.ids_of(said, whole=template.whole)) == expected
