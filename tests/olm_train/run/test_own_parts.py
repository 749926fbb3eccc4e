"""Parts of one's own: named in train.yaml, checked as ours are, recorded, and never run unasked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.installed import install
from support.own_parts import (
    CountingCallback,
    KeyedCallback,
    PlainSGDConfig,
    ScaledConfig,
    ScaledDecoder,
    SpikyLoss,
    Squared,
    SquaredReLU,
    StairsConfig,
    assert_trusted_alone,
)
from support.runs import config_values

from olm_data.config.convert import parse
from olm_data.config.schema import check_names
from olm_data.config.values import Values
from olm_data.errors import InputError, UsageError
from olm_train.distributed.world import World
from olm_train.estimate.flops import num_flops_per_token
from olm_train.estimate.memory import block_bytes
from olm_train.extensions.hf.table import family_of_config
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.model.load import load_saved
from olm_train.run.command import SCHEMA
from olm_train.run.config import RunConfig, config_diff
from olm_train.trainer import Trainer

OWN = "support.own_parts:"


def write(mixture: Path, folder: Path, **changes: Any) -> Path:
    """A train.yaml with a part of one's own in each place that takes one."""
    values = config_values(mixture, folder / "run")
    values["model"] = {"name": OWN + "ScaledConfig", "scale": 0.5} | values["model"]
    values["train_module"] |= {
        "optim": {"name": OWN + "PlainSGDConfig", "lr": 0.1},
        "scheduler": {"name": OWN + "StairsConfig", "every": 2},
        "loss": {"name": OWN + "SpikyLoss", "factor": 2.0},
    }
    values["trainer"]["callbacks"] = {"counting": {"name": OWN + "CountingCallback", "by": 3}}
    for path, value in changes.items():
        *sections, name = path.split("__")
        place = values
        for section in sections:
            place = place[section]
        place[name] = value
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def read(file: Path, *options: str) -> RunConfig:
    values = Values.read(file)
    values.override_all(options)
    check_names(json.loads(SCHEMA.read_bytes()), values)
    return RunConfig.resolve(values)


def train(file: Path, steps: int) -> Trainer:
    stop = f"--trainer.hard_stop={{value: {steps}, unit: steps}}"
    trainer = read(file, stop).build(World())
    trainer.fit()
    return trainer


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/CE loss"] for line in lines if "train/CE loss" in line]


def test_each_part_is_made_of_its_own_class_and_fields(tiny_mixture: Path, tmp_path: Path) -> None:
    config = read(write(tiny_mixture, tmp_path))
    assert isinstance(config.model, ScaledConfig)
    assert config.model.scale == 0.5
    assert config.train_module.optim == PlainSGDConfig(lr=0.1)  # type: ignore[comparison-overlap]
    assert config.train_module.scheduler == StairsConfig(every=2)  # type: ignore[comparison-overlap]
    assert config.train_module.loss == SpikyLoss(factor=2.0)  # type: ignore[comparison-overlap]
    assert config.trainer.callbacks.own == {"counting": CountingCallback(by=3)}


