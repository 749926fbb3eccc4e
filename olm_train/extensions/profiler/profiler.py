"""Traces of a few steps, and what those were spent on.

pre_load_batch -> [skip_first] -> wait -> warm up -> active -> RUN/profiler/
                                               rank00000-steps7-9.trace.json.gz  (Perfetto)
                                               rank00000-steps7-9.md             a table
                                               rank00000-steps7-9.memory.pickle  on CUDA
touch RUN/profile -> one more cycle, from where the ranks have agreed on it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from olm_data.config.hints import NonNegativeInt, PositiveInt
from olm_data.errors import ResourceError, UsageError
from olm_data.storage.disk import write_durable
from olm_train.callbacks.base import DATA_WAIT, Callback
from olm_train.distributed.stop_file import StopFile

Span = tuple[int, int]
"""First and last nanosecond."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_COMMUNICATION = ("nccl", "gloo", "c10d")


@dataclass(frozen=True, kw_only=True)
class TraceEvent:
    """One event of a trace: its name, what kind kineto calls it, and when it was."""

    name: str
    kind: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What one step was spent on, in nanoseconds; all but `hidden` add up to `total`.

    Attributes:
        total: from its beginning to that of the next.
        compute, communication, data_wait, idle: see the module; `communication` is what nothing
            hides.
        hidden: communication while something is computed.
    """

    total: int
    compute: int
    communication: int
    data_wait: int
    idle: int
    hidden: int


def step_times(step: Span, events: Iterable[TraceEvent], *, on_device: bool) -> StepTimes:
    """Return what a step was spent on.

    Args:
        step: when it was.
        events: of the trace; those of other steps count for nothing.
        on_device: the step runs on a GPU: what the CPU does meanwhile is neither compute nor
            communication.
    """
    compute: list[Span] = []
    communication: list[Span] = []
    waits: list[Span] = []
    for event in events:
        span = (max(event.start, step[0]), min(event.stop, step[1]))
        if span[0] >= span[1]:
            continue
        if event.kind == "user_annotation" and event.name == DATA_WAIT:
            waits.append(span)
        elif event.kind in (_ON_DEVICE if on_device else ("cpu_op",)):
            exchanged = event.name.lower().startswith(_COMMUNICATION)
            (communication if exchanged else compute).append(span)
    total = step[1] - step[0]
    computing, exchanging = union(compute), union(communication)
    busy = union([*computing, *exchanging])
    everything = length(union([*busy, *waits]))
    return StepTimes(
        total=total,
        compute=length(computing),
        communication=length(busy) - length(computing),
        data_wait=everything - length(busy),
        idle=total - everything,
        hidden=length(computing) + length(exchanging) - length(busy),
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the spans without overlap, in order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def length(spans: Iterable[Span]) -> int:
    """Return the nanoseconds of spans that do not overlap."""
    return sum(stop - start for start, stop in spans)


def table(steps: Sequence[tuple[int, StepTimes]], title: str) -> str:
    """Return the times of steps, by number, in milliseconds, and each part's share of the whole."""
    names = ("compute", "communication", "data wait", "idle")
    lines = [
        f"# {title}",
        "",
        "Milliseconds. Communication is what no computation hides; hidden is the rest of it.",
        "",
        f"| step | total | {' | '.join(names)} | hidden communication |",
        "|" + "---:|" * 7,
    ]
    parts = [(number, astuple(times)) for number, times in steps]
    for number, values in parts:
        shown = " | ".join(f"{value / 1e6:,.2f}" for value in values)
        lines.append(f"| {number:,} | {shown} |")
    sums = [sum(column) for column in zip(*(values for _, values in parts), strict=True)]
    if sums and sums[0]:
        shares = " | ".join(f"{value / sums[0]:.1%}" for value in sums)
        lines.append(f"| share | {shares} |")
    return "\n".join(lines) + "\n"


FOLDER = "profiler"
ON_DEMAND = "profile"
"""The file that asks for a cycle."""
LOOK_EACH = 10
"""Steps between looks at that file where more ranks than the first are profiled."""
MEMORY_ENTRIES = 1_000_000


