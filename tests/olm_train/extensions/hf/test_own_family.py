"""A family that a package brings, as the page on own parts has it: loaded, trained, exported."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from support.hf_models import hf_model
from support.installed import install_block
from support.pages import REPOSITORY, read_page
from support.runs import build_trainer

from olm_data.errors import InputError, UsageError
from olm_data.mixture.lock import Lock
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.distributed.world import World
from olm_train.extensions.hf.model_format import load_model
from olm_train.extensions.hf.table import families, family_of_config, family_of_hf
from olm_train.extensions.hf_export.command import main
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder

pytestmark = pytest.mark.xdist_group("transformers")

PAGE = "docs/how-to/use-your-own-parts.md"
SHAPE = DecoderConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=2, head={"softcap": 3.0})
NOT_OF_THE_MODEL = {
    "transformers_version", "dtype", "pretraining_tp",
    "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip
"""Fields of a config.json that follow from program, options and tokenizer."""


@pytest.fixture
def capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of the page, installed for this process."""
    folder = tmp_path / "installed"
    folder.mkdir()
    (block,) = [b for b in read_page(PAGE, REPOSITORY / PAGE).blocks if "CAPPED =" in b.text]
    module = install_block(block.text, folder)
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop(module, None)


@pytest.fixture
def foreign(tiny_mixture: Path, tiny_tokenizer: Path, tmp_path: Path) -> Path:
    """A folder of that family: a Llama that transformers wrote, and the cap."""
    folder, ids = tmp_path / "theirs", Lock.read(str(tiny_mixture)).tokenizer.vocab_size
    hf_model("llama", vocab_size=ids).save_pretrained(folder)
    shutil.copy(tiny_tokenizer, folder / "tokenizer.json")
    fields = json.loads((folder / "config.json").read_text())
    own = {"model_type": "capped", "architectures": ["CappedForCausalLM"], "logit_cap": 3.0}
    (folder / "config.json").write_text(json.dumps(fields | own))
    return folder


@torch.no_grad()
def test_it_is_loaded_with_equal_logits_and_exported_with_equal_fields(
    capped: None, foreign: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    vocabulary = Lock.read(str(tiny_mixture)).tokenizer.vocab_size
    ids = torch.randint(vocabulary, (2, 40))
    plain = hf_model("llama", vocab_size=vocabulary)(ids).logits
    torch.testing.assert_close(
        model_at(foreign)(ids), 3.0 * torch.tanh(plain / 3.0), atol=1e-5, rtol=1e-5
    )

    run, out = tmp_path / "run", tmp_path / "out"
    with torch.enable_grad():
        build_trainer(
            tiny_mixture, run, "--model=null", f"--trainer.load_path={foreign}",
            "--trainer.load_trainer_state=false", "--trainer.load_optim_state=false",
            "--trainer.hard_stop={value: 1, unit: steps}",
            "--trainer.callbacks.lm_evaluator.enabled=false",
        ).fit()  # fmt: skip
    said = export(run, out)
    assert said.exit_code == 0, said.output
    assert "CappedForCausalLM" in said.output
    assert "transformers has no class for a capped" in said.output
    before, after = (json.loads((f / "config.json").read_text()) for f in (foreign, out))
    assert after["logit_cap"] == 3.0
    of_model = {name: value for name, value in before.items() if name not in NOT_OF_THE_MODEL}
    assert json.dumps({name: after.get(name) for name in of_model}) == json.dumps(of_model)
    trained = evaluation_model(open_checkpoint(run / "step00000001", World()))
    assert torch.equal(model_at(out)(ids), trained(ids))
    refused = export(run, tmp_path / "again", "--verify", "transformers")
    assert refused.exit_code == 2
    assert "transformers has no class for a capped" in refused.output


def model_at(place: Path) -> Decoder:
    found = load_model(place)
    assert isinstance(found, tuple)
    return found[0]


def export(run: Path, out: Path, *more: str) -> Result:
    options = ["--to", "hf", "--dtype", "float32", "--context", "64", "--output"]
    return CliRunner().invoke(main, [str(run), *options, str(out), *more])


def test_errors_name_it_and_ours_come_first(capped: None) -> None:
    assert [family.name for family in families()][-1] == "capped"
    assert family_of_config(SHAPE).name == "capped"
    assert family_of_config(SHAPE.changed(head={"softcap": None})).name == "llama"
    with pytest.raises(InputError, match="did you mean 'capped'"):
        family_of_hf({"model_type": "caped"})
    with pytest.raises(UsageError, match="\n    capped: feed_forward is geglu"):
        family_of_config(SHAPE.changed(feed_forward="geglu"))


def test_without_its_package_it_is_of_no_family() -> None:
    with pytest.raises(InputError, match="the model_type capped is not one"):
        family_of_hf({"model_type": "capped"})
    with pytest.raises(UsageError, match="no model of transformers"):
        family_of_config(SHAPE)
