"""Row 40: every place of the program that could run what a file says is known, and why it may."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.unsafe_calls import references, sites

DCP = "torch.distributed.checkpoint"
OBJECTS = ("all_gather_object", "broadcast_object_list")
ALLOWED = {
    # Between the processes of one run, never out of a file.
    "olm_train/distributed/preempt.py": {"torch.distributed.all_gather_object"},
    "olm_train/distributed/world.py": {f"torch.distributed.{name}" for name in OBJECTS},
    # Modules of the program, by names that are written in it.
    "olm_data/__init__.py": {"importlib.import_module"},
    "olm_data/cli.py": {"importlib.import_module"},
    "olm_train/__init__.py": {"importlib.import_module"},
    "olm_train/model/attention_varlen.py": {"importlib.import_module"},
    # The process itself (None), for a function of its C library; no file is named.
    "olm_train/distributed/host_memory.py": {"ctypes.CDLL"},
    # Classes of the user's own, by a name that the user wrote, never one of a file.
    "olm_data/config/import_path.py": {"importlib.import_module"},
    # Parts of installed packages, by the groups that this program knows.
    "olm_data/plugins.py": {"importlib.import_module", "importlib.metadata.entry_points"},
    "olm_data/command.py": {"importlib.import_module"},
    "benchmarks/peers/loaders/mosaicml.py": {"importlib.machinery.ModuleSpec"},
}
"""Add to it only what no file of others can reach, and say why."""


def test_40_no_other_place_unpickles_or_loads_code(repository: Path) -> None:
    folders = [repository / name for name in ("olm_data", "olm_train", "pipelines", "benchmarks")]
    found = sites(folders)
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle\npickle.loads(b'')", "pickle.loads"),
        ("import pickle as p\nmap(p.load, [])", "pickle.load"),
        ("from pickle import loads as read\nread(b'')", "pickle.loads"),
        ("import torch\ntorch.load('x', weights_only=True)", "torch.load"),
        ("import torch.distributed.checkpoint as d\nd.load({})", f"{DCP}.load"),
        (f"from {DCP} import FileSystemReader as F\nF('x')", f"{DCP}.FileSystemReader"),
        ("import numpy as np\nnp.load('x')", "numpy.load"),
        ("import numpy as np\nnp.load('x', allow_pickle=flag)", "numpy.load"),
        ("import yaml\nyaml.load('x', Loader=yaml.SafeLoader)", "yaml.load"),
        ("eval('1')", "eval"),
        ("import importlib\nimportlib.import_module(name)", "importlib.import_module"),
    ],
)
def test_40_the_walk_finds_them_under_any_name(source: str, name: str) -> None:
    assert name in set(references(source))


def test_40_the_walk_leaves_alone_what_is_safe() -> None:
    source = "import pickle, numpy as np\npickle.dumps(1)\nnp.load('x', allow_pickle=False)\n"
    assert not set(references(source + "'pickle.loads'  # torch.load"))
