"""The reference page says of every field of the configuration what its dataclass says."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from olm_data.config.convert import rest_of
from olm_data.config.docs import attributes
from olm_train.run.config import RunConfig

PAGE = "docs/reference/train-config.md"


def configs(config: Any) -> set[Any]:
    """All dataclasses of a configuration."""
    found = {config}
    for hint in get_type_hints(config).values():
        queue = [hint]
        while queue:
            kind = queue.pop()
            queue += get_args(kind)
            if is_dataclass(kind) and kind not in found:
                found |= configs(kind)
    return found


def test_every_field_has_its_line_and_its_text(repository: Path) -> None:
    page = (repository / PAGE).read_text()
    named = re.findall(r"^\| `([a-zA-Z0-9_.\[\]]+)` \|.*\| (.+) \|$", page, re.MULTILINE)
    last = {name.replace("[]", "").split(".")[-1] for name, _ in named}
    for config in configs(RunConfig):
        documented = attributes(config)
        for item in fields(config):
            nested = any(map(is_dataclass, (h := get_type_hints(config)[item.name], *get_args(h))))
            here = "NAME" if item.name == rest_of(config) else item.name
            assert nested or here in last, (config, item.name)
            told = documented.get(item.name) or item.name == "name"
            assert told, f"{config.__name__}.{item.name} is not in its Attributes"


def test_each_section_of_the_configuration_has_its_table(repository: Path) -> None:
    page = (repository / PAGE).read_text()
    tables = set(re.findall(r"<!-- fields of (\w+) -->", page))
    hints = get_type_hints(RunConfig)
    assert tables == {"run", *(name for name, hint in hints.items() if is_dataclass(hint))}
