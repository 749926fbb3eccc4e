"""Checkpoints as folders for transformers and its kin, made beside the run by other processes.

    step N -> permanent checkpoint -> complete -> queue -> one child at a time -> OUTPUT/stepN/

What a child does is `olm-train export --to hf`. It reads the checkpoint from where it lies, so that
no step waits and no loss changes; a child that fails is said and counted, and the run goes on. It
ends with the run, whatever ends that; what it had not finished is no folder, and is made by the
next start of the same run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from olm_data.bounded_json import JsonObject
from olm_data.config.hints import FilePath, PositiveFloat, PositiveInt
from olm_data.errors import UsageError
from olm_data.model_receipt import Dtype, Verify
from olm_data.run_log.metric_names import HF_EXPORT_FAILURES
from olm_data.storage.store import Store
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.manifest import MANIFEST, Kind, folder_name, step_of
from olm_train.extensions.hf_export.beside import Beside
from olm_train.extensions.hf_export.job import family_of_run, parse_size

LOG = "hf-export.log"
_LOOK_SECONDS = 0.2


@dataclass(kw_only=True)
class HFExporterCallback(Callback):
    """Exports for other programs while a run goes on, and at its end.

    Attributes:
        enabled: export, where `hf_exporter` is given at all.
        export_interval: steps between exports, each of a permanent checkpoint; null: none before
            the end.
        export_on_finish: also after the last step.
        output: folder of the exports, each as `stepNNNNNNNN`; local or remote; default: `hf` in the
            save folder.
        dtype: of the weights.
        shard_size: bytes of weights in a file, at most.
        verify: who reads it first, as of `olm-train export`; `transformers` and `auto` compute with
            the model, on the CPU, which takes memory beside the run.
        timeout: seconds that the end of the run waits for exports; what is not done then is ended,
            and made by the next start of the same command.
    """

    enabled: bool = True
    export_interval: PositiveInt | None = None
    export_on_finish: bool = True
    output: FilePath | None = None
    dtype: Dtype = "bfloat16"
    shard_size: Annotated[str, Meta(min_length=1)] = "5GB"
    verify: Verify = "files"
    timeout: PositiveFloat = 1800.0

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_size(self.shard_size)  # refused here, not by a child
        if self.export_interval is None and not self.export_on_finish:
            raise UsageError(
                "exports nothing: neither at an interval nor at the end",
                where="export_on_finish",
                fix="give export_interval, or enabled: false",
            )
        self._queue: list[int] = []
        self._done: set[int] = set()
        self._failures = 0
        self._child: tuple[int, Beside] | None = None

    def state_dict(self) -> JsonObject:
        running = [] if self._child is None else [self._child[0]]
        return {
            "exported": sorted(self._done),
            "pending": [*running, *self._queue],
            "failures": self._failures,
        }

    def load_state_dict(self, state: JsonObject) -> None:
        self._done = set(state["exported"])
        self._queue = list(state["pending"])
        self._failures = state["failures"]

    def post_attach(self) -> None:
        trainer = self.trainer
        self._class()  # refused before the first step
        if not trainer.checkpoints.config.enabled:
            raise UsageError(
                "hf_exporter has no checkpoints to export",
                where="trainer.callbacks.checkpointer.enabled",
                fix="let checkpoints be saved, or leave hf_exporter out",
            )

    def pending(self) -> list[str]:
        missing = self.trainer.world.on_main(self._missing)
        return [f"export of step {step:,}" for step in missing]

    def pre_train(self) -> None:
        self._queue = self.trainer.world.on_main(self._missing)
        self._look()

    def pre_step(self, batches: Sequence[Any]) -> None:
        if self._at_interval(self.trainer.step + 1):
            self.block_ephemeral_checkpoints()  # it would be gone before it is read

    def post_step(self) -> None:
        if self._at_interval(self.trainer.step):
            self.trainer.save_checkpoint(Kind.permanent)
        self.unblock_ephemeral_checkpoints()
        self._look()

    def post_checkpoint_saved(self, folder: str) -> None:
        step = step_of(folder.rstrip("/").rpartition("/")[2])
        if step is not None and self._is_due(step) and step not in self._done:
            if step not in self._queue:
                self._queue.append(step)
            self._look()

    def post_train(self) -> None:
        trainer, until = self.trainer, time.monotonic() + self.timeout
        with trainer.pause():
            while trainer.world.any(trainer.world.main and bool(self._child or self._queue)):
                if trainer.ask_to_stop() or trainer.world.any(time.monotonic() > until):
                    return  # said by close
                self._look()
                time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        if self._child is not None:
            step, child = self._child
            self._child = None
            child.end()
            self._queue.insert(0, step)
        for step in self._queue if self.trainer.world.main else ():
            self.trainer.say(
                f"note: the export of step {step:,} is not done; the same command makes it"
            )

    def _at_interval(self, step: int) -> bool:
        return self.export_interval is not None and step > 0 and step % self.export_interval == 0

    def _is_due(self, step: int) -> bool:
        last = self.export_on_finish and step >= self.trainer.stop_step
        return self._at_interval(step) or last

    def _missing(self) -> list[int]:
        """Return steps whose export was begun or due, and is not there; rank 0 asks."""
        step = self.trainer.step
        wanted = {*self._queue, *([step] if self._is_due(step) else [])} - self._done
        folder = Store(self.trainer.save_folder)
        return [n for n in sorted(wanted) if folder.child(folder_name(n)).exists(MANIFEST)]

    def _look(self) -> None:
        """Take what a child has done, and begin the next one; rank 0 does it."""
        trainer = self.trainer
        if not trainer.world.main:
            self._queue = []
            return
        if self._child is not None:
            step, child = self._child
            failed = child.failed()
            if failed is None:
                return
            self._child = None
            if failed:
                self._fail(step, failed)
            else:
                self._done.add(step)
                trainer.say(f"exported step {step:,} as {self._class()}: {self._output(step)}")
        if self._queue:
            step = self._queue.pop(0)
            try:
                self._child = step, Beside(self._arguments(step), trainer.work_dir / LOG)
            except OSError as error:
                self._fail(step, str(error))

    def _class(self) -> str:
        run = self.trainer
        lock = getattr(run.data_loader, "lock", None)
        return family_of_run(run.train_module.model_config, lock).architecture

    def _fail(self, step: int, why: str) -> None:
        self._failures += 1
        self.trainer.say(f"warning: the export of step {step:,} failed: {why}")
        self.trainer.record_metric(HF_EXPORT_FAILURES, float(self._failures))

    def _output(self, step: int) -> str:
        folder = self.output or f"{self.trainer.save_folder.rstrip('/')}/hf"
        return f"{folder.rstrip('/')}/{folder_name(step)}"

    def _arguments(self, step: int) -> list[str]:
        options = {
            "output": self._output(step),
            "dtype": self.dtype,
            "shard-size": self.shard_size,
            "verify": self.verify,
        }
        checkpoint = f"{self.trainer.save_folder.rstrip('/')}/{folder_name(step)}"
        return [checkpoint, "--to=hf", *(f"--{name}={value}" for name, value in options.items())]
