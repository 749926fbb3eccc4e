"""Which rank does what, computed from the degrees of parallelism: numbers in, numbers out.

    degrees, number of ranks -> Mesh -> coordinates of a rank; groups of an axis, or of several
                                     -> Held: who sums gradients, who holds copies

The ranks are numbered along five axes, the last one fastest, so that ranks of a `tp` group are
neighbours. The ranks of one `pp` and `dp_replicate` are numbered along two others for the experts:
`ep` adds no ranks, it borrows those of `dp_shard`, `cp` and `tp`. `edp_shard` is what it leaves.

    weights  [pp, dp_replicate, dp_shard, cp, tp]      dp_shard * cp * tp == edp_shard * ep
    experts  [pp, dp_replicate, edp_shard, ep]

What the axes do with the rows of a step, and with the weights:

    pp            the same rows; other layers
    dp_replicate  other rows; copies
    dp_shard      other rows; the weights are cut
    cp            other parts of the same rows; the weights are cut, as by dp_shard
    tp            the same tokens in products of matrices, other tokens between them (sequence
                  parallel); matrices are cut, and what stands between them as by dp_shard
    ep            tokens are sent to the rank that has the expert; other experts

An axis of degree 1 makes no group. Pure: no process group, no device. The scheme of two views is
torchtitan's (distributed/parallel_dims.py), the names are OLMo-core's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from olm_data.counts import counted
from olm_data.errors import UsageError

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "edp_shard", "ep"]
Axes = tuple[Axis, ...]
Ranks = tuple[int, ...]

WEIGHTS: Axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of all ranks, for all but experts; the last one fastest."""
EXPERTS: Axes = ("pp", "dp_replicate", "edp_shard", "ep")
"""Axes of the same ranks, for experts."""

