"""How a fleet of replicas is cut into macro instances as it grows and shrinks: EcoServe's mitosis scaling, section 3.5.

Macro instances have between `lower` and `upper` members (N_l, N_u). One grows to N_u; the next replica splits N_l
members off it. When replicas go, the smallest macro instance shrinks to N_l and stays there; then a full one shrinks,
until both fit into N_u and are merged. So each has between N_l and N_u members as long as there are several; a single
one goes down to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True, slots=True)
class Bounds:
    """N_l and N_u.

    Raises:
        ValueError: a macro instance of N_u + 1 could not be split into two that have N_l at least.
    """

    lower: int = 4
    upper: int = 16

    def __post_init__(self) -> None:
        if self.lower < 1 or self.upper + 1 < 2 * self.lower:
            raise ValueError(
                f"a macro instance that grows beyond {self.upper} members is split, and both parts need at least "
                f"{self.lower}: give N_l >= 1 and N_u >= 2 * N_l - 1"
            )


@dataclass(frozen=True, slots=True)
class Join:
    """The new replica joins that macro instance."""

    member: str
    macro: str


@dataclass(frozen=True, slots=True)
class Found:
    """The new replica is the first of a new macro instance."""

    member: str
    macro: str


@dataclass(frozen=True, slots=True)
class HandleMove:
    """The replica's handle moves to another macro instance (which is new, the first time it is named); the replica
    itself goes on with what it does."""

    member: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The replica leaves its macro instance; it is drained."""

    member: str
    macro: str


@dataclass(frozen=True, slots=True)
class Dissolve:
    """The macro instance has no member any more."""

    macro: str


Change = Union[Join, Found, HandleMove, Leave, Dissolve]


class Mitosis:
    """Who is in which macro instance. Answers changes, which the caller carries out in order."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.macros: dict[str, list[str]] = {}
        self._count = 0

    def grow(self, member: str) -> list[Change]:
        """A replica more: it joins the largest macro instance that is not full; if all are, one of them is split.

        Raises:
            ValueError: it is there already.
        """
        if any(member in members for members in self.macros.values()):
            raise ValueError(f"{member} is in a macro instance already")
        if not self.macros:
            name = self._new()
            self.macros[name] = [member]
            return [Found(member, name)]
        open_ = {name: members for name, members in self.macros.items() if len(members) < self.bounds.upper}
        if open_:
            name = max(open_, key=lambda each: (len(open_[each]), each))
            self.macros[name].append(member)
            return [Join(member, name)]
        source = max(self.macros, key=lambda each: (len(self.macros[each]), each))
        members = self.macros[source]
        members.append(member)
        return [Join(member, source), *self._split(source)]

    def _split(self, source: str) -> list[Change]:
        """N_l members leave a macro instance for a new one: those that came first, which are spread over the ring's
        whole load, not the newest, which are empty."""
        target = self._new()
        moving = self.macros[source][: self.bounds.lower]
        self.macros[source] = self.macros[source][self.bounds.lower :]
        self.macros[target] = moving
        return [HandleMove(member, source, target) for member in moving]

    def shrink(self, loads: Mapping[str, float]) -> list[Change]:
        """A replica less: of the smallest macro instance that has more than N_l the one with the least load (`loads`:
        by replica). Two macro instances are merged as soon as they fit into one."""
        if not self.macros:
            return []
        above = [name for name, members in self.macros.items() if len(members) > self.bounds.lower]
        macro = min(above or self.macros, key=lambda each: (len(self.macros[each]), each))
        member = min(self.macros[macro], key=lambda each: (loads.get(each, 0.0), each))
        return self.gone(member)

    def gone(self, member: str) -> list[Change]:
        """That replica goes, or has died."""
        macro = next((name for name, members in self.macros.items() if member in members), None)
        if macro is None:
            return []
        self.macros[macro].remove(member)
        changes: list[Change] = [Leave(member, macro)]
        if not self.macros[macro]:
            del self.macros[macro]
            return [*changes, Dissolve(macro)]
        return changes + self._settle()

    def _settle(self) -> list[Change]:
        """Merge the smallest macro instance, once it is down to N_l, into the fullest one that has room for all of it.
        Where none has, and a death left it with less than N_l, which the paper does not speak of, the fullest one gives
        it members: handles move, no replica does."""
        small = min(self.macros, key=lambda each: (len(self.macros[each]), each))
        members, bounds = self.macros[small], self.bounds
        others = [name for name in self.macros if name != small]
        if not others or len(members) > bounds.lower:
            return []
        room = [name for name in others if len(self.macros[name]) + len(members) <= bounds.upper]
        if room:
            target = max(room, key=lambda each: (len(self.macros[each]), each))
            moved: list[Change] = [HandleMove(member, small, target) for member in members]
            self.macros[target] += members
            del self.macros[small]
            return [*moved, Dissolve(small)]
        source = max(others, key=lambda each: (len(self.macros[each]), each))
        moving = self.macros[source][: bounds.lower - len(members)]
        self.macros[source] = self.macros[source][len(moving) :]
        members += moving
        return [HandleMove(member, source, small) for member in moving]

    def _new(self) -> str:
        self._count += 1
        return f"m{self._count}"
