"""Weights of transformers in our parameters; runs that begin with them: checkpoint tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf_models import MODELS, hf_model
from torch import Tensor

from olm_data.errors import InputError, UsageError, ValidationError
from olm_train.extensions.hf.load import fill, open_model
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder, build_decoder


def saved(folder: Path, name: str = "llama") -> Path:
    hf_model(name).save_pretrained(folder)
    return folder


def filled(folder: Path, **changes: int) -> tuple[Decoder, list[str]]:
    opened = open_model(str(folder))
    config = DecoderConfig(**{**vars(opened.config), **changes})
    model = build_decoder(config)
    said, _ = fill(opened, dict(model.named_parameters()), config)
    return model, said


def change(folder: Path, **tensors: Tensor | None) -> None:
    path = folder / "model.safetensors"
    kept = {
        **load_file(path),
        **{name.replace("__", "."): value for name, value in tensors.items()},
    }
    save_file({n: v for n, v in kept.items() if v is not None}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", sorted(MODELS))
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = hf_model(name)
    theirs.save_pretrained(tmp_path)
    ours, _ = filled(tmp_path)
    ids = torch.randint(0, 61, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_tied_head_that_is_stored_once_more_must_be_the_table(tmp_path: Path) -> None:
    saved(tmp_path, "llama tied, one kv head")
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, lm_head__weight=table.clone())
    assert any("lm_head.weight" in line for line in filled(tmp_path)[1])
    other = table.clone()
    other[-1, -1] += 1
    for head in (other, table[:-1]):
        change(tmp_path, lm_head__weight=head.clone())
        with pytest.raises(ValidationError, match=r"lm_head\.weight is not model\.embed_tokens"):
            filled(tmp_path)


def test_a_tensor_too_many_and_one_too_few_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    change(tmp_path, model__extra__weight=torch.zeros(3))
    with pytest.raises(InputError, match=r"of no parameter \(model\.extra\.weight"):
        filled(tmp_path)
    change(tmp_path, model__extra__weight=None, model__norm__weight=None)
    with pytest.raises(InputError, match=r"missing \(model\.norm\.weight"):
        filled(tmp_path)


def test_tensors_that_follow_from_others_are_counted_and_said(tmp_path: Path) -> None:
    saved(tmp_path)
    change(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
    _, said = filled(tmp_path)
    assert said[0].startswith("1 tensors are not needed, as they follow from the others: model.")


@pytest.mark.parametrize("shape", [(31,), (33,), (32, 1)])
def test_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    saved(tmp_path)
    change(tmp_path, model__norm__weight=torch.zeros(shape))
    with pytest.raises(ValidationError, match=r"model\.norm\.weight is \[3"):
        filled(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    change(tmp_path, model__norm__weight=torch.zeros(32, dtype=torch.int8))
    with pytest.raises(InputError, match="I8, which are quantised"):
        filled(tmp_path)


def test_padding_of_the_vocabulary_is_zeros_and_new_rows_are_the_mean(tmp_path: Path) -> None:
    saved(tmp_path)
    model, said = filled(tmp_path, vocab_size=70, vocab_multiple=16)
    table = model.embeddings.weight.detach()
    assert table.shape[0] == 80
    torch.testing.assert_close(table[61:70], table[:61].mean(0).expand(9, -1))
    assert not table[70:].any()
    assert "9 new ids, 61 to 69: their rows begin as the mean of the old ones" in said


def test_the_vocabulary_is_kept_or_extended(tmp_path: Path) -> None:
    opened = open_model(str(saved(tmp_path)))
    assert opened.vocabulary_size(50, "keep") == 61
    assert opened.vocabulary_size(50, "extend") == 61
    assert opened.vocabulary_size(65, "extend") == 65
    with pytest.raises(UsageError, match="the data has 65 ids, and the model knows 61"):
        opened.vocabulary_size(65, "keep")
