"""`--dry-run`, `--preset`: what a run would be, in seconds, without a GPU."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from support.runs import MANIFEST, config_values, write_config
from support.stand_in import parse_mixture

from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import MixPlan, open_sources
from olm_train.estimate.flops import num_flops_per_token
from olm_train.estimate.gpus import GPUS
from olm_train.estimate.memory import memory_of_step
from olm_train.model.presets import PRESETS
from olm_train.run.command import main
from olm_train.run.config import RunConfig
from olm_train.run.dry_run import DryRunPlan, describe, first_rows

FOR_FOUR = "--train_module.rank_microbatch_size=64"
"""Ranks that share the tiny mixture's batch."""


@pytest.fixture
def config(tiny_mixture: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")


def resolved(lock: Path, tmp_path: Path, *options: str) -> RunConfig:
    values = Values(config_values(lock, tmp_path / "run"))
    for option in (FOR_FOUR, *options):
        values.override(option)
    return RunConfig.resolve(values)


def test_memory_is_listed_by_component_and_adds_up(tiny_mixture: Path, tmp_path: Path) -> None:
    config = resolved(tiny_mixture, tmp_path, "--model={preset: olm-125m}")
    config, _ = config.on_device(GPUS["h100"].capability)
    text = describe(config, 4).partition("# memory of a rank\n")[2].partition("\n#")[0]
    listed = dict(re.findall(r"^(\w+) +([\d.e+-]+) +MB", text, re.MULTILINE))
    expected = memory_of_step(
        config.model, config.train_module, sequence_length=32, world_size=4
    ).by_component()
    assert list(listed) == [*expected, "total"]
    for name, size in expected.items():
        assert float(listed[name]) == pytest.approx(size / 1e6, rel=1e-3)
    assert float(listed["total"]) == pytest.approx(sum(expected.values()) / 1e6, rel=1e-3)


def test_what_a_rank_sends_is_listed_by_axis(tiny_mixture: Path, tmp_path: Path) -> None:
    config = resolved(tiny_mixture, tmp_path, "--train_module.cp_config={degree: 2}")
    text = describe(config, 4)
    listed = text.partition("# traffic of a rank\n")[2].partition("\n\n")[0]
    found = re.findall(r"^(\w+) +([\d.,e+-]+) +MB a step$", listed, re.MULTILINE)
    assert [axis for axis, _ in found] == ["fsdp", "cp"]
    assert "# traffic of a rank" not in describe(resolved(tiny_mixture, tmp_path), 1)


def test_days_follow_from_flops_ranks_and_the_stated_mfu(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    config = resolved(tiny_mixture, tmp_path)
    text = describe(config, 4, DryRunPlan(gpu=GPUS["h200"], mfu=0.25))
    found = re.search(r"on 4 x h200 at 25% of their peak.*: ([\d,]+) tokens a second", text)
    flops = num_flops_per_token(config.model, pairs_per_token=(32 + 1) / 2)
    rate = int(found[1].replace(",", ""))
    assert rate == pytest.approx(4 * 0.25 * GPUS["h200"].peak_flops / flops, rel=1e-2)


def test_the_time_and_memory_of_a_toy_are_in_units_for_people(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    text = describe(resolved(tiny_mixture, tmp_path), 1)
    assert "\nless than a second on 1 x h100" in text
    assert re.search(r"^total +[\d.]+ +MB: ", text, re.MULTILINE)
    long = describe(resolved(tiny_mixture, tmp_path, "--model={preset: llama3-70b}"), 1)
    assert re.search(r"^about [\d.]+ (s|min \d+ s) on 1 x h100", long, re.MULTILINE)


def test_layers_in_8_bits_are_named_without_torchao_and_refused_without_bf16(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    option = "--train_module.float8_config={ao_recipe: rowwise}"
    config = resolved(tiny_mixture, tmp_path, "--model={preset: olm-125m}", option)
    assert "\nfloat8 rowwise: 40 linear layers (attention.w_qkv, " in describe(config, 4)
    with pytest.raises(UsageError, match="give bfloat16, and the blocks compute in float32"):
        describe(config, 4, DryRunPlan(gpu=GPUS["t4"]))


def test_a_gpu_without_bf16_is_planned_in_float32(tiny_mixture: Path, tmp_path: Path) -> None:
    config, why = resolved(tiny_mixture, tmp_path).on_device(GPUS["t4"].capability)
    assert config.train_module.dp_config.param_dtype == "float32"
    assert config.model.attention.backend == "sdpa"
    assert "no bf16" in why["dtype float32"]


def test_first_rows_show_the_documents_the_first_step_trains_on(tiny_mixture: Path) -> None:
    lock = Lock.read(tiny_mixture)
    lines = list(first_rows(lock, list(range(8))))
    heads = [line for line in lines if line.startswith("row ")]
    assert [head.split(":")[0] for head in heads] == ["row 0", "row 1"]
    assert any(re.match(r"    document \d+, \d+ tokens: \S", line) for line in lines)
    assert lines[-1] == "... and 6 more rows in this step"
    assert not [line for line in lines if "\\n" in line]  # texts are on one line, without escapes


def test_rows_whose_text_cannot_be_shown_do_not_fail_the_dry_run(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_mixture.parent, tmp_path / "mixture")
    for file in (tmp_path / "mixture").rglob("tokenizer.json"):
        file.unlink()
    lock = Lock.read(tmp_path / "mixture" / tiny_mixture.name)
    lines = list(first_rows(lock, [0]))
    assert "tokenizer.json is missing" in lines[0]


def test_a_70b_model_is_described_without_allocating_it(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    arguments = [str(config), "--dry-run", FOR_FOUR]
    assert main([*arguments, "--preset=llama3-70b", "--gpu", "h200"]) == 0
    out = capsys.readouterr().out
    assert "n_layers: 80" in out
    assert "too much: 127 GB are left" in out  # 70B on 4 ranks


def test_preset_replaces_the_files_model_and_fields_after_it_count(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(config), "--dry-run", "--preset", "olmo2-1b", "--model.n_layers=2"]
    assert main(arguments) == 0
    model = yaml.safe_load(capsys.readouterr().out.partition("# mixture")[0])["model"]
    wanted = PRESETS["olmo2-1b"].fields
    assert model["d_model"] == wanted["d_model"]
    assert (model["n_layers"], model["vocab_size"]) == (2, 512)
    assert model["block"] == {"name": "reordered_norm"}


def test_depth_is_the_one_dial(tiny_mixture: Path, tmp_path: Path) -> None:
    for depth, width in ((1, 128), (4, 256), (12, 768), (20, 1280)):
        config = resolved(tiny_mixture, tmp_path, f"--model={{depth: {depth}}}").model
        assert (config.n_layers, config.d_model, config.head_size) == (depth, width, 128)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--preset", "olmo2-1bb"], "did you mean 'olmo2-1b'?"),
        (["--preset"], "--preset needs a value"),
        (["--preset=olm-1m", "--preset=olm-4m"], "--preset is given twice"),
        (["--prest", "olm-1m"], "--preset"),
        (["--dry-run", "--gpu=h1000"], "did you mean 'h100'?"),
        (["--dry-run", "--mfu=40"], "--mfu is a number above 0, at most 1"),
        (["--gpu=h100"], "--gpu has no effect without --dry-run"),
        (["--dry-run", "--model={depth: 4, preset: olm-1m}"], "each give the shape"),
        (["--dry-run", "--model={depth: four}"], "model.depth is an integer"),
        (["--dry-run", "--model={depth: 0}"], "less than 1"),
        (["--diff=run"], "--diff is for olm-train config"),
    ],
)
def test_a_mistake_in_an_option_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert main([str(config), *options]) in (2, 4)
    assert says in capsys.readouterr().err


def test_a_parametrization_is_shown_by_role(tiny_mixture: Path, tmp_path: Path) -> None:
    def shown(*options: str) -> str:
        text = describe(resolved(tiny_mixture, tmp_path, *options), 1)
        return text.partition("# parametrization\n")[2].partition("\n\n")[0]

    model = (
        "--model={d_model: 64, n_layers: 4, n_heads: 4, parametrization: completep, "
        "base: {d_model: 16, n_layers: 2}}"
    )
    found = shown(model, "--train_module.optim={lr: 0.01, weight_decay: 0.1}")
    assert "width x 4, depth x 2 of the base's; residual branches x 0.5" in found
    assert "states before the head x 0.25, products of queries and keys x 0.0625" in found
    assert re.search(r"^hidden +8 +0.01 +0.0025 +0.4 +1.25e-09$", found, re.MULTILINE)
    assert re.search(r"^head +1 +0.02 +0.01 +0.1 +2.5e-09$", found, re.MULTILINE)
    assert shown() == ""


@pytest.fixture(scope="module")
def lock(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny mixture, its first stage of 16 steps cut into rows of 8 tokens."""
    text = MANIFEST.replace("name: main,", "name: main, sequence_length: 8,")
    folder = tiny_mixture.parent
    mixture = parse_mixture(text, str(folder / "phases.yaml"), str(folder))
    path = folder / "phases.lock.json"
    MixPlan(mixture, open_sources(mixture), str(folder)).compile().write(path)
    return path


def test_a_dry_run_lists_the_steps_of_each_length_and_counts_their_work(
    lock: Path, tmp_path: Path
) -> None:
    config = RunConfig.resolve(Values(config_values(lock, tmp_path / "run")))
    text = describe(config, world_size=2)
    assert "steps 1 to 16: sequence length 8, micro-batches of 16 rows" in text
    assert "steps 17 to 24: sequence length 32, micro-batches of 4 rows" in text
    assert "128 rows, each as 4 of 8 tokens" in text
    pairs = (16 * 9 / 2 + 8 * 33 / 2) / 24
    flops = num_flops_per_token(config.model, pairs_per_token=pairs)
    assert f"{flops:.3e} FLOPs a token" in text
