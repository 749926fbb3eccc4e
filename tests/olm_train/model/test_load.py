"""Models saved and loaded."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from support.kill import killed_at_each_operation
from support.own_parts import ScaledConfig, ScaledDecoder
from tokenizers import Tokenizer

from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.model_folder import read_about
from olm_data.storage.store import Store
from olm_train.extensions.generate.command import main
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.model.load import load_saved
from olm_train.model.weights_folder import load_exported

SHAPE = {"vocab_size": 512, "vocab_multiple": 100, "d_model": 16, "n_layers": 2, "n_heads": 2}


def drawn(seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(DecoderConfig(**SHAPE), dtype=torch.float32)  # type: ignore[arg-type]
    init_parameters(model, seed)
    return model.to(dtype)


def own() -> ScaledDecoder:
    model = ScaledDecoder(ScaledConfig(**SHAPE, scale=2.0), dtype=torch.float32)  # type: ignore[arg-type]
    init_parameters(model, 0)
    model.gain.data.fill_(3)
    model.calls += 7
    return model


def loaded(folder: Path, **options: object) -> Decoder:
    found = load_saved(folder, **options)  # type: ignore[arg-type]
    assert isinstance(found, Decoder)
    return found


def changed(folder: Path, **changes: object) -> None:
    """Replace fields of what the folder says of itself."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def same(a: Decoder, b: Decoder) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_comes_back_bit_for_bit_with_its_shape_pads_and_dtype(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = drawn(dtype=dtype)
    about = model.save(tmp_path / "a")
    back = loaded(tmp_path / "a")
    assert same(model, back)
    assert (back.config, back.training) == (model.config, False)
    assert about.parameters == model.config.num_params  # without the pads
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_a_tokenizer_comes_back_with_it_whatever_it_was_given_as(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    read = Tokenizer.from_file(str(tiny_tokenizer))
    for number, given in enumerate([read, tiny_tokenizer, str(tiny_tokenizer.parent)]):
        drawn().save(tmp_path / str(number), tokenizer=given)
        found = load_saved(tmp_path / str(number))
        assert isinstance(found, tuple)
        assert found[1].encode("def f").ids == read.encode("def f").ids
    with pytest.raises(UsageError, match="int is no tokenizer"):
        drawn().save(tmp_path / "x", tokenizer=3)


def test_saving_again_replaces_all_of_it(tmp_path: Path, tiny_tokenizer: Path) -> None:
    for seed, tokenizer in ((1, None), (2, tiny_tokenizer), (3, None), (3, None)):
        drawn(seed).save(tmp_path, tokenizer)
        assert {path.name for path in tmp_path.iterdir()} == {
            "config.json",
            "model.safetensors",
            *(["tokenizer.json"] if tokenizer else []),
        }
    assert same(loaded(tmp_path), drawn(3))


def save_second(folder: Path) -> None:
    drawn(2).save(folder)


@pytest.mark.slow  # 17 s
def test_a_kill_at_any_operation_leaves_the_model_before_or_the_one_after(tmp_path: Path) -> None:
    first = tmp_path / "first"
    drawn(1).save(first)
    workplace = tmp_path / "kills"
    workplace.mkdir()
    copies = killed_at_each_operation(first, workplace, save_second)
    seen = []
    for folder in copies:
        back = loaded(folder)
        seen.append(next(seed for seed in (1, 2) if same(back, drawn(seed))))
        drawn(4).save(folder)  # and it can be saved into again, with nothing left
        assert len(list(folder.iterdir())) == 2
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1, 2)
    assert len(seen) > 8


def test_classes_of_ones_own_come_back_where_they_are_named_or_trusted(tmp_path: Path) -> None:
    model = own()
    model.save(tmp_path / "m")
    for options in ({"classes": [ScaledDecoder, ScaledConfig]}, {"trust": True}):
        back = loaded(tmp_path / "m", **options)
        assert type(back) is ScaledDecoder
        assert same(model, back)
        assert isinstance(back.config, ScaledConfig)
        assert back.config.scale == 2.0
    for options in ({}, {"classes": [ScaledDecoder]}):
        with pytest.raises(InputError, match=r"support\.own_parts:Scaled"):
            loaded(tmp_path / "m", **options)