def test_a_resume_goes_on_with_the_same_parts_to_the_same_bits(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, cut = write(tiny_mixture, tmp_path / "a"), write(tiny_mixture, tmp_path / "b")
    assert isinstance(train(whole, 4).train_module.model, ScaledDecoder)
    train(cut, 2)
    trainer = train(cut, 4)
    assert trainer.resumed
    assert trainer.callbacks["counting"].count == 4 * 3  # type: ignore[attr-defined]
    assert losses(tmp_path / "a/run") == losses(tmp_path / "b/run")
    saved = json.loads((tmp_path / "b/run/config.json").read_text())
    assert saved["model"]["name"] == OWN + "ScaledConfig"
    assert saved["train_module"]["loss"] == {"name": OWN + "SpikyLoss", "factor": 2.0}
    assert saved["train_module"]["optim"]["name"] == OWN + "PlainSGDConfig"
    assert saved["trainer"]["callbacks"]["counting"]["name"] == OWN + "CountingCallback"
    assert_trusted_alone(tmp_path / "b/run", tmp_path / "e")
    found = load_saved(tmp_path / "e", classes=[ScaledDecoder, ScaledConfig])
    assert isinstance(found, tuple)
    assert isinstance(found[0], ScaledDecoder)


def three_losses(mixture: Path, folder: Path, **changes: Any) -> list[float]:
    folder.mkdir()
    train(write(mixture, folder, train_module__max_grad_norm=None, **changes), 3)
    return losses(folder / "run")


def test_each_part_has_its_effect(tiny_mixture: Path, tmp_path: Path) -> None:
    plain = three_losses(tiny_mixture, tmp_path / "plain")
    changes: dict[str, Any] = {
        "train_module__loss": {"name": "auto"},
        "model__scale": 1.0,
        "train_module__scheduler": {"name": "constant"},
        "train_module__optim": {"name": "adamw", "lr": 0.1},
    }
    for part, change in changes.items():
        assert three_losses(tiny_mixture, tmp_path / part, **{part: change}) != plain, part


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train_module__loss__factr": 1}, "unknown field train_module.loss.factr"),
        ({"train_module__loss__factor": -1}, "train_module.loss.factor is above 0"),
        ({"train_module__scheduler": {"name": OWN + "StairsConfig"}}, "scheduler.every is missing"),
        ({"train_module__loss__name": OWN + "StairsConfig"}, "not a subclass of OwnLoss"),
        ({"train_module__loss__name": OWN + "SpikyLos"}, "did you mean 'SpikyLoss'"),
        ({"train_module__loss__name": "no_such_lab:X"}, "no module no_such_lab"),
        ({"trainer__callbacks__counting__by": 0}, "counting.by is at least 1"),
        (
            {"trainer__callbacks__counting__name": OWN + "NoDataclass"},
            "with @dataclass(kw_only=True)",
        ),
        ({"trainer__callbacks__counting__name": "countng"}, "no kind called"),
        ({"trainer__callbacks__speed_monitr": {}}, "did you mean 'speed_monitor'"),
        ({"trainer__callbacks__own": {}}, "unknown field trainer.callbacks.own"),
    ],
)
def test_mistakes_are_told_with_file_and_line(
    tiny_mixture: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    file = write(tiny_mixture, tmp_path, **change)
    with pytest.raises(UsageError) as raised:
        read(file)
    assert says in str(raised.value)
    assert f"{file}:" in str(raised.value)


def test_a_secret_of_ones_own_part_is_stored_nowhere(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("api_key", "hubToken", "password")
    secrets = {name: f"canary-{n}-of-mine" for n, name in enumerate(names)}
    headers = {
        "X-Auth-Token": "canary-9-of-mine",
        "user": "me",
        "apiKeys": ["canary-8-of-mine", "canary-7-of-mine"],
        "secrets": {"a": {"b": "canary-6-of-mine"}},
    }
    file = write(tiny_mixture, tmp_path)
    values = yaml.safe_load(file.read_text())
    keyed = {"name": OWN + "KeyedCallback", "headers": headers, **secrets}
    values["trainer"]["callbacks"] = {"keyed": keyed}
    file.write_text(yaml.safe_dump(values))
    callback = train(file, 2).callbacks["keyed"]
    assert isinstance(callback, KeyedCallback)
    assert callback.api_key == secrets["api_key"]
    stored = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.json", "starts.jsonl"} <= {path.name for path in stored}
    assert not [path for path in stored if b"canary" in path.read_bytes()]
    assert "canary" not in "".join(capsys.readouterr())
    config = json.loads((tmp_path / "run" / "config.json").read_bytes())
    kept = config["trainer"]["callbacks"]["keyed"]
    assert [kept[name] for name in names] == ["***"] * 3
    assert kept["headers"] == {
        "X-Auth-Token": "***",
        "user": "me",
        "apiKeys": "***",
        "secrets": "***",
    }
    assert kept["eos_token"] == "</s>"


def test_a_configuration_that_came_with_something_else_imports_nothing(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_lab.py").write_text("raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    change = {"trainer__callbacks__counting__name": "evil_lab:X"}
    file = write(tiny_mixture, tmp_path, **change)
    plain = yaml.safe_load(file.read_text())
    with pytest.raises(UsageError, match="a class of somebody's own"):
        RunConfig.resolve(Values(plain))
    (tmp_path / "config.json").write_text(json.dumps(plain))
    lines = config_diff(str(tmp_path / "config.json"), read(write(tiny_mixture, tmp_path)))
    assert any("evil_lab:X" in line for line in lines)


def test_a_package_gives_its_parts_short_names(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "lab", {"olm_train.callbacks": {"counting": OWN + "CountingCallback"}})
    monkeypatch.syspath_prepend(tmp_path)
    file = write(tiny_mixture, tmp_path, trainer__callbacks__counting__name="counting")
    config = read(file)
    assert config.trainer.callbacks.own == {"counting": CountingCallback(by=3)}
    named = config.as_dict()["trainer"]["callbacks"]["counting"]  # type: ignore[index,call-overload]
    assert named["name"] == OWN + "CountingCallback"


FOURTH = {"name": OWN + "SquaredReLU", "hidden_size": 24}


def with_feed_forward(mixture: Path, folder: Path, feed_forward: Any) -> Path:
    """A train.yaml whose model has these feed-forward layers."""
    values = config_values(mixture, folder / "run")
    values["model"] |= {"feed_forward": feed_forward}
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def test_a_fourth_feed_forward_trains_is_saved_and_resumed(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    file = with_feed_forward(tiny_mixture, tmp_path, FOURTH)
    assert read(file).model.feed_forward == SquaredReLU(hidden_size=24)
    assert isinstance(train(file, 2).train_module.model.blocks[0].feed_forward, Squared)
    assert train(file, 4).resumed
    run = tmp_path / "run"
    saved = json.loads((run / "config.json").read_text())
    assert saved["model"]["feed_forward"] == FOURTH
    assert_trusted_alone(run, tmp_path / "e")
    with pytest.raises(InputError, match="SquaredReLU"):
        load_saved(tmp_path / "e")
    found = load_saved(tmp_path / "e", classes=[SquaredReLU])
    assert isinstance(found, tuple)
    assert isinstance(found[0].blocks[1].feed_forward, Squared)


def test_it_is_counted_where_ours_are() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "n_layers": 2, "n_heads": 2}
    ours = DecoderConfig(**sizes, feed_forward={"name": "gelu", "hidden_size": 24})
    own = DecoderConfig(**sizes, feed_forward=SquaredReLU(hidden_size=24))
    assert own.num_params == ours.num_params == sum(p.numel() for p in Decoder(own).parameters())
    assert num_flops_per_token(own, pairs_per_token=3.0) == num_flops_per_token(
        ours, pairs_per_token=3.0
    )
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        more = block_bytes(own, 32, dtype)[0] - block_bytes(ours, 32, dtype)[0]
        assert more == size * 24
    with pytest.raises(UsageError, match=r"llama: feed_forward is support\.own_parts:SquaredReLU"):
        family_of_config(own)


def test_its_fields_are_checked_with_file_and_line(tiny_mixture: Path, tmp_path: Path) -> None:
    for change, said in (
        ({"hidden_size": 0}, "model.feed_forward.hidden_size is at least 1"),
        ({"width": 3}, "unknown field model.feed_forward.width"),
        ({"name": OWN + "HalfNorm"}, "not a subclass of FeedForwardPart"),
        ({"name": "swigloo"}, "did you mean 'swiglu'"),
    ):
        with pytest.raises(UsageError) as raised:
            read(with_feed_forward(tiny_mixture, tmp_path, FOURTH | change))
        assert said in str(raised.value)
        assert f"{tmp_path / 'train.yaml'}:" in str(raised.value)


@torch.no_grad()
@pytest.mark.parametrize(
    ("part", "own"),
    [
        ("feed_forward", FOURTH),
        ("attention", OWN + "HalvedAttention"),
        ("norm", OWN + "HalfNorm"),
        ("positions", OWN + "NoPositions"),
        ("block", OWN + "DoubledBlocks"),
    ],
)
def test_each_kind_of_part_may_be_ones_own(part: str, own: Any) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "n_layers": 2, "n_heads": 2}
    ids, found = torch.arange(12)[None], []
    values = Values({**sizes, part: own}, imports=True)
    for config in (DecoderConfig(**sizes), parse(DecoderConfig, values)):
        model = Decoder(config)
        init_parameters(model, 0)
        assert sum(p.numel() for p in model.parameters()) == config.num_params
        found.append(model(ids))
    assert not torch.allclose(found[0], found[1])
