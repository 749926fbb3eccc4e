"""Accelerators by name, what a device can do, and what auto stands for there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import build_trainer, config_values, metrics
from support.training import MODEL, build

from olm_data.config.values import Values
from olm_train.estimate.device_defaults import Capability, resolve
from olm_train.estimate.gpus import GPUS, device_peak_flops, gpu_named
from olm_train.model.config import DecoderConfig
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.compiling import CompileConfig
from olm_train.parallel.config import DataParallelConfig
from olm_train.run.command import main
from olm_train.run.config import RunConfig
from olm_train.run.dry_run import describe
from olm_train.train_module_config import TransformerTrainModuleConfig

CPU = Capability()
H100 = Capability(device="cuda", name="H100", modern=True, triton=True)
T4 = Capability(device="cuda", name="T4", modern=False, triton=True)
PLAIN = Capability(device="cuda", name="H100", modern=True, triton=False)
WIDE = replace(MODEL, head_dim=64)


def chosen(
    capability: Capability, model: DecoderConfig = WIDE, **options: Any
) -> tuple[Any, Any, Any, Any]:
    module = TransformerTrainModuleConfig(rank_microbatch_size=32, **options)
    model, module, _ = resolve(model, module, capability)
    assert resolve(model, module, H100)[:2] == (model, module), "nothing is left to choose"
    return (
        model.attention.backend, module.dp_config.param_dtype, module.float32_matmul_precision,
        module.compile_model,
    )  # fmt: skip


def test_t7_each_device_gets_what_it_is_fast_with() -> None:
    assert chosen(CPU) == ("sdpa", "float32", "highest", False)
    assert chosen(H100) == ("varlen", "bfloat16", "high", True)
    assert chosen(T4) == ("sdpa", "float32", "high", True)
    assert chosen(PLAIN) == ("varlen", "bfloat16", "high", False)


def test_u12_an_accelerator_that_training_does_not_run_on_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    assert Capability.of(cpu).unused is None
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps")
    )
    found = Capability.of(cpu)
    assert found.unused == "mps"
    module = TransformerTrainModuleConfig(rank_microbatch_size=32)
    *_, why = resolve(WIDE, module, found)
    assert "training runs on CUDA" in why["this machine's accelerator (mps) is not used"]
    assert chosen(found) == chosen(CPU)


def test_t7_attention_takes_what_the_heads_and_the_dtype_allow() -> None:
    fp32 = DataParallelConfig(param_dtype="float32")
    assert chosen(H100, dp_config=fp32)[0] == "flex"
    assert chosen(H100, replace(WIDE, head_dim=20))[0] == "flex"
    module = TransformerTrainModuleConfig(rank_microbatch_size=32, dp_config=fp32)
    *_, why = resolve(WIDE, module, H100)
    assert (
        "not varlen, its kernels compute in 16 bits, not in float32; not flash, "
        in why["attention flex"]
    )


def test_in_16_bits_a_cpu_multiplies_where_the_products_fit() -> None:
    half = DataParallelConfig(param_dtype="bfloat16")
    assert chosen(CPU, dp_config=half)[0] == "math"
    large = replace(WIDE, n_layers=24, n_heads=32)
    module = TransformerTrainModuleConfig(rank_microbatch_size=1024, dp_config=half)
    model, _, why = resolve(large, module, CPU)
    assert model.attention.backend == "sdpa"
    assert why["attention sdpa"] == "math could hold products of 4.5 GiB"
    model, _, _ = resolve(replace(large, n_layers=10), module, CPU)
    assert model.attention.backend == "math"  # 1.9 GiB


def test_a_soft_cap_of_attention_goes_to_what_has_one() -> None:
    capped = WIDE.changed(attention={"softcap": 50.0})
    assert chosen(H100, capped)[0] == "flex"
    assert chosen(CPU, capped)[0] == chosen(T4, capped)[0] == "sdpa"
    *_, why = resolve(capped, TransformerTrainModuleConfig(rank_microbatch_size=32), H100)
    no_cap = "not varlen, torch's varlen_attn has no soft cap of attention"
    assert no_cap in why["attention flex"]


@pytest.mark.parametrize("capability", [CPU, H100, T4, PLAIN])
def test_t7_what_is_given_stays_and_is_not_spoken_of(capability: Capability) -> None:
    for attention, dtype, precision, compiles in (
        ("varlen", "bfloat16", "medium", True),
        ("sdpa", "float32", "highest", False),
    ):
        model = WIDE.changed(attention={"backend": attention})
        module = TransformerTrainModuleConfig(
            rank_microbatch_size=32,
            dp_config=DataParallelConfig(param_dtype=dtype),  # type: ignore[arg-type]
            float32_matmul_precision=precision,  # type: ignore[arg-type]
            compile_model=compiles,
        )
        assert resolve(model, module, capability) == (model, module, {})


def test_t7_options_of_the_compiler_ask_for_it() -> None:
    budget = ActivationCheckpointingConfig(mode="budget", activation_memory_budget=0.5)
    assert chosen(CPU, ac_config=budget)[3] is True
    assert chosen(CPU, compile_config=CompileConfig(fullgraph=False))[3] is True


def test_t7_a_module_built_by_hand_is_resolved_for_its_device() -> None:
    module = build(param_dtype="auto")
    config = module.config
    assert module.model.config.attention.backend == "sdpa"
    assert (config.dp_config.param_dtype, config.compile_model) == ("float32", False)
    assert config.float32_matmul_precision == "highest"
    assert module.model.compute_dtype is torch.float32


def test_t7_the_start_says_what_was_chosen_and_the_run_keeps_it(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(json.dumps(config_values(tiny_mixture, tmp_path / "run")))
    stop = "--trainer.hard_stop={value: 1, unit: steps}"
    assert main([str(config), stop]) == 0
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("auto on CPU: ")]
    for choice in ("attention sdpa", "dtype float32", "not compiled", "CPU threads of a rank: "):
        assert choice in line
    kept = json.loads((tmp_path / "run" / "config.json").read_bytes())
    assert kept["model"]["attention"]["backend"] == "sdpa"
    assert kept["train_module"]["dp_config"]["param_dtype"] == "float32"
    assert kept["train_module"]["float32_matmul_precision"] == "highest"
    assert kept["train_module"]["compile_model"] is False
    given = ["--model.attention.backend=sdpa", "--train_module.compile_model=false", stop]
    given += ["--train_module.dp_config.param_dtype=float32", f"--trainer.save_folder={tmp_path}/2"]
    assert main([str(config), *given, "--train_module.float32_matmul_precision=highest"]) == 0
    assert "auto on" not in capsys.readouterr().err


def test_t7_the_dry_run_resolves_for_the_planned_gpu_and_says_what_is_here(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    config = RunConfig.resolve(Values(config_values(tiny_mixture, tmp_path)))
    text = describe(config, 2)
    assert "auto on h100: attention varlen: " in text
    assert "param_dtype: bfloat16" in text.partition("# mixture")[0]
    if not torch.cuda.is_available():
        assert "here, without a CUDA device: attention sdpa, dtype float32, not compiled" in text


def test_t7_a_run_goes_on_with_another_back_end_and_no_other_model(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    stop = "--trainer.hard_stop={value: %d, unit: steps}"
    trainer = build_trainer(tiny_mixture, tmp_path / "run", stop % 2)
    trainer.fit()
    path = tmp_path / "run" / "step00000002" / "config.json"
    assert json.loads(path.read_bytes())["model"]["attention"]["backend"] == "sdpa"
    other = build_trainer(tiny_mixture, tmp_path / "run", stop % 3)  # as if on CUDA:
    attention = other.config["model"]["attention"]
    other.config = {
        **other.config,
        "model": {**other.config["model"], "attention": {**attention, "backend": "varlen"}},
    }
    other.fit()
    assert other.step == 3
    assert len(metrics(tmp_path / "run")) >= 3


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L20", None),
        ("NVIDIA H100", None),
        ("NVIDIA H20", None),
        ("cpu", None),
        ("", None),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GB300", 2500e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("AMD Instinct MI300A", 980.6e12),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("AMD Instinct MI250X", None),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GeForce RTX 3090 Ti", 80e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("NVIDIA RTX 6000 Ada Generation", 364.2e12),
        ("NVIDIA RTX A6000", 154.8e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8e12),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9e12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA A40-48Q", None),
        ("Tesla T4", 8.1e12),
        ("Tesla V100-SXM2-32GB", 15.7e12),
        ("Tesla V100-PCIE-16GB", 14e12),
    ],
)
def test_a_peak_is_stated_for_whole_known_devices_alone(name: str, peak: float | None) -> None:
    assert device_peak_flops(name) == peak


@pytest.mark.parametrize("name", ["rtx-4090", "RTX 4090", "4090", "L4", "rtx6000ada", "t4"])
def test_a_gpu_is_known_by_the_names_that_people_write(name: str) -> None:
    assert gpu_named(name) in GPUS.values()
    assert gpu_named(name).peak_flops > 0
