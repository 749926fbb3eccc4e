"""Models of transformers that are damaged, hostile or of another kind: refused, nothing executed.

Each by the command that a user types, from a folder and from a bucket; a run leaves no checkpoint.
"""

from __future__ import annotations

import json
import pickle
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.false_files import Payload
from support.hf_models import hf_model
from support.runs import config_values

from olm_data.mixture.lock import Lock
from olm_data.storage.store import Store
from olm_train.run.command import main

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
VALIDATION, INPUT, USAGE = 3, 4, 2


@pytest.fixture(scope="session")
def llama(
    tiny_mixture: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A model in two files, with the tokenizer of the data."""
    folder = tmp_path_factory.mktemp("strange") / "llama"
    model = hf_model("llama", vocab_size=Lock.read(str(tiny_mixture)).tokenizer.vocab_size)
    model.save_pretrained(folder, max_shard_size="120KB")
    shutil.copy(tiny_tokenizer, folder / "tokenizer.json")
    assert (folder / ONE).exists()
    assert (folder / TWO).exists()
    return folder


def rewrite(folder: Path, name: str, **fields: Any) -> None:
    value = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(value | fields))


def names(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    """Change the weight_map of the index."""
    value = json.loads((folder / INDEX).read_text())
    change(value["weight_map"])
    (folder / INDEX).write_text(json.dumps(value))


def tensors(folder: Path, file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    values = dict(load_file(folder / file))
    change(values)
    save_file(values, folder / file, metadata={"format": "pt"})


def first(values: dict[str, torch.Tensor]) -> str:
    return min(values)


def second(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Other bytes in the second file."""

    def write(folder: Path) -> None:
        (folder / TWO).write_bytes(change((folder / TWO).read_bytes()))

    return write


def outside(folder: Path) -> None:
    shutil.copy(folder / TWO, folder.parent / TWO)
    names(folder, lambda found: found.update({min(found): f"../{TWO}"}))


def doubled(folder: Path) -> None:
    held = load_file(folder / ONE)
    tensors(folder, TWO, lambda values: values.update({first(held): held[first(held)]}))


def too_few(folder: Path) -> None:
    tensors(folder, TWO, lambda values: values.pop(first(values)))


def not_a_number(folder: Path) -> None:
    def change(values: dict[str, torch.Tensor]) -> None:
        for name in values:
            values[name] = values[name].bfloat16()
        values[first(values)].view(-1)[3] = float("nan")

    tensors(folder, TWO, change)


def infinite(folder: Path) -> None:
    def change(values: dict[str, torch.Tensor]) -> None:
        values[first(values)].view(-1)[3] = float("inf")

    tensors(folder, ONE, change)


def cast(dtype: torch.dtype) -> Callable[[Path], None]:
    """The first tensor of the first file in another type."""

    def change(values: dict[str, torch.Tensor]) -> None:
        values[first(values)] = values[first(values)].to(dtype)

    return lambda folder: tensors(folder, ONE, change)


def pickled(folder: Path) -> None:
    for name in (ONE, TWO, INDEX):
        (folder / name).unlink()
    payload = pickle.dumps(Payload(folder.parent / "canary"))
    (folder / "pytorch_model.bin").write_bytes(payload)


def pickle_by_index(folder: Path) -> None:
    (folder / "x.bin").write_bytes(pickle.dumps(Payload(folder.parent / "canary")))
    names(folder, lambda found: found.update({min(found): "x.bin"}))


def pickle_in_place(folder: Path) -> None:
    payload = pickle.dumps(Payload(folder.parent / "canary"))
    (folder / TWO).write_bytes(payload)


def own_code(folder: Path) -> None:
    code = f"open({str(folder.parent / 'canary')!r}, 'w').close()\n"
    for name in ("configuration_own.py", "modeling_own.py"):
        (folder / name).write_text(code)
    maps = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    rewrite(folder, "config.json", auto_map=maps)


def other_tokenizer_size(folder: Path) -> None:
    """The last pieces of text are not in its vocabulary."""
    data = json.loads((folder / "tokenizer.json").read_text())
    model = data["model"]
    cut = {text: token for text, token in model["vocab"].items() if token < 300}
    model["merges"] = [
        pair
        for pair in model["merges"]
        if "".join(pair if isinstance(pair, list) else pair.split(" ")) in cut
    ]
    model["vocab"] = cut
    (folder / "tokenizer.json").write_text(json.dumps(data))


def config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, "config.json", **fields)