READERS: Axes = ("dp_replicate", "dp_shard")
"""Ranks that differ along one of these read different rows; all others read the same ones."""
COUNTS: Axes = (*READERS, "cp", "tp")
"""Along these the tokens of a step are divided: what is counted of them is summed over these."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """How ranks hold the parameters of a kind.

    Attributes:
        view: the axes of its ranks, `WEIGHTS` or `EXPERTS`.
        parted: along these each rank has other parameters, or other parts of them, and computes
            with those it has.
        sharded: along these they are cut by FSDP2, gathered for the computation.
    """

    view: Axes
    parted: Axes
    sharded: Axes

    @property
    def gradients(self) -> Axes:
        """Over these gradients are summed: the ranks that compute with the same parameters."""
        return tuple(axis for axis in self.view if axis not in self.parted)

    @property
    def copies(self) -> Axes:
        """Along these ranks hold the same shard."""
        return tuple(axis for axis in self.gradients if axis not in self.sharded)


CUT = Held(view=WEIGHTS, parted=("pp", "tp"), sharded=("dp_shard", "cp"))
"""Matrices that `tp` cuts."""
WHOLE = Held(view=WEIGHTS, parted=("pp",), sharded=("dp_shard", "cp", "tp"))
"""What each rank of `tp` computes with as a whole, for other tokens: norms, experts, routers."""
EXPERT = Held(view=EXPERTS, parted=("pp", "ep"), sharded=("edp_shard",))
"""Matrices of experts; `tp` does not cut them."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The degrees of a run; their product, without `ep`, is the number of ranks.

    Attributes:
        dp_replicate: copies of the weights.
        dp_shard: ranks that read other rows and that a copy is cut over.
        cp: ranks that a row is cut over.
        tp: ranks that a matrix is cut over.
        pp: stages that the layers are cut into.
        ep: ranks that the experts are dealt to, of those of dp_shard, cp and tp.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @classmethod
    def over(
        cls,
        size: int,
        *,
        dp_replicate: int | None = 1,
        dp_shard: int | None = None,
        called: Mapping[str, str] | None = None,
        **degrees: int,
    ) -> Mesh:
        """Return the mesh of `size` ranks.

        Args:
            size: ranks of the run.
            dp_replicate, dp_shard: one of the two may be None: the ranks that the others leave.
            called: the options that degrees come from, by axis, for messages.
            degrees: the others, see the class.

        Raises:
            UsageError: the degrees do not fit; says which, and the nearest that do.
        """
        others = cls(**degrees)
        given: dict[str, int | None] = {axis: getattr(others, axis) for axis in ("pp", "tp", "cp")}
        given |= {"dp_replicate": dp_replicate, "dp_shard": dp_shard}
        known = {axis: degree for axis, degree in given.items() if degree is not None}
        names = {axis: (called or {}).get(axis, axis) for axis in (*given, "ep")}
        left, taken = size, dict[str, int]()
        for axis, degree in known.items():
            of = f"that {_spelled(taken)} leaves" if taken else "of the run"
            _require(names[axis], degree, left, of=of)
            left //= degree
            if degree > 1:
                taken[_short(names[axis])] = degree
        free = [axis for axis in given if axis not in known]
        assert len(free) <= 1, "dp_replicate and dp_shard: one of the two has to be given"
        if not free and left > 1:
            raise UsageError(
                f"{_spelled(taken) or 'degrees of 1'} make {counted(size // left, 'rank')}, and "
                f"there are {size}",
                where=names["dp_shard"],
                fix=f"set {_short(names['dp_shard'])} to {known['dp_shard'] * left}, or leave "
                "it out",
            )
        found = {**known, **dict.fromkeys(free, left)}
        lent = {axis: found[axis] for axis in ("dp_shard", "cp", "tp")}
        _require(
            names["ep"],
            others.ep,
            math.prod(lent.values()),
            of=f"that it borrows from {_spelled(lent) or 'dp_shard, cp and tp'}",
            why="the ranks of ep are ranks of dp_shard, cp and tp; it adds none",
        )
        return replace(others, **found)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.degree(*WEIGHTS)

    def degree(self, *axes: Axis) -> int:
        """Return the number of ranks of a group along these axes."""
        return math.prod(self._digits[axis][0] for axis in axes)

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the place of a rank along each axis, of both views."""
        assert 0 <= rank < self.size, rank
        return {a: rank // stride % degree for a, (degree, stride) in self._digits.items()}

    def group(self, rank: int, *axes: Axis) -> Ranks:
        """Return the ranks that differ from `rank` along these axes alone, with it, ascending.

        Args:
            axes: of one view; several are one group of all their ranks.
        """
        at = self.coordinates(rank)
        first = rank - sum(at[axis] * self._digits[axis][1] for axis in axes)
        return tuple(first + offset for offset in self._offsets(_view(axes), axes))

    def groups(self, *axes: Axis) -> tuple[Ranks, ...]:
        """Return all groups along these axes, each rank in one; none where the degree is 1."""
        if self.degree(*axes) == 1:
            return ()
        view = _view(axes)
        firsts = self._offsets(view, [axis for axis in view if axis not in axes])
        offsets = self._offsets(view, axes)
        return tuple(tuple(first + offset for offset in offsets) for first in firsts)

    @property
    def readers(self) -> int:
        """Equal slices of each step that are read; `World.reader` says which one a rank reads."""
        return self.degree(*READERS)

    @cached_property
    def _digits(self) -> dict[Axis, tuple[int, int]]:
        """Degree of each axis, and by how much the number of a rank grows along it."""
        lent = self.dp_shard * self.cp * self.tp
        assert lent % self.ep == 0, self
        degrees: dict[Axis, int] = {axis: getattr(self, axis) for axis in (*WEIGHTS, "ep")}
        degrees["edp_shard"] = lent // self.ep
        return {
            axis: (degrees[axis], math.prod(degrees[after] for after in view[place + 1 :]))
            for view in (EXPERTS, WEIGHTS)
            for place, axis in enumerate(view)
        }

    def _offsets(self, view: Axes, axes: Sequence[Axis]) -> list[int]:
        """Return the ranks that are the first one along all other axes of the view."""
        found = [0]
        for axis in view:
            if axis in axes:
                degree, stride = self._digits[axis]
                found = [at + n * stride for at in found for n in range(degree)]
        return found


def _view(axes: Axes) -> Axes:
    view = EXPERTS if {"edp_shard", "ep"} & {*axes} else WEIGHTS
    assert {*axes} <= {*view}, axes
    return view


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _require(
    name: str,
    degree: int,
    room: int,
    *,
    of: str,
    why: str = "each rank has one place along each axis: the degrees multiply to all ranks",
) -> None:
    """Refuse a degree that does not divide `room` ranks."""
    if degree < 1 or room % degree:
        raise UsageError(
            f"{_short(name)} {degree} does not divide the {counted(room, 'rank')} {of}",
            where=name,
            why=why,
            fix=f"set it to {nearest(degree, room)}: it is one of "
            + ", ".join(map(str, divisors(room))),
        )


def nearest(degree: int, room: int) -> str:
    """Return the divisors of `room` next to a degree that is none, in words."""
    fitting = divisors(room)
    below = [n for n in fitting if n < degree][-1:]
    return " or ".join(map(str, below + [n for n in fitting if n > degree][:1]))


def require_as_many(degree: int, room: int, what: str, where: str) -> None:
    """Refuse a degree of ranks that cannot have as many each of `room` parts of a model.

    Args:
        what: they are, in words.
        where: the option that the degree is of.

    Raises:
        UsageError: says which degrees next to it they could.
    """
    if room % degree:
        raise UsageError(
            f"degree {degree} does not divide the {room:,} {what}",
            where=where,
            why="each rank has as many",
            fix=f"set it to {nearest(degree, room)}",
        )


def _spelled(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)


def _short(name: str) -> str:
    return name.rpartition(".")[2]
