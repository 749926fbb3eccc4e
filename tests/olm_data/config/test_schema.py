"""A misspelt field is answered before torch is imported, by a schema of the same types."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.runs import config_values, environment

from olm_data.config.convert import as_dict
from olm_data.config.schema import check_names
from olm_data.config.values import Values
from olm_data.errors import UsageError, suggest
from olm_train.run.command import SCHEMA
from olm_train.run.config import RunConfig

WRITTEN = json.loads(SCHEMA.read_bytes())

MISTAKES = [
    "--sede=1",
    "--model.n_layer=2",
    "--train_module.optim.lrr=1",
    "--train_module.optim={name: adamW}",
    "--train_module.optim={name: muon, no_such: 1}",
    "--train_module.scheduler={name: cosine}",
    "--train_module.scheduler={name: wsd, warm_up: 3}",
    "--trainer.callbacks.chekpointer={}",
    "--trainer.callbacks.lm_evaluator.eval_intervall=3",
    "--trainer.max_duration.units=steps",
    "--trainer.callbacks.batch_size_scheduler.schedule=[{valeu: 3}]",
    "--train_module.dp_config={nam: fsdp}",
]


def values(lock: Path, folder: Path, *options: str) -> Values:
    found = Values(config_values(lock, folder), folder=folder)
    for option in options:
        found.override(option)
    return found


@pytest.mark.parametrize("option", MISTAKES)
def test_a_misspelt_name_is_found_as_the_types_find_it(
    option: str, tiny_mixture: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as early:
        check_names(WRITTEN, values(tiny_mixture, tmp_path, option))
    with pytest.raises(UsageError) as late:
        RunConfig.resolve(values(tiny_mixture, tmp_path, option))
    assert str(early.value) == str(late.value)
    assert early.value.fix


@pytest.mark.parametrize(
    "option",
    [
        "--model={preset: olmo2-1b}",
        "--model={depth: 4, attention: {qk_norm: head}}",
        "--train_module.scheduler=null",
        "--train_module.optim=muon",
        "--model.norm=layer_norm",
        "--trainer.callbacks.speed_monitor=null",
        '--trainer.callbacks.lm_evaluator.datasets["any name"]=x',
    ],
)
def test_what_the_types_take_passes(option: str, tiny_mixture: Path, tmp_path: Path) -> None:
    check_names(WRITTEN, values(tiny_mixture, tmp_path, option))


def test_a_resolved_configuration_passes(tiny_mixture: Path, tmp_path: Path) -> None:
    plain: dict[str, Any] = as_dict(RunConfig.resolve(values(tiny_mixture, tmp_path)))
    check_names(WRITTEN, Values(plain))


def test_a_typo_is_answered_without_torch(tiny_mixture: Path, tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(json.dumps(config_values(tiny_mixture, tmp_path / "run")))
    script = (
        "import sys; from olm_train.run.command import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(config), "--trainer.sav_folder", "x"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 2
    assert "did you mean 'save_folder'?" in done.stderr
    assert done.stdout.strip() == "False"


def test_the_same_name_in_other_letters_is_the_nearest() -> None:
    assert suggest("adamW", ["adam", "adamw", "lion"]) == "did you mean 'adamw'?"
    assert suggest("ADAM", ["adam", "adamw"]) == "did you mean 'adam'?"
