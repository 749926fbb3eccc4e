"""What `auto` stands for on a device: attention back-end, dtype, precision of products, compiler.

    model, train_module with `auto` --Capability of the device--> both without, and why, in words

What is given is never replaced; what cannot run there is refused later, by what cannot. Pure but
for `Capability.of`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Literal

import torch

from olm_train.model.attention import ATTENTION_BACKENDS
from olm_train.model.attention_backend import Use
from olm_train.model.config import DecoderConfig
from olm_train.parallel.config import DTYPES
from olm_train.train_module_config import TransformerTrainModuleConfig

AUTO = "auto"
BY_SPEED = ("varlen", "flash", "flex", "sdpa")
"""Back-ends on CUDA, those to be preferred first."""
HELD_BY_MATH = 6
"""Bytes that `math` keeps of a query and a key: their share in fp32 and in 16 bits."""
MATH_BYTES = 2 << 30
"""Most that it may keep in all layers, where rows are as long as a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What a device can do.

    Attributes:
        device: "cpu" or "cuda".
        name: for people.
        modern: CUDA: it has bf16 and runs FlashAttention 2 (compute capability 8.0).
        triton: torch.compile has its back-end for CUDA.
        unused: CPU: an accelerator of the machine that training does not run on, such as "mps".
    """

    device: str = "cpu"
    name: str = "CPU"
    modern: bool = False
    triton: bool = False
    unused: str | None = None

    @classmethod
    def of(cls, device: torch.device) -> Capability:
        """Return that of a device of this machine."""
        if device.type != "cuda":
            other = torch.accelerator.current_accelerator(check_available=True)
            return cls(unused=other.type if other and other.type != "cuda" else None)
        return cls(
            device="cuda",
            name=torch.cuda.get_device_name(device),
            modern=torch.cuda.get_device_capability(device) >= (8, 0),
            triton=importlib.util.find_spec("triton") is not None,
        )


def resolve(
    model: DecoderConfig, module: TransformerTrainModuleConfig, capability: Capability
) -> tuple[DecoderConfig, TransformerTrainModuleConfig, dict[str, str]]:
    """Return both without `auto`, and each choice with its reason."""
    cuda, modern = capability.device == "cuda", capability.modern
    why: dict[str, str] = {}
    if capability.unused:
        why[f"this machine's accelerator ({capability.unused}) is not used"] = (
            "training runs on CUDA devices (NVIDIA, and AMD with ROCm) and on CPUs"
        )
    dtype = module.dp_config.param_dtype
    if dtype == AUTO:
        dtype = "bfloat16" if modern else "float32"
        why[f"dtype {dtype}"] = _where(capability, "has fast bf16", "no bf16 on CUDA")
        module = replace(module, dp_config=replace(module.dp_config, param_dtype=dtype))
    if module.float32_matmul_precision == AUTO:
        precision: Literal["high", "highest"] = "high" if cuda else "highest"
        why[f"float32_matmul_precision {precision}"] = (
            "TF32 where the device has it" if cuda else "a CPU has no faster one"
        )
        module = replace(module, float32_matmul_precision=precision)
    if module.compile_model == AUTO:
        compiles, reason = _compiles(model, module, capability)
        why["compiled" if compiles else "not compiled"] = reason
        module = replace(module, compile_model=compiles)
    if model.attention.backend == AUTO:
        name, reason = (
            _attention(model, dtype, capability)
            if cuda
            else _attention_on_cpu(model, dtype, module.rank_microbatch_size)
        )
        why[f"attention {name}"] = reason
        model = model.changed(attention={"backend": name})
    return model, module, why


def _where(capability: Capability, modern: str, old: str) -> str:
    if capability.device != "cuda":
        return "works on every device; bf16 is faster only on CPUs with instructions for it"
    return f"{capability.name} {modern}" if capability.modern else f"{capability.name}: {old}"


def _compiles(
    model: DecoderConfig, module: TransformerTrainModuleConfig, capability: Capability
) -> tuple[bool, str]:
    if module.ac_config.mode == "budget":
        return True, "ac_config.mode budget needs it"
    if module.compile_config != type(module.compile_config)():
        return True, "compile_config is given"
    if capability.device != "cuda":
        return False, "on a CPU compiling takes longer than it saves"
    if not capability.triton:
        return False, "triton is not installed"
    if module.dp_config.param_dtype == "float32" and model.feed_forward.routes:
        return False, "torch compiles experts in bfloat16 alone"
    return True, "fewer passes over memory on CUDA; the first step takes a minute or more"


def _attention_on_cpu(model: DecoderConfig, dtype: str, tokens: int) -> tuple[str, str]:
    """Choose for micro-batches of `tokens`: no row is longer."""
    if DTYPES[dtype].itemsize != 2:
        return "sdpa", "trains on every device, and holds no products"
    most = model.n_layers * model.n_heads * tokens**2 * HELD_BY_MATH
    if most > MATH_BYTES:
        return "sdpa", f"math could hold products of {most / 2**30:,.1f} GiB"
    return "math", "faster than sdpa for short rows on CPUs with instructions for bf16"


def _attention(model: DecoderConfig, dtype: str, capability: Capability) -> tuple[str, str]:
    if not capability.modern:
        return "sdpa", f"{capability.name} is too old for FlashAttention 2"
    use = Use(
        torch.device("cuda"),
        DTYPES[dtype],
        model.head_size,
        training=True,
        softcap=model.attention.softcap is not None,
    )
    passed: list[str] = []
    for name in BY_SPEED:
        refusal = ATTENTION_BACKENDS[name].refusal(use)
        if refusal is None:
            before = "; ".join(passed)
            return name, before or "skips what the document mask leaves out"
        passed.append(f"not {name}, {refusal.why}")
    raise AssertionError("sdpa runs everywhere")
