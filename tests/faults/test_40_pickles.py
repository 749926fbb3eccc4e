"""FAULTS row 40: data with a pickle runs nothing, and no other place of the program could."""

from __future__ import annotations

import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.false_files import Payload
from support.reading import resolve_source
from support.tokenizing import make_dataset, texts, write_jsonl
from support.unsafe_calls import references, sites

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, OlmError
from olm_data.extensions.verify.datasets import verify
from olm_data.sources import plan_units, read_units
from olm_data.tokenizer.tokenizer import load_tokenizer

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


NAMES = [
    "a.jsonl",
    "a.json",
    "a.parquet",
    "a.arrow",
    "a.feather",
    "a.txt",
    "a.jsonl.gz",
    "a.txt.zst",
]


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def test_40_the_payload_works_where_somebody_unpickles_it(canary: Path) -> None:
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.exists()


@pytest.mark.parametrize("name", NAMES)
def test_40_a_pickle_under_the_name_of_a_source_is_refused_or_dropped(
    name: str, canary: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Payload(canary)))
    documents = 0
    with suppress(InputError):
        plan = resolve_source([str(tmp_path / name)])
        units = list(plan_units(0, plan.inputs[0], plan.options, 1 << 20))
        documents = sum(b.documents for b in read_units(plan.inputs, units, plan.options))
    assert documents == 0
    assert not canary.exists()


def read_all(folder: str) -> None:
    dataset = Dataset.open(folder, verify="full")
    dataset.read(0, dataset.tokens)
    _ = dataset.document(0), dataset.shard(0).record


@pytest.mark.parametrize("suffix", [".tokens.npy", ".ends.npy", ".docs.parquet", ".json"])
def test_40_a_shards_file_that_is_a_pickle_is_refused(
    suffix: str, tiny_tokenizer: Path, canary: Path, tmp_path: Path
) -> None:
    make_dataset([write_jsonl(tmp_path / "a.jsonl", texts(9))], tiny_tokenizer, tmp_path / "out")
    path = tmp_path / "out" / f"shard-00000{suffix}"
    size = path.stat().st_size
    if suffix.endswith(".npy"):
        np.save(path, np.array([Payload(canary)], dtype=object), allow_pickle=True)
    else:
        path.write_bytes(pickle.dumps(Payload(canary)))
    path.write_bytes(path.read_bytes()[:size].ljust(size, b"\0"))  # not refused for its size alone
    assert not verify(str(tmp_path / "out")).ok
    with pytest.raises(OlmError):
        read_all(str(tmp_path / "out"))
    assert not canary.exists()


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "tokenizer.json"])
def test_40_a_side_file_that_is_a_pickle_is_refused(
    name: str, tiny_tokenizer: Path, canary: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(9))
    make_dataset([source], tiny_tokenizer, tmp_path / "out")
    (tmp_path / "out" / name).write_bytes(pickle.dumps(Payload(canary)))
    if name != "manifest.json":
        assert not verify(str(tmp_path / "out")).ok
    else:
        with pytest.raises(OlmError):
            Dataset.open(str(tmp_path / "out"))
    if name == "plan.json":
        with pytest.raises(OlmError):
            make_dataset([source], tiny_tokenizer, tmp_path / "out")
    assert not canary.exists()


def test_40_a_tokenizer_that_is_a_pickle_is_refused(canary: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(pickle.dumps(Payload(canary)))
    for place in (tmp_path / "tokenizer.json", tmp_path):
        with pytest.raises(OlmError):
            load_tokenizer(place)
    assert not canary.exists()


def test_40_a_folder_saved_by_torch_is_no_source(canary: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "data.pt").write_bytes(pickle.dumps(Payload(canary)))
    with pytest.raises(OlmError):
        resolve_source([str(folder)])
    shutil.copy(folder / "data.pt", folder / "data.npy")
    with pytest.raises(OlmError):
        resolve_source([str(folder / "data.npy")])
    assert not canary.exists()
