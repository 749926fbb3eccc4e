"""Row 40: a pickle in any file of a checkpoint or an export runs nothing, whatever is done with it.

The attacker writes every file: the manifest's digests are made good after each change.
"""

from __future__ import annotations

import hashlib
import io
import json
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
from support.false_files import Payload
from support.runs import one_step_trainer
from support.seal import seal

from olm_train.extensions.downstream.command import main as evaluate
from olm_train.extensions.generate.command import main as generate
from olm_train.extensions.hf_export.command import main as export

pytestmark = pytest.mark.xdist_group("pickles")  # its fixtures are made once

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