def text(name: str, content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(content)

    return change


ROPE = {"rope_theta": 10_000.0, "factor": 2.0}
STRANGE: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "a shorter file": (second(lambda data: data[:-100]), VALIDATION, "the weights are damaged"),
    "a file of noise": (second(lambda _: b"\xff" * 5000), VALIDATION, "the weights are damaged"),
    "a huge header": (
        second(lambda data: (1 << 50).to_bytes(8, "little") + data[8:]),
        VALIDATION, "the weights are damaged",
    ),
    "a web page": (
        second(lambda _: b"<!DOCTYPE html><title>not found</title>"),
        VALIDATION, "the weights are damaged",
    ),
    "a pointer": (
        second(lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
        VALIDATION, "the weights are damaged",
    ),
    "a missing file": (lambda folder: (folder / TWO).unlink(), INPUT, f"there is no {TWO}"),
    "a file elsewhere": (outside, VALIDATION, "the index names '../model-"),
    "no map": (text(INDEX, '{"metadata": {}}'), VALIDATION, f"the {INDEX} is malformed"),
    "a list for a name": (
        lambda folder: names(folder, lambda found: found.update({min(found): [TWO]})),
        VALIDATION, "the index names",
    ),
    "no file named": (lambda folder: names(folder, dict.clear), VALIDATION, "names no file"),
    "no index": (text(INDEX, "[" * 100_000), VALIDATION, "is malformed"),
    "a tensor twice": (doubled, VALIDATION, "two files hold a tensor"),
    "a tensor too few": (too_few, INPUT, "1 missing (lm_head.weight)"),
    "NaN": (not_a_number, VALIDATION, "1 weights of "),
    "infinity": (infinite, VALIDATION, "not finite"),
    "int8": (cast(torch.int8), INPUT, "quantised"),
    "float8": (cast(torch.float8_e4m3fn), INPUT, "quantised"),
    "pickles": (pickled, INPUT, "pytorch_model.bin is a pickle"),
    "a pickle in the index": (pickle_by_index, VALIDATION, "the index names 'x.bin'"),
    "a pickle by another name": (pickle_in_place, VALIDATION, "the weights are damaged"),
    "code of its own": (own_code, INPUT, "auto_map"),
    "another class": (config(model_type="own"), INPUT, "model_type own is not one"),
    "another architecture": (
        config(architectures=["LlamaForSequenceClassification"]), INPUT, "not that of a language",
    ),
    "unknown RoPE": (
        config(rope_parameters={**ROPE, "rope_type": "spiral"}), INPUT, "spiral",
    ),
    "dynamic RoPE": (
        config(rope_parameters={**ROPE, "rope_type": "dynamic"}), INPUT, "dynamic",
    ),
    "a quantised configuration": (
        config(quantization_config={"bits": 4}), INPUT, "quantization_config",
    ),
    "a larger model": (config(num_hidden_layers=4), INPUT, "missing"),
    "a wider model": (config(hidden_size=64, head_dim=16), VALIDATION, "other shapes"),
    "many layers": (config(num_hidden_layers=1 << 40), INPUT, "at least 1 and at most 8,192"),
    "no layers": (config(num_hidden_layers=0), INPUT, "at least 1 and at most 8,192"),
    "a text for a number": (config(hidden_size="32"), INPUT, "not of the right type"),
    "fewer ids": (config(vocab_size=100), USAGE, "the model knows 100"),
    "another tokenizer": (other_tokenizer_size, VALIDATION, "is not that of the data"),
    "a tokenizer that is none": (text("tokenizer.json", "{}"), INPUT, "tokenizer"),
}  # fmt: skip


def train(lock: Path, folder: Path, place: str) -> int:
    """A step of a run that begins with the model there: its exit code."""
    values = config_values(lock, folder / "run")
    del values["model"]
    values["trainer"] |= {
        "load_path": place, "load_trainer_state": False, "load_optim_state": False,
        "hard_stop": {"value": 1, "unit": "steps"},
    }  # fmt: skip
    (folder / "train.yaml").write_text(yaml.safe_dump(values))
    return int(main([str(folder / "train.yaml")]))


@pytest.mark.parametrize(
    ("name", "where"),
    [*((name, "folder") for name in STRANGE), *((name, "bucket") for name in [*STRANGE][::3])],
)
def test_it_is_refused_in_time(
    llama: Path,
    tiny_mixture: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    where: str,
) -> None:
    change, code, said = STRANGE[name]
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    change(folder)
    place = str(folder)
    if where == "bucket":
        place = f"memory://{uuid.uuid4().hex}/model"
        for path in folder.iterdir():
            Store(place).put(path.name, path.read_bytes())
    got = train(tiny_mixture, tmp_path, place)
    error = capsys.readouterr().err
    assert (got, said in error) == (code, True), error
    assert "Traceback" not in error
    assert "fix: " in error
    assert f"where: {place}" in error
    assert not list((tmp_path / "run").glob("step*"))
    assert not (tmp_path / "canary").exists()


def test_as_it_is_it_trains(llama: Path, tiny_mixture: Path, tmp_path: Path) -> None:
    assert train(tiny_mixture, tmp_path, str(llama)) == 0
    assert (tmp_path / "run/step00000001").is_dir()
