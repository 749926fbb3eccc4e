"""docs/reference/checkpoint.md is enough to read a checkpoint without this program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import Kind
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.distributed.world import World


def test_the_reader_of_the_page_gives_every_bit(repository: Path, tmp_path: Path) -> None:
    page = (repository / "docs" / "reference" / "checkpoint.md").read_text()
    found: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], found)
    state = {
        "model": {"a": torch.randn(5, 3), "b": torch.arange(4), "c": torch.randn(2, 1, 3).double()},
        "optim": {"step": torch.tensor(7.0), "none": torch.empty(0, 3), "count": 3},
    }
    contents = Contents(step=1, kind=Kind.final, state=state, documents={}, lock_digest="")
    folder = save_checkpoint(tmp_path, contents, World(), work_dir=tmp_path)
    for name, entry in open_checkpoint(folder, World()).index.tensors.items():
        part, _, key = name.partition(".")
        tensor = found["read_tensor"](f"{folder}/model_and_optim", name)
        assert tensor.tobytes() == state[part][key].numpy().tobytes()  # type: ignore[attr-defined]
        assert tensor.shape == entry.shape
