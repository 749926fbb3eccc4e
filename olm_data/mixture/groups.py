"""Groups of sources: a tree of exact shares, and what fits when some sources hold too little.

    {web: 70, technical: 30}, groups --expand--> tree of Share --leaves--> share of each source
                                tree, limits --fill--> amount of each source, within its limit

Pure: fractions and names in, fractions and names out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from olm_data.order.slots import normalise

Groups = Mapping[str, Mapping[str, Fraction]]


class GroupError(ValueError):
    """Groups that are no tree; `group` and `member` are the names it is wrong at."""

    def __init__(self, what: str, group: str, member: str) -> None:
        self.what, self.group, self.member = what, group, member
        super().__init__(what)


@dataclass(frozen=True)
class Share:
    """A source, or a group with its members.

    Attributes:
        name: of the source or group.
        share: of the whole stage; the members' shares sum to their group's.
        members: empty for a source.
    """

    name: str
    share: Fraction
    members: tuple[Share, ...] = ()


def sources_of(name: str, groups: Groups, inside: tuple[str, ...] = ()) -> list[str]:
    """Return the sources below a source or group, in order.

    Raises:
        GroupError: a group contains itself, or reaches a source twice.
    """
    if name in inside:
        raise GroupError(
            f"group {name!r} contains itself: {' > '.join((*inside, name))}", inside[-1], name
        )
    if name not in groups:
        return [name]
    found: list[str] = []
    for member in groups[name]:
        for source in sources_of(member, groups, (*inside, name)):
            if source in found:
                raise GroupError(f"group {name!r} reaches source {source!r} twice", name, member)
            found.append(source)
    return found


def expand(weights: Mapping[str, Fraction], groups: Groups) -> tuple[Share, ...]:
    """Return the tree of the weighted sources and groups; the shares of its top sum to 1.

    Raises:
        GroupError: a source is reached twice; its group is "" where the weights name it themselves.
    """
    seen: dict[str, str] = {}
    for name in weights:
        for source in sources_of(name, groups):
            if source in seen:
                raise GroupError(
                    f"source {source!r} is reached twice: by {seen[source]!r} and by {name!r}",
                    "",
                    name,
                )
            seen[source] = name
    return _split(weights, groups, Fraction(1))


def _split(weights: Mapping[str, Fraction], groups: Groups, whole: Fraction) -> tuple[Share, ...]:
    return tuple(
        Share(
            name,
            part * whole,
            _split(groups[name], groups, part * whole) if name in groups else (),
        )
        for name, part in zip(weights, normalise(list(weights.values())), strict=True)
    )


def leaves(tree: Sequence[Share]) -> dict[str, Fraction]:
    """Return the share of each source of a tree."""
    found: dict[str, Fraction] = {}
    for node in tree:
        found |= leaves(node.members) if node.members else {node.name: node.share}
    return found


def members(tree: Sequence[Share]) -> dict[str, tuple[str, ...]]:
    """Return the names of the members of each group of a tree."""
    found: dict[str, tuple[str, ...]] = {}
    for node in tree:
        if node.members:
            found[node.name] = tuple(member.name for member in node.members)
            found |= members(node.members)
    return found


def fill(tree: Sequence[Share], limits: Mapping[str, int], total: Fraction) -> dict[str, Fraction]:
    """Divide `total` by the shares, no source above its limit.

    What a source cannot give is given by the other members of its group, in proportion to their
    shares; what a group cannot give, by the group's neighbours in the same way.

    Args:
        tree: a share of 0 gives nothing, whatever is missing.
        limits: of each source.
        total: at most what `capacity` says.

    Raises:
        ValueError: the sources together hold less than `total`.
    """
    holds = [capacity(node, limits) for node in tree]
    amounts = water_fill([node.share for node in tree], holds, total)
    found: dict[str, Fraction] = {}
    for node, amount in zip(tree, amounts, strict=True):
        found |= fill(node.members, limits, amount) if node.members else {node.name: amount}
    return found


def capacity(node: Share, limits: Mapping[str, int]) -> int:
    """Return how much a node can give at most: the limits of its sources with a share."""
    if not node.share:
        return 0
    if not node.members:
        return limits[node.name]
    return sum(capacity(member, limits) for member in node.members)


def water_fill(
    weights: Sequence[Fraction], limits: Sequence[int], total: Fraction
) -> list[Fraction]:
    """Divide `total` in proportion to the weights, none above its limit.

    Raises:
        ValueError: the limits of the positive weights sum to less than `total`.
    """
    amounts = [Fraction(0)] * len(weights)
    open_ = [i for i, weight in enumerate(weights) if weight]
    if sum(limits[i] for i in open_) < total:
        raise ValueError("the limits sum to less than what is to be divided")
    while open_:
        scale = total / sum(weights[i] for i in open_)
        full = [i for i in open_ if weights[i] * scale > limits[i]]
        for i in full or open_:
            amounts[i] = Fraction(limits[i]) if full else weights[i] * scale
        if not full:
            break
        total -= sum(limits[i] for i in full)
        open_ = [i for i in open_ if i not in full]
    return amounts
