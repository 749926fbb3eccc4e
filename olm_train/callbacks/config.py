"""The section `trainer.callbacks` of train.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, cast

from olm_data.config.convert import Config
from olm_data.config.hints import Parts, Rest
from olm_train.callbacks.base import Callback
from olm_train.callbacks.batch_size_scheduler import BatchSizeSchedulerCallback
from olm_train.callbacks.config_saver import ConfigSaverCallback
from olm_train.callbacks.console_logger import ConsoleLoggerCallback
from olm_train.callbacks.early_stopping import EarlyStoppingCallback
from olm_train.callbacks.environment import EnvironmentCallback
from olm_train.callbacks.evaluator import LMEvaluatorCallback
from olm_train.callbacks.garbage_collector import GarbageCollectorCallback
from olm_train.callbacks.gpu_memory_monitor import GPUMemoryMonitorCallback
from olm_train.callbacks.lr_monitor import LRMonitorCallback
from olm_train.callbacks.metric_saver import MetricSaverCallback
from olm_train.callbacks.metrics_logger import MetricsLoggerCallback
from olm_train.callbacks.profiler import ProfilerCallback
from olm_train.callbacks.replay_checker import ReplayCheckerCallback
from olm_train.callbacks.replica_checker import ReplicaCheckerCallback
from olm_train.callbacks.samples import SamplesCallback
from olm_train.callbacks.sequence_length_scheduler import SequenceLengthSchedulerCallback
from olm_train.callbacks.speed_monitor import SpeedMonitorCallback
from olm_train.callbacks.stability_monitor import StabilityMonitorCallback
from olm_train.callbacks.watchdog import WatchdogCallback
from olm_train.checkpoint.policy import CheckpointerConfig
from olm_train.extensions.averaging.ema import EMACallback
from olm_train.extensions.averaging.model_merge import ModelMergeCallback
from olm_train.extensions.downstream.downstream_evaluator import DownstreamEvaluatorCallback
from olm_train.extensions.hf_export.hf_exporter import HFExporterCallback
from olm_train.extensions.ledger.loss_ledger import LossLedgerCallback
from olm_train.extensions.monitors.gap_monitor import GAPMonitorCallback
from olm_train.extensions.monitors.gradient_noise_scale import GradientNoiseScaleCallback
from olm_train.extensions.notices.notifier import NotifierCallback
from olm_train.extensions.tracking.comet import CometCallback
from olm_train.extensions.tracking.tensorboard import TensorBoardCallback
from olm_train.extensions.tracking.trackio import TrackioCallback
from olm_train.extensions.tracking.wandb import WandBCallback

OwnCallback = Annotated[Callback, Parts(Callback, "olm_train.callbacks")]


@dataclass(frozen=True, kw_only=True)
class CallbacksConfig(Config):
    """Callbacks by name; the first eight are there unless `enabled: false`, others where given.

    Attributes:
        checkpointer: saves checkpoints.
        console_logger: prints progress.
        metrics_logger: writes metrics.jsonl.
        speed_monitor: measures throughput.
        garbage_collector: collects Python's garbage at fixed steps.
        environment: saves versions and devices, and compares them at a resume.
        watchdog: ends a run that hangs.
        lr_monitor: logs the rates of parameter groups that have their own.
        batch_size_scheduler: [later sizes](#batch-size-schedules) of the global batch.
        sequence_length_scheduler: short rows at first.
        config_saver: writes the configuration under another name too, and lists the data files.
        lm_evaluator: loss, perplexity and bits per byte on held-out data sets.
        downstream_evaluator: scores of downstream tasks.
        samples: continues the same prompts after chosen steps.
        replica_checker: compares what several ranks hold.
        replay_checker: repeats logged steps at a resume, and compares.
        stability_monitor: counts spikes, and names their documents.
        early_stopping: ends a run that no longer gets better.
        gpu_memory_monitor: memory of the GPU by step.
        gap_monitor: statistics of gradients, activations and parameters; gradients on disk.
        gradient_noise_scale: the batch size beyond which more data a step help little.
        loss_ledger: writes the loss of every piece of a document.
        metric_saver: writes the latest metrics as JSON files.
        notifier: messages to Slack, Discord or any webhook.
        model_merge: saves the mean of the weights of the last steps.
        ema: saves an exponential moving average of the weights.
        hf_exporter: exports checkpoints for transformers and its kin.
        profiler: traces of a few steps, and what those were spent on.
        wandb: shows the run on Weights & Biases.
        comet: shows the run on Comet.
        tensorboard: writes event files for TensorBoard.
        trackio: shows the run in trackio.
        own: [callbacks of your own](../how-to/use-your-own-parts.md), under any names: `name` is
            the import path of the class, or the name that a package gives it; its fields go beside.
    """

    checkpointer: CheckpointerConfig = field(default_factory=CheckpointerConfig)
    console_logger: ConsoleLoggerCallback = field(default_factory=ConsoleLoggerCallback)
    metrics_logger: MetricsLoggerCallback = field(default_factory=MetricsLoggerCallback)
    speed_monitor: SpeedMonitorCallback = field(default_factory=SpeedMonitorCallback)
    garbage_collector: GarbageCollectorCallback = field(default_factory=GarbageCollectorCallback)
    environment: EnvironmentCallback = field(default_factory=EnvironmentCallback)
    watchdog: WatchdogCallback = field(default_factory=WatchdogCallback)
    lr_monitor: LRMonitorCallback = field(default_factory=LRMonitorCallback)
    batch_size_scheduler: BatchSizeSchedulerCallback | None = None
    sequence_length_scheduler: SequenceLengthSchedulerCallback | None = None
    config_saver: ConfigSaverCallback | None = None
    lm_evaluator: LMEvaluatorCallback | None = None
    downstream_evaluator: DownstreamEvaluatorCallback | None = None
    samples: SamplesCallback | None = None
    replica_checker: ReplicaCheckerCallback | None = None
    replay_checker: ReplayCheckerCallback | None = None
    stability_monitor: StabilityMonitorCallback | None = None
    early_stopping: EarlyStoppingCallback | None = None
    gpu_memory_monitor: GPUMemoryMonitorCallback | None = None
    gap_monitor: GAPMonitorCallback | None = None
    gradient_noise_scale: GradientNoiseScaleCallback | None = None
    loss_ledger: LossLedgerCallback | None = None
    metric_saver: MetricSaverCallback | None = None
    notifier: NotifierCallback | None = None
    model_merge: ModelMergeCallback | None = None
    ema: EMACallback | None = None
    hf_exporter: HFExporterCallback | None = None
    profiler: ProfilerCallback | None = None
    wandb: WandBCallback | None = None
    comet: CometCallback | None = None
    tensorboard: TensorBoardCallback | None = None
    trackio: TrackioCallback | None = None
    own: Annotated[dict[str, OwnCallback], Rest()] = field(default_factory=dict)

    def build(self) -> dict[str, Callback]:
        """Return the callbacks by name, each a new one."""
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        given |= self.own
        callbacks = {n: each for n, each in given.items() if isinstance(each, Callback)}
        return {n: replace(cast("Any", each)) for n, each in callbacks.items()}
