"""The reference page names every field of the configuration, and no other."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

from olm_train.run_config import RunConfig


def fields(config: Any, prefix: str = "") -> set[str]:
    names = set()
    for name, hint in get_type_hints(config).items():
        if name not in {field.name for field in dataclasses.fields(config)}:
            continue
        nested = [kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)]
        for kind in nested:
            names |= fields(kind, f"{prefix}{name}.")
        if not nested:
            names.add(prefix + name)
    return names


def test_page_and_dataclasses_agree(repository: Path) -> None:
    page = (repository / "docs" / "reference" / "train-config.md").read_text()
    documented = set(re.findall(r"^\| `([a-z0-9_.]+)` \|", page, re.MULTILINE))
    assert documented - {"model.preset", "model.depth"} == fields(RunConfig)
