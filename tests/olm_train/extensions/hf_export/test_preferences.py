"""An exported model is taken by TRL as it lies: preferences are learned from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_exports import OLMO2, trained

from olm_train.extensions.hf_export.export import export
from olm_train.extensions.hf_export.job import ExportOptions

TEMPLATE = """\
{%- for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{%- endif %}"""


@pytest.mark.slow  # imports TRL
def test_dpo_goes_on_from_an_export(tiny_mixture: Path, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    checkpoint = trained(tiny_mixture, tmp_path / "run", OLMO2)
    options = ExportOptions(dtype="float32", check="files", template=TEMPLATE)
    export(checkpoint, str(tmp_path / "hf"), options)

    def turn(role: str, content: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content}]

    pairs = datasets.Dataset.from_list(
        [
            {
                "prompt": turn("user", f"the fox {n}"),
                "chosen": turn("assistant", "jumps"),
                "rejected": turn("assistant", "sleeps"),
            }
            for n in range(8)
        ]
    )
    trainer = trl.DPOTrainer(
        model=str(tmp_path / "hf"),
        args=trl.DPOConfig(
            output_dir=str(tmp_path / "dpo"),
            max_steps=6,
            learning_rate=1e-2,
            per_device_train_batch_size=8,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": torch.float32},
        ),
        train_dataset=pairs,
    )
    trainer.train()
    losses: list[Any] = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)  # it is its own reference
    assert losses[-1] < 0.8 * losses[0]
