"""olm_data: text in, proven token shards and mixtures out. Needs no torch.

Names (`__init__.pyi` types them) are imported on first use, so that `import olm_data` stays fast:

    dataset = olm_data.tokenize("web/*.jsonl", tokenizer="gpt2", output="./tokens/web")
    lock = olm_data.mix("manifest.yaml")
    reader = olm_data.RowReader(lock)
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "Dataset": "olm_data.dataset.dataset",
    "Lock": "olm_data.mixture.lock",
    "RowReader": "olm_data.rows.reader",
    "Schedule": "olm_data.order.schedule",
    "mix": "olm_data.verbs",
    "tokenize": "olm_data.verbs",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'olm_data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
