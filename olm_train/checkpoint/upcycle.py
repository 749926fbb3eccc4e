"""A mixture of experts that begins with a dense model of ours: a checkpoint, or exported weights.

Each rank reads the rows that are at home on it; of a feed-forward layer all, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from olm_data.errors import UsageError
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.portable import model_config
from olm_train.checkpoint.tensors import read_rows
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import build_decoder
from olm_train.model.load import model_of
from olm_train.model.shards import local_blocks
from olm_train.model.upcycle import OPTION, Slices, dense_name, put_copies, refuse_unequal
from olm_train.model.weights_folder import Exported, kept
from olm_train.train_module_base import TrainModule


def upcycled(source: Checkpoint | Exported, module: TrainModule) -> Callable[[], None]:
    """Return what puts the weights of a dense model in place; every rank calls it.

    Raises:
        UsageError: the logits would not be those of the dense model.
        ValidationError: shape and weights do not fit each other.
    """
    config = module.model_config
    if type(config) is not DecoderConfig:
        raise UsageError("only a Decoder can begin with a dense model", where=OPTION)
    if isinstance(source, Exported):
        model = model_of(source, vocab_multiple=config.vocab_multiple)
        dense, tensors = model.config, dict(kept(model))
    else:
        dense, tensors = model_config(source), {}
        wanted = kept(build_decoder(dense, device="meta"))
        source.refuse_misfits({f"model.{name}": value for name, value in wanted}, ("model",))
    refuse_unequal(dense, config)

    def read(name: str, where: Slices) -> Tensor:
        if isinstance(source, Exported):
            return tensors[name][where]
        rows, *others = where
        place = (source.tensors, source.index, f"model.{name}")
        return read_rows(*place, rows.start, rows.stop)[(slice(None), *others)]

    @torch.no_grad()
    def fill(state: dict[str, Tensor]) -> None:
        for name, target in state.items():
            for part, where in local_blocks(target):
                if not part.numel() or ".router." in name:
                    continue
                if dense_name(name) is None:
                    part.copy_(read(name, where))
                else:
                    put_copies(part, where, name, read, config)

    def load() -> None:
        module.ensure_weights()
        state = module.state_dict()["model"]
        module.world.on_each(lambda: fill(state))
        module.load_state_dict({"model": state})

    return load
