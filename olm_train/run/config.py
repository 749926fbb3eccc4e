"""The configuration of a run: `train.yaml` as frozen dataclasses, and the trainer built from it.

Values -> lock -> model.vocab_size, model.preset filled in -> RunConfig -> build(world) -> Trainer

What differs between this configuration and that of a run: `olm-train config --diff RUN`.

RUN/config.json --defaults filled in--> plain values --+
train.yaml + options --resolve--> RunConfig ----------> differences, one line each
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from olm_data.bounded_json import JsonObject, decode_object
from olm_data.config.convert import Config, as_dict, parse
from olm_data.config.hints import (
    FilePath,
    LocalPath,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    Parts,
    PositiveFloat,
    PositiveInt,
)
from olm_data.config.values import KeyPath, Values, differences
from olm_data.errors import InputError, OlmError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.path_kinds import nearest
from olm_data.regular_files import read_regular
from olm_data.rows.cache_plan import DEFAULT_FOLDER, CacheOptions
from olm_data.storage.lease import TAKEOVER_SECONDS
from olm_data.storage.output_paths import refuse_output
from olm_data.storage.store import Store, is_remote
from olm_train.callbacks.config import CallbacksConfig
from olm_train.checkpoint.documents import saved_config
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manifest import CONFIG, MANIFEST, CheckpointManifest, candidates
from olm_train.checkpoint.merged import folder_of_paths
from olm_train.checkpoint.model_format import ModelFormat, format_of
from olm_train.checkpoint.policy import LoadPolicy, LoadStrategy, Vocabulary
from olm_train.data.dealing import require_equal_parts
from olm_train.data.loader import DataLoader
from olm_train.distributed.holding import LeasePolicy, Takeover
from olm_train.distributed.waiting import CommConfig
from olm_train.distributed.world import World, local_device
from olm_train.duration import Duration
from olm_train.estimate.device_defaults import Capability, resolve
from olm_train.estimate.layout import choose
from olm_train.estimate.sharding import CHOSEN, Goal, Machine
from olm_train.model.config import DecoderConfig
from olm_train.model.flat_form import from_flat
from olm_train.model.init import RULE
from olm_train.model.presets import by_name, overlaid, written_shape
from olm_train.model.upcycle import begun_feed_forward, refuse_unequal
from olm_train.parallel.stages import require_micro_batches
from olm_train.train_module import TransformerTrainModule
from olm_train.train_module_config import TransformerTrainModuleConfig
from olm_train.trainer import Trainer

_READS = Needs("load_strategy", unless=LoadStrategy.never)
_CACHE_FOLDER = FilePath(os.path.expanduser(DEFAULT_FOLDER))


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Config):
    """The local copy of shards of remote datasets; local datasets are read where they are.

    Attributes:
        enabled: copy whole shards of remote datasets to a local folder; false: their rows are read
            one by one, a request each.
        folder: local folder, shared by all ranks and runs of a machine.
        size_gb: 10^9 bytes it may hold; default: twice what the mixture needs at a time. One that
            is too small is refused with the numbers.
    """

    enabled: bool = True
    folder: LocalPath = _CACHE_FOLDER
    size_gb: Annotated[float, Meta(gt=0, lt=1e9)] | None = None

    def build(self) -> CacheOptions | None:
        """Return the options of the cache, None if there is to be none."""
        if not self.enabled:
            return None
        size = None if self.size_gb is None else round(self.size_gb * 10**9)
        return CacheOptions(folder=self.folder, size=size)


@dataclass(frozen=True, kw_only=True)
class DataLoaderConfig(Config):
    """Which rows, and how many at once.

    Attributes:
        mixture: the lock that `olm-data mix` wrote.
        global_batch_size: tokens of one step over all ranks; a multiple of the mixture's (longest)
            sequence length. With a [batch_size_scheduler](#batch-size-schedules) that of the first
            steps. Stages with a [shorter sequence length](mixture.md#sequence-length-phases) have
            more rows in it.
        prefetch: steps prepared ahead by a background thread; 0: none.
        verify: check of the token blocks: `lazy` at first read, `full` before the start, `off`
            never.
        skip: ranges `[first, one past the last]` of the schedule's rows that are left out; may grow
            during a run, ahead of it.
        cache: local copy of shards of remote datasets.
    """

    mixture: FilePath
    global_batch_size: PositiveInt
    prefetch: NonNegativeInt = 2
    verify: Literal["lazy", "full", "off"] = "lazy"
    skip: list[list[int]] = field(default_factory=list)
    cache: CacheConfig = field(default_factory=CacheConfig)

    def lock(self) -> Lock:
        """Return the mixture lock, as this rank reads it.

        Raises:
            InputError, ValidationError: it is missing or damaged.
        """
        return Lock.read(self.mixture)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Config):
    """The loop.

    Attributes:
        save_folder: folder of the run: checkpoints, `metrics.jsonl`, `config.json`; local, on a
            file system that all ranks see, or [`s3://BUCKET/PREFIX`](#a-save-folder-on-s3). One run
            at a time writes there.
        work_dir: local folder of the logs, and of files on their way to a remote save folder;
            default: the save folder, for a remote one `~/.cache/olm/runs/BUCKET/PREFIX`.
        max_duration: length of the run and of the learning-rate schedule; default: the whole lock.
        hard_stop: stop there already, on the schedule of max_duration; the same command without it
            goes on.
        metrics_collect_interval: steps between reads of the metrics from the device.
        load_strategy: go on from the newest checkpoint; `always`: it must exist; `never`: it must
            not.
        load_strict: refuse to go on where the newest checkpoint is damaged, instead of from the one
            before it; `--strict` sets it.
        load_path: checkpoint, save folder of a run, or [exported weights](#weights-as-one-file) to
            begin with, local or remote, where the save folder has no checkpoint yet; or a model of
            transformers, [`hf://ORG/NAME[@REVISION]` or a folder, local or
            remote](../how-to/from-hugging-face.md), from which `model` then follows.
        load_trainer_state: from `load_path`, take step, data position and callbacks' state too; the
            mixture, the model and the global batch size are then those of that run.
        load_optim_state: from `load_path`, take the optimiser's state too.
        load_vocabulary: where the data has ids that a model of transformers at `load_path` does not
            know: refuse (`keep`), or add rows that begin as the mean of the others (`extend`).
        load_upcycle: the model at `load_path` is dense, and each expert of this one begins as a
            copy of its feed-forward layer, so that [the logits are
            equal](../how-to/train-experts.md#begin-with-a-dense-model).
        time_limit: seconds after which the run is ended from outside, or `slurm`: at the end of its
            job, from `SLURM_JOB_END_TIME`.
        time_margin: seconds before that at which the run saves, and stops with exit code 75; longer
            than a step, an evaluation batch and a save.
        max_rewinds: bad steps that a start of the run goes back for, with `non_finite: rewind`;
            then it halts.
        takeover_seconds: a run that shows no sign of life in `save_folder` for so long is taken
            over by the next start; see [a long run](../how-to/survive-failures.md).
        on_cancel: what a run does that somebody ends, by a file `stop` in `work_dir` or from a
            callback: save and `finish` with exit code 0, or save and `requeue` with 75.
        single_writer: nobody else writes to the remote `save_folder`: go on where its store does
            not honour conditional creates.
        callbacks: what happens around the steps.
    """

    save_folder: FilePath
    work_dir: LocalPath | None = None
    max_duration: Duration | None = None
    hard_stop: Duration | None = None
    metrics_collect_interval: PositiveInt = 5
    load_strategy: LoadStrategy = LoadStrategy.if_available
    load_strict: Annotated[bool, _READS] = False
    load_path: Annotated[FilePath | None, _READS] = None
    load_trainer_state: Annotated[bool, Needs("load_path")] = True
    load_optim_state: Annotated[bool, Needs("load_path")] = True
    load_vocabulary: Annotated[Vocabulary, Needs("load_path")] = "keep"
    load_upcycle: Annotated[bool, Needs("load_path")] = False
    time_limit: PositiveFloat | Literal["slurm"] | None = None
    time_margin: NonNegativeFloat = 120.0
    max_rewinds: NonNegativeInt = 3
    takeover_seconds: Takeover = TAKEOVER_SECONDS
    single_writer: bool = False
    on_cancel: Literal["finish", "requeue"] = "finish"
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_output(self.save_folder)
        if is_remote(self.save_folder):
            Store(self.save_folder)  # refuses other kinds of storage
        elif self.single_writer:
            raise UsageError(
                "has no effect with a local save_folder",
                where="single_writer",
                fix="leave it out",
            )

    def lease_policy(self) -> LeasePolicy:
        """Return how the save folder is held."""
        return LeasePolicy(takeover_seconds=self.takeover_seconds, single_writer=self.single_writer)

    def load_policy(self) -> LoadPolicy:
        """Return where the run begins."""
        given = {each.name: getattr(self, f"load_{each.name}") for each in fields(LoadPolicy)}
        return LoadPolicy(**given)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """All of `train.yaml`.

    Attributes:
        seed: with each parameter's name decides its initial value; the order of the data has its
            own seed, in the lock.
        initial_values: version of the initialisation. A configuration that pins it gets
            bit-identical initial weights, or an error.
        model: shape of the decoder; `vocab_size` comes from the lock unless given. `preset` names
            a shape, `depth` derives one from the number of blocks; fields beside it override it.
        data_loader: rows.
        train_module: the step.
        trainer: the loop.
        comm: how long ranks wait for each other.
        parallel: `auto`, `speed` or `memory` choose how ranks share the run, in place of the fields
            of `train_module.dp_config` but its dtypes, and of `tp_config`, `cp_config`, `pp_config`
            and `ep_config` where these are not set; default: what stands there.
        threads: CPU threads of a rank; default: as many as cores, quota, load and the ranks of the
            machine leave, the same on each rank, and those it began with when a run goes on.
    """

    seed: int = 0
    initial_values: Literal["sliced-1"] = RULE
    model: Annotated[DecoderConfig, Parts(DecoderConfig, "olm_train.models")]
    data_loader: DataLoaderConfig
    train_module: TransformerTrainModuleConfig
    trainer: TrainerConfig
    comm: CommConfig = field(default_factory=CommConfig)
    parallel: Goal | None = None
    threads: PositiveInt | None = None

    @classmethod
    def resolve(cls, values: Values) -> RunConfig:
        """Return the configuration of `values`, with what the lock and the preset decide filled in.

        Raises:
            UsageError: a field is unknown, missing, or of the wrong type.
            InputError, ValidationError: the lock is missing or damaged.
        """
        model, lock, begun, given = values.data.get("model"), None, None, JsonObject()
        begins = isinstance(trainer := values.data.get("trainer"), dict) and "load_path" in trainer
        if model is None and (begins or "model" in values.data):  # `model:` with nothing below it
            model = {}
        if isinstance(model, dict):
            given = model = written_shape(model, values.where)
            if isinstance(values.data.get("data_loader"), dict):
                lock = parse(DataLoaderConfig, values, ("data_loader",)).lock()
            ids = 0 if lock is None else lock.tokenizer.vocab_size
            if begins and (begun := begun_model(values, ids)) is not None:
                model = overlaid(begun.fields, given)
            values.data["model"] = {"vocab_size": ids} | model if ids else model
        config = parse(cls, values)
        if begun is not None:
            begun.refuse_contradictions(config.model, given, values.where)
        _refuse_two_choices(config, values)
        if lock is not None and config.model.vocab_size < lock.tokenizer.vocab_size:
            raise UsageError(
                f"model.vocab_size {config.model.vocab_size:,} is smaller than the tokenizer's "
                f"{lock.tokenizer.vocab_size:,}",
                where=values.where(("model", "vocab_size")),
                fix="leave it out: the lock knows it",
            )
        longest = config.model.max_positions
        if lock is not None and longest is not None and longest < lock.sequence_length:
            raise UsageError(
                f"model.positions.max_positions {longest:,} is smaller than the lock's sequence "
                f"length {lock.sequence_length:,}",
                where=values.where(("model", "positions", "max_positions")),
                why="a document may be as long as a row, and each of its tokens needs a position",
            )
        if lock is not None and (tensor := config.train_module.tp_config) is not None:
            for length in lock.sequence_lengths:
                require_equal_parts(length, tensor.degree, "train_module.tp_config.degree")
        return config

    def micro_batches(self, readers: int) -> list[int]:
        """Return those of a rank in steps of each size, where so many read others."""
        scheduler = self.trainer.callbacks.batch_size_scheduler
        sizes = scheduler.batch_sizes if scheduler is not None and scheduler.enabled else []
        unit = self.train_module.rank_microbatch_size * readers
        return [size // unit for size in (self.data_loader.global_batch_size, *sizes)]

    def on_device(self, capability: Capability) -> tuple[RunConfig, dict[str, str]]:
        """Return the configuration with what `auto` stands for there, each choice with its why."""
        model, module, why = resolve(self.model, self.train_module, capability)
        return replace(self, model=model, train_module=module), why

    def fitted(self, machine: Machine) -> tuple[RunConfig, list[str]]:
        """Return the configuration with what `parallel` chooses filled in, and lines saying why."""
        if self.parallel is None:
            return self, []
        module, why = choose(
            self.parallel,
            self.model,
            self.train_module,
            machine,
            sequence_lengths=self.data_loader.lock().sequence_lengths,
            micro_batches=self.micro_batches,
        )
        return replace(self, train_module=module, parallel=None), why

    def loader(self, world: World, *, rank: int = 0) -> DataLoader:
        """Return the loader of a rank; `rank`: which of those that share a micro-batch it is."""
        options = {**vars(self.data_loader), "cache": self.data_loader.cache.build()}
        return DataLoader(
            options.pop("mixture"),
            **options,
            rank_microbatch_size=self.train_module.rank_microbatch_size,
            rank=world.reader,
            world_size=world.readers,
            device=world.device,
            neighbours=world.near_readers,
            dealing=self.train_module.dealing(self.model.windows, rank),
        )

    def build(self, world: World, *, chosen: Sequence[str] = ()) -> Trainer:
        """Return the trainer of this rank; the weights get their values when it begins.

        Raises:
            OlmError: sizes that do not fit, data that is not what the lock says.
        """
        config = self.on_device(Capability.of(world.device))[0].fitted(Machine.of(world))[0]
        mesh = config.train_module.mesh(world.size, world.nodes)
        world = replace(world, sharers=config.train_module.sharers, stages=mesh.pp)
        if (pipeline := config.train_module.pp_config) is not None:
            require_micro_batches(pipeline, *config.micro_batches(world.readers))
        loader = config.loader(world, rank=mesh.coordinates(world.rank)["cp"])
        module = TransformerTrainModule(
            config.train_module, config.model, seed=config.seed, world=world, init=False
        )
        trainer = config.trainer
        # An option of one name with an argument is that argument; callbacks are built first.
        taken = inspect.signature(Trainer).parameters.keys() - {"callbacks"}
        return Trainer(
            **{name: value for name, value in vars(trainer).items() if name in taken},
            train_module=module,
            data_loader=loader,
            load=trainer.load_policy(),
            checkpointer=trainer.callbacks.checkpointer,
            callbacks=trainer.callbacks.build(),
            config=saved_config(config, trainer.save_folder),
            comm=config.comm,
            lease=trainer.lease_policy(),
            chosen=chosen,
        )

    def as_dict(self) -> JsonObject:
        """Return plain JSON values; reading them back gives the same configuration."""
        return as_dict(self)


def _refuse_two_choices(config: RunConfig, values: Values) -> None:
    """Refuse fields of `dp_config` that `parallel` would pass over."""
    given = (values.data["train_module"] or {}).get("dp_config") or {}
    for name in CHOSEN:
        if config.parallel is not None and name in given:
            raise UsageError(
                f"train_module.dp_config.{name} is chosen by parallel: {config.parallel}",
                where=values.where(("train_module", "dp_config", name)),
                fix="leave one of the two out",
            )


class Begun(NamedTuple):
    """The fields of a shape that follow from `load_path`, and the format of the model there.

    Attributes:
        dense: shape of the weights, where `load_upcycle` makes experts of them.
    """

    format: ModelFormat
    fields: JsonObject
    dense: DecoderConfig | None = None

    def refuse_contradictions(
        self, config: DecoderConfig, given: JsonObject, where: Callable[[KeyPath], str]
    ) -> None:
        """Refuse fields of `model` that are not those of the weights.

        Args:
            config: what came of these fields and the given ones.
            given: what the user wrote, presets filled in.
            where: place of a field.

        Raises:
            UsageError: a field has another value; names it.
        """
        config = self.format.canonical(config)
        if self.dense is not None:
            refuse_unequal(self.dense, config)
        ours, theirs = by_name(as_dict(config)), by_name(self.fields)
        for name, value in by_name(given).items():
            if name in theirs.keys() - {*self.format.free} and ours.get(name) != theirs[name]:
                raise UsageError(
                    f"model.{name} is {theirs[name]} in the weights of trainer.load_path, not "
                    f"{value}",
                    where=where(("model", *name.split("."))),
                    fix="leave it out: it follows from their config.json",
                )


def begun_model(values: Values, ids: int) -> Begun | None:
    """Return the fields of `model` that follow from `load_path`; None: there is nothing such.

    An address of the hub in `values` becomes that of a commit.

    Args:
        values: of the whole configuration.
        ids: that the data may hold; 0: not known.

    Raises:
        InputError: our decoder cannot be that model, or there is none.
        UsageError: the vocabulary is too small; `load_vocabulary` is for such models only; or the
            model to train is of a class of one's own.
        StorageError: the hub cannot be reached.
    """
    trainer = parse(TrainerConfig, values, ("trainer",))
    policy = trainer.load_policy()
    known = None if policy.path is None else format_of(policy.path)
    if policy.path is None or known is None:
        if policy.vocabulary != "keep":
            raise UsageError(
                "has an effect with a model of transformers alone",
                where=values.where(("trainer", "load_vocabulary")),
                fix="leave it out",
            )
        return None
    if "name" in (values.data.get("model") or {}):
        raise UsageError(
            "a class of your own cannot begin with a model of transformers",
            where=values.where(("model", "name")),
            fix="leave it out",
        )
    if (saved := _saved(trainer.save_folder)) is not None:
        path = saved.get("trainer", {}).get("load_path")
        if isinstance(path, str) and all(map(known.may_change, (policy.path, path))):
            values.data["trainer"]["load_path"] = path
        attention = {**saved["model"].get("attention", {})}
        attention.pop("backend", None)  # that of the device it ran on
        return Begun(known, {**saved["model"], "attention": attention})
    place = known.pinned(policy.path)
    if known.may_change(place):
        values.data["trainer"]["load_path"] = place
    opened = known.open(place)
    dense = replace(opened.config, vocab_size=opened.vocabulary_size(ids, policy.vocabulary))
    if policy.upcycle:
        experts = {"feed_forward": begun_feed_forward(dense)}
        return Begun(known, as_dict(dense) | experts, dense)
    return Begun(known, as_dict(dense))


def _saved(save_folder: str) -> JsonObject | None:
    """Return the configuration in the newest checkpoint that has one, None without a checkpoint."""
    for name in candidates(save_folder):
        store = Store(save_folder).child(name)
        try:
            return Checkpoint(store, CheckpointManifest.read(store)).config
        except OlmError:
            continue  # it is damaged: whoever loads it says so
    return None


def config_diff(run: str, config: RunConfig) -> list[str]:
    """Return one line for each field that differs, `a.b: value of the run -> value here`.

    `auto` counts as what it is on this machine. Fields that the run's release did not know count
    with the default of this one. If the saved configuration no longer fits, its values are compared
    as they are, and the first line says so.

    Args:
        run: folder of a run or of one of its checkpoints, or a config.json.
        config: the configuration to compare it with.

    Raises:
        InputError: there is no saved configuration.
        ValidationError: what is there is no JSON object.
    """
    here = Capability.of(local_device())
    path = Path(run) / CONFIG if Path(run).is_dir() else Path(run)
    try:
        saved = decode_object(read_regular(path))
    except OSError as error:
        raise InputError(
            f"no saved configuration: {error.strerror}",
            where=str(path),
            fix=nearest(run, f"give the folder of a run or of a checkpoint; it holds {CONFIG}"),
        ) from error
    except ValueError as error:
        raise ValidationError(
            "the saved configuration is not a JSON object", where=str(path)
        ) from error
    try:
        if isinstance(saved.get("model"), dict):
            saved["model"] = from_flat(saved["model"])
        there = parse(RunConfig, Values(saved, file=str(path), folder=_folder_of_paths(path)))
        old, notes = there.on_device(here)[0].as_dict(), []
    except UsageError as error:
        old, notes = saved, [f"(saved by another release: {error.what})"]
    return notes + differences(old, config.on_device(here)[0].as_dict())


def _folder_of_paths(config: Path) -> Path:
    """Return what the paths in the `config.json` of a run or of a checkpoint count from."""
    folder = config.absolute().parent
    if not (folder / MANIFEST).exists():
        return folder
    store = Store(str(folder))
    return Path(folder_of_paths(Checkpoint(store, CheckpointManifest.read(store))))
