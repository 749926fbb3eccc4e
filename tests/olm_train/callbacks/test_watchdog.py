"""The watchdog leaves nothing behind; what it does to a rank that hangs: faults/test_61."""

from __future__ import annotations

import threading
from pathlib import Path

from support.runs import build_trainer


def test_its_thread_ends_with_the_run(tiny_mixture: Path, tmp_path: Path) -> None:
    names: list[str] = []
    trainer = build_trainer(tiny_mixture, tmp_path, stop=1)
    step = trainer.train_module.train_step

    def watched(*arguments: object, **options: object) -> object:
        names.extend(thread.name for thread in threading.enumerate())
        return step(*arguments, **options)  # type: ignore[arg-type]

    trainer.train_module.train_step = watched  # type: ignore[method-assign,assignment]
    trainer.fit()
    assert "olm-watchdog" in names
    assert "olm-watchdog" not in [thread.name for thread in threading.enumerate()]
