"""Shapes: what is refused, named ones, and the flat form of earlier ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.model_options import CONFIG, EXPERTS, GPT2, OPTIONS, PADDED
from support.runs import build_trainer, config_values, write_config
from support.seal import seal

from olm_data.config.convert import as_dict, parse
from olm_data.config.values import Values
from olm_data.errors import UsageError, ValidationError
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.flat_form import FLAT, from_flat, refuse_flat
from olm_train.model.load import load_saved, parse_model
from olm_train.model.part import Params
from olm_train.model.presets import PARTS, PRESETS, depth_fields, preset, preset_fields
from olm_train.model.rope import PositionInterpolation
from olm_train.run.command import main, print_config

WINDOWED = {"attention": {"sliding_window": (4,)}}
TABLES = ("embeddings.weight", "lm_head.weight")


@pytest.mark.parametrize("change", [*OPTIONS, *PADDED, *EXPERTS], ids=str)
def test_stated_parameter_counts_are_the_models(change: dict[str, Any]) -> None:
    config = CONFIG.changed(**change)
    model = Decoder(config, device="meta")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    tables = {name: size for name, size in sizes.items() if name.endswith(TABLES)}
    assert sum(sizes.values()) - sum(tables.values()) == config.num_non_embedding_params
    vocabulary = [name for name in tables if name != "position_embeddings.weight"]
    pads = (config.padded_vocab_size - 50) * config.d_model * len(vocabulary)
    assert sum(sizes.values()) - pads == config.num_params
    matrices = [p.numel() for p in model.blocks.parameters() if p.ndim > 1]
    assert sum(matrices) == Params.of(model.blocks).matrices


def with_learned(**positions: Any) -> dict[str, Any]:
    return GPT2 | {"positions": GPT2["positions"] | positions}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"n_heads": 5}, "n_heads"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"n_layers": 0}, "n_layers"),
        ({"attention": {"backend": "varlan"}}, "did you mean 'varlen'"),
        ({"block": "prenorm"}, "pre_norm"),
        ({"attention": {"qk_norm": True}}, "qk_norm"),
        ({"attention": {"shift_keys": True}, "head_dim": 2}, "shift_keys"),
        ({"feed_forward": "swiglue"}, "swiglu"),
        ({"norm": {"bias": True}}, "norm.bias"),
        ({"norm": {"eps": 0.0}}, "norm.eps"),
        ({"vocab_multiple": 0}, "vocab_multiple"),
        ({"attention": {"sliding_window": ()}}, "sliding_window"),
        ({"attention": {"sliding_window": (4, 0)}}, "sliding_window"),
        ({"positions": "learned"}, "max_positions"),
        ({"positions": {"max_positions": 64}}, "max_positions"),
        (with_learned(no_rope_layer_interval=4), "no_rope_layer_interval"),
        (with_learned(scaling=PositionInterpolation(factor=2)), "positions.scaling"),
        (with_learned(theta_windowed=9.0) | WINDOWED, "theta_windowed"),
        ({"positions": {"scaling_windowed": False}}, "scaling_windowed"),
        ({"positions": {"theta": 1.0}}, "theta"),
        ({"positions": {"theta_windowed": 100.0}}, "theta_windowed"),
        ({"positions": {"theta_windowed": 1.0}} | WINDOWED, "theta_windowed"),
        ({"norm": {"name": "layer_norm", "zero_centred": True}}, "norm.zero_centred"),
        ({"attention": {"softcap": 0.0}}, "attention.softcap"),
        ({"attention": {"query_pre_attn_scalar": 0.0}}, "query_pre_attn_scalar"),
        ({"head": {"softcap": -1.0}}, "head.softcap"),
    ],
)
def test_impossible_shapes_are_refused_by_name(change: dict[str, Any], where: str) -> None:
    with pytest.raises(UsageError) as refusal:
        CONFIG.changed(**change)
    assert where in str(refusal.value)


OURS = [name for name, known in PRESETS.items() if known.parameters is None]
PUBLISHED = [name for name in PRESETS if name not in OURS]


@pytest.mark.parametrize("name", OURS)
def test_a_presets_name_lies_between_its_sizes(name: str) -> None:
    config = preset(name, vocab_size=50_304, head={"tied": True})
    number, unit = name.rpartition("-")[2][:-1], name[-1]
    nominal = float(number) * {"m": 1e6, "b": 1e9}[unit]
    assert 0.9 * config.num_non_embedding_params <= nominal <= 1.1 * config.num_params


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_the_published_number_of_parameters(name: str) -> None:
    known = PRESETS[name]
    config = preset(name, vocab_size=known.vocab_size)
    assert config.num_params == known.parameters
    built = sum(p.numel() for p in Decoder(config, device="meta").parameters())
    assert built == known.parameters
    assert known.source.startswith("huggingface.co/")


@pytest.mark.parametrize("name", PRESETS)
def test_plain_fields_and_the_config_say_the_same(name: str) -> None:
    plain = {**preset_fields(name), "vocab_size": 1024}
    assert parse(DecoderConfig, Values(plain)) == preset(name, vocab_size=1024)


def test_any_field_can_be_overridden() -> None:
    config = preset("olm-1m", vocab_size=1000, n_layers=2, attention={"qk_norm": "head"})
    assert (config.vocab_size, config.n_layers, config.attention.qk_norm) == (1000, 2, "head")
    assert config.d_model == PRESETS["olm-1m"].fields["d_model"]


def test_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="olm-1m"):
        preset("olm-1mm", vocab_size=1000)


def test_parameters_grow_with_depth() -> None:
    sizes = [
        DecoderConfig(**depth_fields(depth), vocab_size=512).num_non_embedding_params
        for depth in range(1, 33)
    ]
    assert sizes == sorted(set(sizes))


RECORDED = json.loads(Path(__file__).with_name("flat_shapes.json").read_bytes())
"""What the last release with the flat form recorded of each of the options, in their order."""
BASE: dict[str, Any] = RECORDED["base"]
TINY = BASE | {
    "vocab_size": 512, "d_model": 16, "n_heads": 2, "n_kv_heads": None, "hidden_size": 32,
    "qk_norm": None, "attention": "sdpa",
}  # fmt: skip
"""Of the run that `support.runs` makes."""


@pytest.mark.parametrize(
    ("old", "change"),
    [*zip([{}, *RECORDED["options"]], [{}, *OPTIONS, *PADDED], strict=True)],
    ids=str,
)
def test_a_recorded_shape_is_what_it_was(old: dict[str, Any], change: dict[str, Any]) -> None:
    config = CONFIG.changed(**change)
    assert parse_model({"model": BASE | old}, "config.json") == config
    new = as_dict(config)
    assert from_flat(new) is new


def test_every_field_has_its_place_and_its_case() -> None:
    fields = {name for each in RECORDED["options"] for name in each}
    assert {*FLAT, "bias"} - fields == {"attention"}
    assert {*FLAT, "bias"} == BASE.keys() - as_dict(CONFIG).keys() | {*PARTS} - {"head"}


def test_the_shape_of_another_module_is_left_alone() -> None:
    other = {"d_model": 8, "n_layers": 2, "n_heads": 2, "hidden_size": 9, "norm": "own"}
    assert from_flat(other) is other


def test_what_had_no_effect_is_left_out() -> None:
    old = BASE | {"positions": "learned", "max_positions": 9, "rope_theta": 5.0}
    old |= {"norm": "layer_norm", "norm_zero_centred": False}
    config = parse_model({"model": old}, "config.json")
    assert as_dict(config.positions) == {"name": "learned", "max_positions": 9}
    assert as_dict(config.norm) == {"name": "layer_norm", "eps": 1e-6, "bias": False}


@pytest.mark.parametrize(
    "wrong", [{"bias": "some"}, {"bias": []}, {"norm": []}, {"norm_eps": "x"}, {"attention": 3}]
)
def test_a_damaged_record_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="does not know the model"):
        parse_model({"model": BASE | wrong}, "config.json")


def test_a_run_goes_on_from_a_checkpoint_with_the_flat_form(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = ("--trainer.callbacks.lm_evaluator.enabled=false",)
    stop = "--trainer.hard_stop={{value: {}, unit: steps}}"
    run = tmp_path / "run"
    build_trainer(tiny_mixture, run, *quiet, stop.format(2)).fit()
    for folder in (run, run / "step00000002"):
        config = json.loads((folder / "config.json").read_bytes())
        assert parse_model({"model": TINY}, "") == parse_model(config, "")
        (folder / "config.json").write_text(json.dumps(config | {"model": TINY}))
    seal(run / "step00000002")
    shutil.copytree(run, tmp_path / "other")
    file = write_config(tmp_path / "train.yaml", tiny_mixture, run)
    assert print_config([str(file), f"--diff={run}", *quiet, stop.format(2)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    trainer = build_trainer(tiny_mixture, run, *quiet, stop.format(4))
    trainer.fit()
    assert trainer.resumed
    started = (run / "starts.jsonl").read_text().splitlines()[-1]
    assert json.loads(started)["changes"] == ["trainer.hard_stop.value: 2 -> 4"]
    with pytest.raises(ValidationError, match=r"model\.norm\.eps: 1e-06 -> 0\.1"):
        build_trainer(tiny_mixture, tmp_path / "other", *quiet, "--model.norm.eps=0.1").fit()


def test_saved_weights_with_the_flat_form_are_read(tmp_path: Path) -> None:
    config = parse_model({"model": TINY}, "")
    model = Decoder(config)
    model.save(tmp_path)
    about = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(about | {"model": TINY}))
    found = load_saved(tmp_path)
    assert isinstance(found, Decoder)
    assert found.config == config


@pytest.mark.parametrize("name", [*FLAT, "bias"])
def test_a_configuration_that_somebody_wrote_is_told_the_new_place(name: str) -> None:
    values = Values({"model": {"d_model": 8, name: "sdpa" if name == "attention" else 3}})
    if name in PARTS and name != "attention":
        refuse_flat(values)  # a kind of part may stand by its name
        return
    with pytest.raises(UsageError, match=rf"^model\.{name} is now model\.\w+\.\w+"):
        refuse_flat(values)


def test_all_are_named_at_once_with_file_and_line(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = config_values(tiny_mixture, tmp_path / "run")
    file = tmp_path / "train.yaml"
    values["model"] = {"d_model": 16, "n_layers": 1, "n_heads": 2, "norm_eps": 1e-5}
    file.write_text(json.dumps(values, indent=1))
    assert main([str(file), "--dry-run", "--model.tie_embeddings=true", "--model.bias=all"]) == 2
    said = capsys.readouterr().err
    assert "model.norm_eps is now model.norm.eps" in said
    assert "model.tie_embeddings is now model.head.tied" in said
    assert "model.bias is now model.attention.bias and model.feed_forward.bias" in said
    assert f"{file}:" in said
