"""Going on with a run: which checkpoint, whether it belongs to this run, and its state put back.

clean partial folders -> newest that verifies -> same lock, model and batch? -> loader, tensors,
                                                                                callbacks, step
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olm_data.errors import ConflictError, OlmError, ValidationError
from olm_train.checkpoint.load import Checkpoint, newest_checkpoint
from olm_train.checkpoint.manifest import CONFIG, Kind, Manifest, candidates
from olm_train.checkpoint.retention import remove_partial
from olm_train.config import differences

if TYPE_CHECKING:
    from olm_train.trainer import Trainer


class LoadStrategy(StrEnum):
    """What a run does with checkpoints in its save folder."""

    if_available = "if_available"
    """Go on from the newest one that verifies; start anew when there is none."""
    always = "always"
    """Go on from the newest one that verifies; an error when there is none."""
    never = "never"
    """Start anew; an error when there is one, since its run would be lost."""


def restore(trainer: Trainer) -> None:
    """Put a trainer where its newest good checkpoint left off; every rank calls it.

    Of a run that has ended, only the step is read.

    Raises:
        ConflictError: there is a checkpoint and the strategy is `never`.
        ValidationError: there are checkpoints but none verifies, there is none and the strategy is
            `always`, or the newest belongs to another mixture, model or batch size.
    """
    folder, world = trainer.save_folder, trainer.world
    world.on_main(lambda: remove_partial(folder))
    found = world.on_main(lambda: [path.name for path in candidates(folder)])
    if found and trainer.load_strategy is LoadStrategy.never:
        raise ConflictError(
            f"there is a run here already, with the checkpoint {found[0]}",
            where=str(folder),
            why="load_strategy is `never`: a new run would write over it",
            fix="choose another trainer.save_folder, or remove the old run",
        )
    damaged: list[OlmError] = []
    checkpoint = newest_checkpoint(folder, world, damaged.append)
    for error in damaged:
        trainer.say(f"warning: {error.what}")
    if checkpoint is not None:
        if damaged:
            trainer.say(f"warning: falling back to the checkpoint of step {checkpoint.step:,}")
        _resume(trainer, checkpoint)
    elif damaged or trainer.load_strategy is LoadStrategy.always:
        raise ValidationError(
            "there is no usable checkpoint",
            where=str(folder),
            why="; ".join(error.what for error in damaged)
            or "load_strategy is `always` and there is none at all",
            fix="restore one, or start a new run in another trainer.save_folder",
        )


def _resume(trainer: Trainer, checkpoint: Checkpoint) -> None:
    state = checkpoint.state()
    trainer.data_loader.load_state_dict(state["data_loader"])
    _refuse_changes(trainer, checkpoint, state)
    if state["step"] < trainer.stop_step:
        tensors = trainer.train_module.state_dict()
        checkpoint.load_tensors(tensors, trainer.world)
        trainer.train_module.load_state_dict(tensors)
        for name, callback_state in state["callbacks"].items():
            if name in trainer.callbacks:
                trainer.callbacks[name].load_state_dict(callback_state)
        trainer.say(f"resuming from {checkpoint.folder} at step {state['step']:,}")
        if state["max_steps"] != trainer.max_steps:
            trainer.say(
                f"note: the schedule is {trainer.max_steps:,} steps long, it was "
                f"{state['max_steps']:,}; the learning rate follows the new length from here"
            )
    trainer.step, trainer.resumed = state["step"], True
    trainer.checkpoints = trainer.world.on_main(lambda: _known(trainer.save_folder, checkpoint))


def _refuse_changes(trainer: Trainer, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
    old = {
        "model": (checkpoint.read_json(CONFIG) or {}).get("model"),
        "data_loader": {"global_batch_size": state["global_batch_size"]},
    }
    new = {
        "model": trainer.config["model"],
        "data_loader": {"global_batch_size": trainer.data_loader.global_batch_size},
    }
    changed = differences(old, new)
    if changed:
        raise ValidationError(
            f"the checkpoint belongs to another configuration: {'; '.join(changed)}",
            where=str(checkpoint.folder),
            why="it could not go on as the same run",
            fix="use the configuration of the checkpoint (its config.json), or start a new run in "
            "another trainer.save_folder",
        )


def _known(save_folder: Path, checkpoint: Checkpoint) -> dict[int, Kind]:
    """Return the checkpoints up to the one that was loaded; a damaged newer one does not count."""
    known = {}
    for folder in candidates(save_folder):
        with contextlib.suppress(ValidationError):  # older than the good one, and never used
            manifest = Manifest.read(folder)
            if manifest.step <= checkpoint.step:
                known[manifest.step] = manifest.kind
    return known