@dataclass(kw_only=True)
class ProfilerCallback(Callback):
    """Profiles steps by a schedule, and where somebody asks for it: `touch RUN/profile`.

    Attributes:
        enabled: profile, where `profiler` is given at all.
        skip_first: steps before the first cycle; null: none by itself, only on demand.
        wait: steps at the beginning of a cycle that nothing is done in.
        warmup: steps that are profiled and thrown away.
        active: steps whose trace is written.
        repeat: cycles, one after another; 0: to the end of the run.
        with_stack: record Python stacks.
        profile_memory: record allocations of memory.
        enable_cuda_sync_events: record waits for CUDA events, for critical-path analysis.
        memory_snapshot: on CUDA also write the history of the allocator, with Python stacks, after
            each cycle and where memory runs out (https://pytorch.org/memory_viz).
        ranks: null: rank 0; `all`; or the first rank along an axis of the mesh: `dp`: of all,
            `dp_shard`: of each replica, `dp_replicate`: of the ranks that hold the same shard.
    """

    priority: ClassVar[int] = 9  # what the others do is in the trace

    enabled: bool = True
    skip_first: NonNegativeInt | None = 0
    wait: NonNegativeInt = 1
    warmup: NonNegativeInt = 5
    active: PositiveInt = 3
    repeat: NonNegativeInt = 1
    with_stack: bool = True
    profile_memory: bool = False
    enable_cuda_sync_events: bool = False
    memory_snapshot: bool = False
    ranks: Literal["all", "dp", "dp_shard", "dp_replicate"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._profile: profile | None = None
        self._wanted: tuple[int, int] | None = None  # steps before the first cycle, cycles
        self._first = self._steps = 0  # step that the profiler calls 0; how many it has, 0: no end
        self._range: record_function | None = None
        self._chosen = False

    def explicit_steps(self) -> dict[str, list[int]]:
        return {} if self.skip_first is None else {"skip_first": [self.skip_first + 1]}

    def pre_train(self) -> None:
        trainer = self.trainer
        self._chosen = self._is_chosen()
        self._file = StopFile(trainer.work_dir, ON_DEMAND)
        self._range = self._wanted = None
        if self.memory_snapshot:
            self._record_memory()
        if self.skip_first is not None and trainer.step <= self.skip_first:
            # A resume does not profile again what was.
            self._wanted = (self.skip_first - trainer.step, self.repeat)

    def pre_load_batch(self) -> None:
        if self._profile is not None:
            self._profile.step()
            if self._steps and self._profile.step_num >= self._steps:
                self._stop()
        if self._asked():
            self._stop()
            self._wanted = (0, 1)
        if self._wanted is not None:
            self._start(*self._wanted)
            self._wanted = None
        if self._profile is not None:
            self._range = record_function(DATA_WAIT)
            self._range.__enter__()

    def pre_step(self, batches: Sequence[Any]) -> None:
        self._end_range()

    def post_train(self) -> None:
        if self._profile is not None:
            self._profile.step()  # the last step is over

    def close(self) -> None:
        self._end_range()
        self._stop()
        if self._chosen and self.memory_snapshot and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(enabled=None)

    def _is_chosen(self) -> bool:
        """Whether this rank is profiled.

        Raises:
            UsageError: the weights are not sharded over such an axis.
        """
        if self._alone:
            return self.trainer.world.main
        if self.ranks == "all":
            return True
        parameters = self.trainer.train_module.model.parameters()
        mesh = next((p.device_mesh for p in parameters if isinstance(p, DTensor)), None)
        names = () if mesh is None else mesh.mesh_dim_names or ()
        if mesh is None or self.ranks not in names:
            raise UsageError(
                f"there is no axis {self.ranks} among the ranks of this run",
                where="trainer.callbacks.profiler.ranks",
                why=f"there is {', '.join(names)}" if names else "its weights are not sharded",
                fix="give all, dp, or leave it out",
            )
        return bool(mesh.get_local_rank(self.ranks) == 0)

    @property
    def _alone(self) -> bool:
        """Whether rank 0 is the only one that is profiled: the others need not know."""
        return self.ranks in (None, "dp")

    def _asked(self) -> bool:
        """Whether a cycle was asked for; the same answer on all ranks that are profiled."""
        world = self.trainer.world
        if self._alone and not world.main:
            return False
        if not self._alone and world.size > 1 and self.trainer.step % LOOK_EACH:
            return False
        found = world.main and self._file.found() is not None
        if not self._alone:
            found = world.any(found)
        if found and world.main:
            self._file.remove()
            self.trainer.say(f"profiling: {self.active} steps after {self.wait + self.warmup}")
        return found

    def _start(self, skip: int, cycles: int) -> None:
        if not self._chosen:
            return
        self._first = self.trainer.step + 1
        self._steps = cycles and skip + cycles * (self.wait + self.warmup + self.active)
        activities = [ProfilerActivity.CPU]
        if self.trainer.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        more = torch._C._profiler._ExperimentalConfig(
            enable_cuda_sync_events=self.enable_cuda_sync_events
        )
        self._profile = profile(
            activities=activities,
            schedule=schedule(
                skip_first=skip,
                wait=self.wait,
                warmup=self.warmup,
                active=self.active,
                repeat=cycles,
            ),
            on_trace_ready=self._write,
            with_stack=self.with_stack,
            profile_memory=self.profile_memory,
            experimental_config=more,
        )
        self._profile.start()

    def _stop(self) -> None:
        stopped, self._profile = self._profile, None
        if stopped is not None:
            stopped.stop()

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _write(self, done: Any) -> None:
        """Write what a cycle saw; called by the profiler."""
        trainer = self.trainer
        with trainer.pause():
            events = [
                TraceEvent(
                    name=e.name(), kind=e.activity_type(), start=e.start_ns(), stop=e.end_ns()
                )
                for e in done.profiler.kineto_results.events()
                if e.activity_type() != "python_function"
            ]
            spans = {
                self._first + int(event.name.partition("#")[2]): (event.start, event.stop)
                for event in events
                if event.kind == "user_annotation" and event.name.startswith("ProfilerStep#")
            }
            spans = {step: span for step, span in spans.items() if step <= trainer.step}
            if not spans:  # the run ended in the first of them
                return
            on_device = trainer.world.device.type == "cuda"
            times = [
                (step, step_times(span, events, on_device=on_device))
                for step, span in sorted(spans.items())
            ]
            rank = trainer.world.rank
            name = f"rank{rank:05d}-steps{min(spans)}-{max(spans)}"
            folder = trainer.work_dir / FOLDER
            title = f"Steps {min(spans):,} to {max(spans):,} of rank {rank}"
            try:
                folder.mkdir(exist_ok=True)
                partial = folder / f"{name}.partial.json.gz"
                done.export_chrome_trace(str(partial))
                partial.replace(folder / f"{name}.trace.json.gz")
                write_durable(folder / f"{name}.md", table(times, title).encode())
                if self.memory_snapshot:
                    torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))
            except (OSError, ResourceError) as error:
                trainer.say(f"warning: no trace of steps {min(spans):,} to {max(spans):,}: {error}")
                return
        trainer.say(f"profiled steps {min(spans):,} to {max(spans):,}: {FOLDER}/{name}.md")

    def _record_memory(self) -> None:
        """Begin the history of the allocator; write it where memory runs out.

        Raises:
            UsageError: this is no CUDA device.
        """
        if self.trainer.world.device.type != "cuda":
            raise UsageError(
                "memory_snapshot has no effect without a CUDA device",
                where="trainer.callbacks.profiler.memory_snapshot",
                fix="leave it out; profile_memory records allocations on a CPU",
            )
        if not self._chosen:
            return
        folder = self.trainer.work_dir / FOLDER
        folder.mkdir(exist_ok=True)
        path: Path = folder / f"rank{self.trainer.world.rank:05d}-out-of-memory.pickle"

        def out_of_memory(*_: int) -> None:
            torch.cuda.memory._dump_snapshot(str(path))

        torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES, stacks="python")
        torch._C._cuda_attach_out_of_memory_observer(out_of_memory)  # type: ignore[attr-defined]
