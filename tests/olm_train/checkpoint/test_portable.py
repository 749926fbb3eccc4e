"""A model is opened by the place and name it is given; one of a run needs its lock."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest
import torch
from support.hf_models import hf_model
from support.runs import build_trainer
from support.seal import seal

from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.storage.store import Store
from olm_train.checkpoint.portable import open_portable


def quiet(error: object) -> None:
    raise AssertionError(error)


@pytest.fixture(scope="module")
def run(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("portable") / "run"
    build_trainer(
        tiny_mixture, folder, "--trainer.callbacks.checkpointer.save_interval=1", quiet=True, stop=2
    ).fit()
    return folder


@pytest.mark.parametrize(
    ("place", "name", "step"),
    [("", "latest", 2), ("", "1", 1), ("", "step00000001", 1), ("step00000001", "latest", 1)],
)
def test_a_step_a_name_or_the_newest(run: Path, place: str, name: str, step: int) -> None:
    found = open_portable(run / place, name, quiet)
    assert (found.step, found.name) == (step, f"step{step:08d}")
    assert found.model().config.vocab_size >= found.recorded_lock.tokenizer.vocab_size


@pytest.mark.parametrize("name", ["7", "step00000007", "newest"])
def test_a_name_without_a_checkpoint_is_refused(run: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"no checkpoint {name}"):
        open_portable(run, name, quiet)


def test_a_damaged_newer_one_is_told_and_passed_over(run: Path, tmp_path: Path) -> None:
    copy, told = shutil.copytree(run, tmp_path / "run"), list[str]()
    (copy / "step00000002/config.json").write_text("{}")
    assert open_portable(copy, "latest", lambda error: told.append(error.what)).step == 1
    assert ["step00000002 is damaged" in what for what in told] == [True]
    with pytest.raises(ValidationError, match=r"config\.json has 2 bytes instead of"):
        open_portable(copy, "2", quiet)


def test_a_checkpoint_without_a_lock_or_a_tokenizer_says_so(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run / "step00000002", tmp_path / "step00000002")
    (folder / "tokenizer.json").unlink()
    seal(folder)
    with pytest.raises(InputError, match="no tokenizer with this model"):
        open_portable(folder, "latest", quiet).tokenizer()
    (folder / "mixture.lock.json").unlink()
    seal(folder)
    with pytest.raises(InputError, match=r"no mixture\.lock\.json with this model"):
        open_portable(folder, "latest", quiet)


@torch.no_grad()
def test_a_model_of_transformers_in_a_folder_or_a_bucket(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    hf_model("llama").bfloat16().save_pretrained(tmp_path / "llama")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    bucket = Store(f"memory://{uuid.uuid4().hex}/llama")
    for path in (tmp_path / "llama").iterdir():
        bucket.put(path.name, path.read_bytes())
    ids = torch.randint(0, 61, (1, 30), generator=torch.Generator().manual_seed(1))
    for place in (tmp_path / "llama", bucket.root):
        found = open_portable(place, "latest", quiet)
        assert (found.name, found.step, found.recorded_lock) == ("llama", None, None)
        model = found.model()
        assert {each.dtype for each in model.parameters()} == {torch.float32}
        torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
        with pytest.raises(UsageError, match="no checkpoint 7: this is not a run"):
            open_portable(place, "7", quiet)


def test_a_model_that_the_decoder_cannot_be_is_refused_by_its_field(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path / "llama")
    path = tmp_path / "llama/config.json"
    path.write_text(path.read_text().replace('"hidden_act": "silu"', '"hidden_act": "relu"'))
    with pytest.raises(InputError, match="hidden_act is relu"):
        open_portable(tmp_path / "llama", "latest", quiet)
