"""Parts of a model of one's own: a fourth feed-forward layer in one file, and one of each kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.own_parts import Squared, SquaredReLU, assert_trusted_alone
from support.runs import config_values

from olm_data.config.convert import parse
from olm_data.config.schema import check_names
from olm_data.config.values import Values
from olm_data.errors import InputError, UsageError
from olm_train.distributed.world import World
from olm_train.duration import Duration
from olm_train.estimate.flops import num_flops_per_token
from olm_train.estimate.memory import block_bytes
from olm_train.extensions.hf.table import family_of_config
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.model.load import load_saved
from olm_train.run.command import SCHEMA
from olm_train.run.config import RunConfig
from olm_train.trainer import Trainer

OWN = "support.own_parts:"
FOURTH = {"name": OWN + "SquaredReLU", "hidden_size": 24}


def read(mixture: Path, folder: Path, feed_forward: Any) -> RunConfig:
    values = config_values(mixture, folder / "run")
    values["model"] |= {"feed_forward": feed_forward}
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump(values))
    found = Values.read(file)
    check_names(json.loads(SCHEMA.read_bytes()), found)
    return RunConfig.resolve(found)


def train(config: RunConfig, steps: int) -> Trainer:
    stop = Duration(value=steps, unit="steps")
    trainer = replace(config, trainer=replace(config.trainer, hard_stop=stop)).build(World())
    trainer.fit()
    return trainer


def test_a_fourth_feed_forward_trains_is_saved_and_resumed(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    config = read(tiny_mixture, tmp_path, FOURTH)
    assert config.model.feed_forward == SquaredReLU(hidden_size=24)
    assert isinstance(train(config, 2).train_module.model.blocks[0].feed_forward, Squared)
    assert train(config, 4).resumed
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
            read(tiny_mixture, tmp_path, FOURTH | change)
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
