"""Each preset has a recipe that fits a stated GPU, by the estimate the dry run prints.

As a table, as JSON, or as the part of train.yaml that a preset decides.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner
from support.runs import config_values

from olm_data.config.values import Values
from olm_train.estimate.gpus import GPUS
from olm_train.estimate.memory import memory_of_step
from olm_train.extensions.presets.command import main, table
from olm_train.extensions.presets.recipe import PresetOptions, counted_tensors, recipe
from olm_train.model.loss_config import LossConfig
from olm_train.model.presets import PRESETS, preset
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.config import DataParallelConfig
from olm_train.run.config import RunConfig
from olm_train.run.dry_run import DryRunPlan, describe
from olm_train.train_module_config import TransformerTrainModuleConfig

STATED = ("h100", "h200")


@functools.cache
def found(name: str, gpu: str) -> PresetOptions:
    result = recipe(name, GPUS[gpu])
    assert result is not None
    return result


def memory(name: str, module: TransformerTrainModuleConfig, gpus: int, nodes: int = 1) -> int:
    model = preset(name, vocab_size=PRESETS[name].vocab_size, attention={"backend": "varlen"})
    row = PRESETS[name].sequence_length
    return memory_of_step(
        model,
        module,
        sequence_length=row,
        world_size=gpus,
        nodes=nodes,
        counted=counted_tensors(model),
    ).total


@pytest.mark.parametrize("name", PRESETS)
def test_a_recipe_fits_and_half_as_many_gpus_do_not(name: str) -> None:
    row = PRESETS[name].sequence_length
    least = TransformerTrainModuleConfig(
        rank_microbatch_size=row,
        dp_config=DataParallelConfig(param_dtype="bfloat16"),
        ac_config=ActivationCheckpointingConfig(mode="full"),
        loss=LossConfig(name="chunked"),
    )
    for gpu in STATED:
        one = found(name, gpu)
        assert one.memory == memory(name, one.module, one.gpus, one.nodes) <= GPUS[gpu].budget
        assert one.module.rank_microbatch_size % row == 0
        assert not one.module.dp_config.cpu_offload
        if one.gpus > 1:
            half = one.gpus // 2
            assert memory(name, least, half, -(-half // 8)) > GPUS[gpu].budget


def test_a_larger_gpu_never_needs_more_of_them_and_70b_fits_a_few_machines() -> None:
    for name in PRESETS:
        assert found(name, "h200").gpus <= found(name, "h100").gpus, name
    assert found("llama3-70b", "h100").gpus <= 64


def test_a_recipe_for_a_gpu_without_bf16_names_what_runs_there() -> None:
    values = found("olm-125m", "t4").values()
    assert values["model"]["attention"] == {"backend": "sdpa"}
    assert values["train_module"]["dp_config"] == {"param_dtype": "float32"}
    desk = found("olm-125m", "rtx-4090").values()
    assert desk["train_module"]["dp_config"] == {"param_dtype": "bfloat16"}


def test_nothing_is_recomputed_where_everything_fits() -> None:
    modes = {name: found(name, "h100").module.ac_config.mode for name in PRESETS}
    assert modes["olm-125m"] == "none"
    assert modes["llama3-70b"] == "full"


def test_the_micro_batch_is_the_largest_that_fits_below_the_limit() -> None:
    one = found("gpt2-xl", "h100")
    size = one.module.rank_microbatch_size
    assert size < 32_768
    twice = replace(one.module, rank_microbatch_size=2 * size)
    assert memory("gpt2-xl", twice, one.gpus) > GPUS["h100"].budget


def test_gradients_of_several_micro_batches_are_counted_before_they_are_promised() -> None:
    assert found("olm-1b", "h100").accumulates
    assert not found("llama3-70b", "h100").accumulates  # 282 GB of whole fp32 gradients


@pytest.mark.parametrize("name", ["olm-125m", "llama3-8b"])
def test_a_recipe_resolves_and_dry_runs(name: str, tiny_mixture: Path, tmp_path: Path) -> None:
    one = found(name, "h100")
    printed = CliRunner().invoke(main, [name, "--gpu", "h100"])
    assert printed.exit_code == 0, printed.output
    part = yaml.safe_load(printed.stdout)
    values = config_values(tiny_mixture, tmp_path / "run")
    values["model"] = part["model"]
    values["train_module"] = {"optim": values["train_module"]["optim"]} | part["train_module"]
    config = RunConfig.resolve(Values(values))
    assert replace(config.train_module, optim=one.module.optim) == one.module
    rows = Values(values)  # the tiny mixture has rows of 32 tokens, and few of them
    rows.override("--train_module.rank_microbatch_size=32")
    rows.override(f"--data_loader.global_batch_size={32 * one.gpus}")
    text = describe(RunConfig.resolve(rows), one.gpus, DryRunPlan(gpu=one.gpu), nodes=one.nodes)
    assert f"{one.gpus} x h100" in text
    assert "more than" not in text.partition("# memory of a rank")[2].partition("\n#")[0]


def test_json_says_what_the_recipe_is() -> None:
    result = CliRunner().invoke(main, ["olmo2-7b", "--gpu", "h200", "--json"])
    assert json.loads(result.stdout) == msgspec.to_builtins(found("olmo2-7b", "h200").summary())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["olmo2-7", "--gpu=h100"], "olmo2-7b"), (["olmo2-7b", "--gpu=h1000"], "h100")],
)
def test_a_misspelling_is_a_usage_error(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert f"did you mean '{says}'?" in result.stderr


@pytest.mark.parametrize("gpu", STATED)
def test_the_tables_on_the_page_are_not_stale(gpu: str, repository: Path) -> None:
    page = (repository / "docs" / "reference" / "train-config.md").read_text()
    shown = re.search(
        rf"<!-- recipes of {gpu} -->\n(.*?)\n<!-- end of recipes -->", page, re.DOTALL
    )
    assert shown is not None
    wanted = table(GPUS[gpu], {name: found(name, gpu) for name in PRESETS}, width=80)
    fix = f"stale: paste `olm-train presets --gpu {gpu}`"
    assert shown[1].splitlines() == ["```text", *wanted, "```"], fix


@pytest.mark.parametrize("width", [60, 80])
def test_the_table_fits_a_narrow_terminal(width: int) -> None:
    lines = table(GPUS["h100"], {name: found(name, "h100") for name in PRESETS}, width=width)
    assert max(map(len, lines)) <= width
