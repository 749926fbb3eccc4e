"""Options of a step refuse what would have no effect, and take parts of one's own from Python."""

from __future__ import annotations

import pytest
from support.own_parts import PlainSGDConfig, SpikyLoss, StairsConfig

from olm_data.config.convert import as_dict
from olm_data.errors import UsageError
from olm_train.parallel.compiling import CompileConfig
from olm_train.parallel.config import TensorParallelConfig
from olm_train.parallel.float8 import Float8Config
from olm_train.train_module_config import TransformerTrainModuleConfig


def test_a_compile_config_without_compiling_is_refused() -> None:
    with pytest.raises(UsageError, match="no effect without compile_model"):
        TransformerTrainModuleConfig(
            rank_microbatch_size=8,
            compile_model=False,
            compile_config=CompileConfig(fullgraph=False),
        )


def test_tensor_parallelism_is_refused_beside_products_that_keep_all_tokens() -> None:
    with pytest.raises(UsageError, match="tp_config does not go with ao_recipe: mxfp8"):
        TransformerTrainModuleConfig(
            rank_microbatch_size=64,
            tp_config=TensorParallelConfig(degree=2),
            float8_config=Float8Config(ao_recipe="mxfp8"),
        )


def test_parts_of_ones_own_are_taken_and_written_with_their_import_path() -> None:
    config = TransformerTrainModuleConfig(
        rank_microbatch_size=8,
        optim=PlainSGDConfig(),  # type: ignore[arg-type]
        scheduler=StairsConfig(every=2),  # type: ignore[arg-type]
        loss=SpikyLoss(factor=2.0),  # type: ignore[arg-type]
    )
    plain = as_dict(config)
    names = {key: plain[key]["name"] for key in ("optim", "scheduler", "loss")}
    assert names == {
        "optim": "support.own_parts:PlainSGDConfig",
        "scheduler": "support.own_parts:StairsConfig",
        "loss": "support.own_parts:SpikyLoss",
    }


def test_what_is_no_part_is_refused() -> None:
    with pytest.raises(UsageError, match="loss is"):
        TransformerTrainModuleConfig(rank_microbatch_size=8, loss=StairsConfig(every=2))  # type: ignore[arg-type]
