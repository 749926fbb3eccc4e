"""FAULTS rows 40 and 64: a stranger's checkpoint or export, its digests all right."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from support.command import program
from support.false_files import Payload
from support.runs import one_step_trainer
from support.seal import seal

from olm_data.bounded_json import digest
from olm_data.errors import OlmError
from olm_train.checkpoint.load import open_checkpoint
from olm_train.distributed.world import World
from olm_train.extensions.downstream.command import main as evaluate
from olm_train.extensions.generate.command import main as generate
from olm_train.extensions.hf_export.command import main as export

pytestmark = pytest.mark.xdist_group("strangers")  # its fixture is made once


STEP = "step00000001"


FILES = (
    *(
        "model_and_optim/index.json",
        "model_and_optim/rank00000.safetensors",
        "train.json",
        "config.json",
    ),
    *("mixture.lock.json", "tokenizer.json", "manifest.json"),
    *(
        "model_and_optim/.metadata",
        "model_and_optim/__0_0.distcp",
        "model_and_optim/rank00001.safetensors",
    ),
)


EXPORTED = ("model.safetensors", "config.json", "tokenizer.json", "mixture.lock.json", "run.json")


def pickled(canary: Path) -> bytes:
    return pickle.dumps(Payload(canary))


def saved_by_torch(canary: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"weight": Payload(canary)}, file)
    return file.getvalue()


def saved_by_numpy(canary: Path) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Payload(canary)], dtype=object), allow_pickle=True)
    return file.getvalue()


FORMS = (pickled, saved_by_torch, saved_by_numpy)


@pytest.fixture(scope="module")
def saved(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    one_step_trainer(tiny_mixture, folder).fit()
    return folder


def use(command: Any, *arguments: object) -> int:
    """Run a command; what is wrong must be refused, not run into."""
    result = CliRunner().invoke(command, [str(item) for item in arguments])
    assert result.exit_code in (0, 3, 4), result.output
    return result.exit_code


def all_uses(place: Path, lock: Path, tmp_path: Path) -> list[int]:
    """Do with a run, checkpoint or export whatever the program can do; return the exit codes."""
    return [
        use(generate, place, "--prompt", "the", "--max-new-tokens", 1),
        use(export, place, "--output", tmp_path / "out"),
        use(evaluate, place, "--data", lock.parent / "held"),
    ]


@pytest.mark.parametrize("form", FORMS, ids=[form.__name__ for form in FORMS])
def test_40_the_payload_works_where_somebody_loads_it(
    form: Callable[[Path], bytes], tmp_path: Path
) -> None:
    file, canary = io.BytesIO(form(tmp_path / "canary")), tmp_path / "canary"
    load = {
        pickled: pickle.load,
        saved_by_torch: lambda file: torch.load(file, weights_only=False),
        saved_by_numpy: lambda file: np.load(file, allow_pickle=True),
    }
    load[form](file)
    assert canary.exists()


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, id=form.__name__, marks=pytest.mark.slow if form is not pickled else ())
        for form in FORMS
    ],
)
@pytest.mark.parametrize("name", FILES)
def test_40_no_file_of_a_checkpoint_runs_what_it_holds(
    name: str, form: Callable[[Path], bytes], saved: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    run, canary = shutil.copytree(saved, tmp_path / "run"), tmp_path / "canary"
    put(run / STEP / name, form(canary))
    if name != "manifest.json":
        seal(run / STEP)
    all_uses(run / STEP, tiny_mixture, tmp_path)
    with suppress(ValueError):  # an OlmError of every kind that refuses
        one_step_trainer(tiny_mixture, run).restore()
    with suppress(ValueError):
        begin = f"--trainer.load_path={run}"
        one_step_trainer(tiny_mixture, tmp_path / "begun", begin).restore()
    assert not canary.exists()


@pytest.mark.parametrize("name", EXPORTED)
def test_40_no_file_of_an_export_runs_what_it_holds(
    name: str, saved: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    place, canary = tmp_path / "exported", tmp_path / "canary"
    assert use(export, saved, "--output", place) == 0
    for number, form in enumerate(FORMS):
        put(place / name, form(canary))
        if name != "config.json":
            about = json.loads((place / "config.json").read_bytes())
            for entry in (about["weights"], *about["carried"]):
                data = (place / entry["file"]).read_bytes()
                entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            (place / "config.json").write_text(json.dumps(about))
        codes = all_uses(place, tiny_mixture, tmp_path / str(number))
        assert any(codes)
        with suppress(ValueError):
            options = (f"--trainer.load_path={place}", "--trainer.load_trainer_state=false")
            trainer = one_step_trainer(
                tiny_mixture, tmp_path / "begun", *options, "--trainer.load_optim_state=false"
            )
            trainer.restore()
    assert not canary.exists()


def put(path: Path, data: bytes) -> None:
    """Write a payload where another file may lie, at least as long as that."""
    size = path.stat().st_size if path.exists() else 0
    path.write_bytes(data.ljust(size, b"\0"))


Json = dict[str, Any]


def edit(name: str, change: Callable[[Json], object]) -> Callable[[Path], None]:
    """A change of one JSON file of a checkpoint."""

    def apply(folder: Path) -> None:
        value = json.loads((folder / name).read_bytes())
        change(value)
        text = json.dumps(value, separators=(",", ":"), sort_keys=True)
        (folder / name).write_text(f"{text}\n")

    return apply


def index(change: Callable[[Json], object]) -> Callable[[Path], None]:
    return edit("model_and_optim/index.json", change)


def tensor(change: Callable[[Json], object]) -> Callable[[Path], None]:
    return index(lambda value: change(value["tensors"]["model.norm.weight"]))


def model(**fields: object) -> Callable[[Path], None]:
    return edit("config.json", lambda value: value["model"].update(fields))


def deep(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text("[" * 200_000 + "]" * 200_000) and None


def swap(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else under the name of a file."""

    def apply(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return apply


def link(path: Path) -> None:
    outside = path.parents[3] / "outside"
    outside.write_bytes(b"a secret")
    path.symlink_to(outside)


def share(value: Json) -> None:
    """Two tensors of the same bytes: more than there are."""
    one, other = value["tensors"]["model.norm.weight"], "model.blocks.0.attention_norm.weight"
    value["tensors"][other]["chunks"] = one["chunks"]


CHANGES: dict[str, Callable[[Path], object]] = {
    "a shape beyond the bytes": tensor(lambda t: t.update(shape=[1 << 50])),
    "a chunk as large": tensor(
        lambda t: t.update(shape=[1 << 50], chunks=[[0, 0, [0], [1 << 50]]])
    ),
    "a chunk of another file": tensor(lambda t: t.update(chunks=[[7, 0, [0], [16]]])),
    "a chunk left out": tensor(lambda t: t.update(chunks=[])),
    "a chunk twice": tensor(lambda t: t.update(chunks=t["chunks"] * 2)),
    "bytes used twice": index(share),
    "a negative size": tensor(lambda t: t.update(chunks=[[0, 0, [0], [-16]]])),
    "a number beyond 64 bits": tensor(lambda t: t.update(shape=[1 << 90])),
    "a dtype that is code": tensor(lambda t: t.update(dtype="os.system")),
    "a hundred dimensions": tensor(lambda t: t.update(shape=[1] * 100)),
    "a file elsewhere": index(lambda v: v.update(files=["../../../outside"])),
    "an unknown key": index(lambda v: v.update(more=1)),
    "another version": index(lambda v: v.update(version=2)),
    "an index nested deeply": deep("model_and_optim/index.json"),
    "values nested deeply": lambda folder: (folder / "model_and_optim/index.json").write_text(
        '{"files":[],"format":"olm-tensors","tensors":{},"values":{"a":'
        + "[" * 100_000
        + "]" * 100_000
        + '},"version":1}\n'
    ),
    "a model of 2^24 squared": model(d_model=1 << 24, n_heads=1),
    "a model of a billion layers": model(n_layers=10**9),
    "a vocabulary padded to 2^60": model(vocab_multiple=1 << 60),
    "a model that no program knows": model(kind="os.system"),
    "no model": edit("config.json", lambda value: value.pop("model")),
    "a configuration nested deeply": deep("config.json"),
    "a state nested deeply": deep("train.json"),
    "a state of other kinds": edit("train.json", lambda value: value.update(step="1")),
    "a lock nested deeply": deep("mixture.lock.json"),
    "a tokenizer that is a link": swap("tokenizer.json", link),
    "tensors that are a link": swap("model_and_optim/rank00000.safetensors", link),
    "tensors that are a pipe": swap("model_and_optim/rank00000.safetensors", os.mkfifo),
    "a state that is a pipe": swap("train.json", os.mkfifo),
    "a lock that is a folder": swap("mixture.lock.json", Path.mkdir),
}


def seal_all(folder: Path) -> None:
    """Make the manifest say what lies there; pipes and links as if they were files."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    before = {entry["name"]: entry for entry in manifest["files"]}
    odd = [name for name in before if not (folder / name).is_file() or (folder / name).is_symlink()]
    for name in odd:
        os.rename(folder / name, folder.parent / "odd")
        (folder / name).write_bytes(b"")
    seal(folder)
    value = json.loads((folder / "manifest.json").read_bytes())
    for name in odd:
        os.unlink(folder / name)
        os.rename(folder.parent / "odd", folder / name)
        size, data = (folder / name).lstat().st_size, b"a secret"
        entry = next(entry for entry in value["files"] if entry["name"] == name)
        entry |= {"bytes": size, "sha256": hashlib.sha256(data).hexdigest()}
    value.pop("digest")
    text = json.dumps(value | {"digest": digest(value)}, indent=1)
    (folder / "manifest.json").write_text(f"{text}\n")


@pytest.mark.parametrize("what", CHANGES)
def test_64_it_is_refused_by_whatever_reads_the_file(
    what: str, saved: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(saved, tmp_path / "run")
    CHANGES[what](run / STEP)
    seal_all(run / STEP)
    refusals = 0
    held = str(tiny_mixture.parent / "held")
    for command, more in (
        (generate, ["--max-new-tokens=1"]),
        (export, ["--output", str(tmp_path)]),
    ):
        result = CliRunner().invoke(command, [str(run / STEP), *more])
        assert result.exit_code in (0, 3, 4), (result.output, result.exception)
        assert "secret" not in result.output
        refusals += result.exit_code > 0
    result = CliRunner().invoke(evaluate, [str(run / STEP), "--data", held])
    assert result.exit_code in (0, 3, 4), (result.output, result.exception)
    try:
        one_step_trainer(tiny_mixture, run, "--trainer.hard_stop={value: 2, unit: steps}").restore()
    except OlmError:
        refusals += 1
    assert refusals


def test_64_files_that_are_only_written_anew_are_taken(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved / STEP, tmp_path / STEP)
    for name in ("model_and_optim/index.json", "config.json", "train.json"):
        edit(name, len)(folder)
    seal_all(folder)
    assert open_checkpoint(folder, World()).state.step == 1
    assert CliRunner().invoke(generate, [str(folder)]).exit_code == 0


def test_64_refusal_takes_little_memory_and_time(saved: Path, tmp_path: Path) -> None:
    run = shutil.copytree(saved, tmp_path / "run")
    model(d_model=1 << 24, n_heads=1, n_layers=10**9)(run / STEP)
    seal(run / STEP)
    result = program("-c", LIMITED, run / STEP)
    assert result.stdout == "refused\n", result.stderr


LIMITED = f"""
import sys, time
from support.memory import peak
from olm_train.checkpoint.portable import open_portable
found = open_portable(sys.argv[1], "latest", print)
before, used = peak(), time.process_time()
try:
    found.model()
except ValueError:
    assert peak() - before < {50 << 10}, "KiB"
    assert time.process_time() - used < 5
    print("refused")
"""


def test_64_weights_that_are_no_numbers_are_told(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved / STEP, tmp_path / STEP)
    path = folder / "model_and_optim" / "rank00000.safetensors"
    nan = torch.full((path.stat().st_size // 4,), torch.nan)
    path.write_bytes(nan.numpy().tobytes())
    seal(folder)
    assert open_checkpoint(folder, World()).step == 1
    result = CliRunner().invoke(generate, [str(folder)])
    assert (result.exit_code, "non-finite" in result.output) == (3, True)


def test_64_a_tokenizer_of_more_ids_than_the_model_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved / STEP, tmp_path / STEP)

    def more(lock: Json) -> None:
        lock["tokenizer"]["vocab_size"] = 1 << 40
        body = {k: v for k, v in lock.items() if k not in ("digest", "tools", "locations")}
        lock["digest"] = digest(body)

    edit("mixture.lock.json", more)(folder)
    seal(folder)
    result = CliRunner().invoke(generate, [str(folder)])
    assert (result.exit_code, "ids" in result.output) == (3, True)