def test_a_class_is_not_imported_unasked_nor_ever_from_the_folder_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    drawn().save(folder)
    (folder / "evil_part.py").write_text("open('ran', 'w')\nclass Evil: ...\n")
    changed(folder, model_class="evil_part:Evil")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(InputError, match="not part of this program"):
        load_saved(folder)
    with pytest.raises(UsageError, match="lies in the folder of the model"):
        load_saved(folder, trust=True)
    assert not (folder / "ran").exists()
    assert "evil_part" not in sys.modules


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_class": "no_such_lab.parts:X"}, "no module no_such_lab"),
        ({"model_class": "support.own_parts:ScaledDecodr"}, "did you mean 'ScaledDecoder'"),
        ({"model_class": "support.own_parts:ScaledConfig"}, "not a subclass of Decoder"),
        ({"model_class": "os.system('x')"}, "no import path"),
    ],
)
def test_a_class_that_is_not_there_is_named(
    tmp_path: Path, change: dict[str, str], says: str
) -> None:
    drawn().save(tmp_path)
    changed(tmp_path, **change)
    with pytest.raises(UsageError) as raised:
        load_saved(tmp_path, trust=True)
    assert says in str(raised.value)


def test_a_shape_larger_than_its_weights_and_a_folder_without_any_are_refused(
    tmp_path: Path,
) -> None:
    drawn().save(tmp_path / "m")
    shape = json.loads((tmp_path / "m/config.json").read_text())["model"]
    for field, value in (("n_layers", 8000), ("vocab_multiple", 1 << 16), ("d_model", 8)):
        wide = {"d_model": 1 << 18} if field == "vocab_multiple" else {}
        changed(tmp_path / "m", model=shape | {field: value} | wide)
        with pytest.raises(ValidationError):
            load_saved(tmp_path / "m")
    with pytest.raises(InputError, match="no exported weights"):
        load_saved(tmp_path / "none")


def test_weights_that_are_not_there_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="whole weights"):
        Decoder(DecoderConfig(**SHAPE), device="meta").save(tmp_path / "m")  # type: ignore[arg-type]


def test_generate_takes_a_saved_model_and_its_class_with_trust(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    drawn().save(tmp_path / "plain", tiny_tokenizer)
    own().save(tmp_path / "own", tiny_tokenizer)
    few = ["--prompt", "def ", "--max-new-tokens", "3"]
    plain = CliRunner().invoke(main, [str(tmp_path / "plain"), *few])
    assert (plain.exit_code, plain.output[:4]) == (0, "def ")
    refused = CliRunner().invoke(main, [str(tmp_path / "own"), *few])
    assert (refused.exit_code, "--trust" in refused.output) == (4, True)
    assert CliRunner().invoke(main, [str(tmp_path / "own"), *few, "--trust"]).exit_code == 0
    drawn().save(tmp_path / "none")
    without = CliRunner().invoke(main, [str(tmp_path / "none"), *few])
    assert (without.exit_code, "no tokenizer" in without.output) == (4, True)
    shutil.rmtree(tmp_path / "none")


CONFIG = DecoderConfig(vocab_size=10, vocab_multiple=16, d_model=4, n_layers=1, n_heads=1)


def test_the_folder_is_safetensors_and_json(tmp_path: Path) -> None:
    model = Decoder(CONFIG, dtype=torch.float32)
    init_parameters(model, 0)
    model.save(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    data = (tmp_path / "model.safetensors").read_bytes()
    assert about["weights"] == {
        "file": "model.safetensors",
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    assert (about["format"], about["version"], about["carried"]) == ("olm-model", 3, [])
    assert about["model_class"] == "olm_train.model.decoder:Decoder"
    assert about["config_class"] == "olm_train.model.config:DecoderConfig"
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == dict(model.named_parameters()).keys()
        assert torch.equal(file.get_tensor("embeddings.weight"), model.embeddings.weight[:10])


def test_folders_of_earlier_versions_are_read(tmp_path: Path) -> None:
    Decoder(CONFIG, dtype=torch.float32).save(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    old = {k: v for k, v in about.items() if not k.endswith("_class")}
    old |= {"version": 2, "step": 7, "lock_digest": "a" * 64}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_about(Store(str(tmp_path))).step == 7
    assert load_exported(str(tmp_path)).about.model_class == "olm_train.model.decoder:Decoder"
