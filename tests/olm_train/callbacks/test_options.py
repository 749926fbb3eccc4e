"""A test names each option of each registered callback, and `enabled: false` leaves it out."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from olm_data.config.convert import parse
from olm_data.config.values import Values
from olm_train.callbacks.base import Callback
from olm_train.callbacks.config import CallbacksConfig
from olm_train.callbacks.group import Callbacks

TESTS = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "BatchSizeSchedulerCallback": "olm_train/callbacks/test_schedulers.py",
    "CheckpointerConfig": "olm_train/checkpoint/test_save.py",
    "CheckpointerConfig.enabled": "olm_train/callbacks/test_every_run.py",
    "ConfigSaverCallback": "olm_train/extensions/monitors/test_monitors.py",
    "ConsoleLoggerCallback": "olm_train/callbacks/test_every_run.py",
    "DownstreamEvaluatorCallback": "olm_train/extensions/downstream/test_tasks.py",
    "EMACallback": "olm_train/extensions/averaging/test_model_merge.py",
    "EarlyStoppingCallback": "olm_train/callbacks/test_evaluations.py",
    "EnvironmentCallback": "olm_train/callbacks/test_every_run.py",
    "EnvironmentCallback.snapshot": "faults/test_60_62_65_66_resumes.py",
    "GPUMemoryMonitorCallback": "olm_train/extensions/monitors/test_monitors.py",
    "GarbageCollectorCallback": "olm_train/callbacks/test_every_run.py",
    "GradientNoiseScaleCallback": "olm_train/extensions/monitors/test_monitors.py",
    "LMEvaluatorCallback": "olm_train/callbacks/test_evaluations.py",
    "MetricSaverCallback": "olm_train/extensions/monitors/test_monitors.py",
    "ModelMergeCallback": "olm_train/extensions/averaging/test_model_merge.py",
    "ReplicaCheckerCallback.interval": "faults/test_45_46_59_61_ranks.py",
    "ReplayCheckerCallback.steps": "faults/test_60_62_65_66_resumes.py",
    "ReplayCheckerCallback.tolerance": "faults/test_60_62_65_66_resumes.py",
    "ReplayCheckerCallback.strict": "faults/test_60_62_65_66_resumes.py",
    "SamplesCallback": "olm_train/extensions/generate/test_command.py",
    "SequenceLengthSchedulerCallback": "olm_train/callbacks/test_schedulers.py",
    "SpeedMonitorCallback": "olm_train/callbacks/test_every_run.py",
    "SpeedMonitorCallback.data_wait_alarm": "faults/test_50_51_remote_data.py",
    "StabilityMonitorCallback": "olm_train/extensions/monitors/test_monitors.py",
    "TrackerCallback.name": "olm_train/extensions/tracking/test_callback.py",
    "TrackerCallback.project": "olm_train/extensions/tracking/test_callback.py",
    "TrackioCallback": "olm_train/extensions/tracking/test_comet.py",
    "WandBCallback.entity": "olm_train/extensions/tracking/test_callback.py",
    "WandBCallback.group": "olm_train/extensions/tracking/test_callback.py",
    "WandBCallback.tags": "olm_train/extensions/tracking/test_callback.py",
    "WandBCallback.notes": "olm_train/extensions/tracking/test_callback.py",
    "WandBCallback.cancel_tags": "olm_train/extensions/tracking/test_wandb.py",
    "WandBCallback.cancel_check_interval": "olm_train/extensions/tracking/test_wandb.py",
    "WatchdogCallback.timeout": "support/hung_rank.py",  # of faults/test_45_46_59_61_ranks.py
}
"""Options whose test is not in the file of their class: a process, a fault, or several classes."""
NEEDED: dict[str, dict[str, Any]] = {
    "lm_evaluator": {"datasets": {"held": "held"}},
    "downstream_evaluator": {"tasks": {"quiz": "quiz"}},
    "samples": {"prompts": ["def "]},
}
"""What they cannot be made without."""


def kind_of(name: str) -> Any:
    return CallbacksConfig.kinds()[name]


NAMES = list(CallbacksConfig.kinds())
OPTIONS = [
    pytest.param(kind_of(name), each.name, id=f"{name}.{each.name}")
    for name in NAMES
    for each in fields(kind_of(name))
]


@pytest.mark.parametrize(("kind", "option"), OPTIONS)
def test_a_test_names_each_option(kind: Any, option: str) -> None:
    owner = next(base for base in kind.__mro__ if option in vars(base).get("__annotations__", {}))
    *rooms, module = owner.__module__.split(".")
    files = [TESTS.joinpath(*rooms, f"test_{module}.py")]
    *rooms, module = kind.__module__.split(".")
    files.append(TESTS.joinpath(*rooms, f"test_{module}.py"))
    if other := ELSEWHERE.get(f"{owner.__name__}.{option}", ELSEWHERE.get(kind.__name__)):
        files = [TESTS / other]
    if option == "enabled" and issubclass(kind, Callback):
        return  # below
    named = any(re.search(rf"\b{option}\b", path.read_text()) for path in files if path.exists())
    assert named, f"no test in {files} names {option} of {kind.__name__}"


def test_what_is_tested_elsewhere_is_an_option_still() -> None:
    known = {kind_of(name).__name__ for name in NAMES} | {
        f"{base.__name__}.{each.name}"
        for name in NAMES
        for base in kind_of(name).__mro__
        if base.__name__ != "object" and hasattr(base, "__dataclass_fields__")
        for each in fields(base)
    }
    assert set(ELSEWHERE) <= known


@pytest.mark.parametrize("name", [n for n in NAMES if issubclass(kind_of(n), Callback)])
def test_enabled_false_leaves_a_callback_out(name: str) -> None:
    options = NEEDED.get(name, {}) | {"enabled": False}
    config = parse(CallbacksConfig, Values({name: options}))
    trainer: Any = type("Run", (), {"data_loader": None})()
    assert name not in Callbacks({name: config.build()[name]}, trainer)
    assert config.build()[name].enabled is False
    (field,) = (each for each in fields(kind_of(name)) if each.name == "enabled")
    assert field.default is True
