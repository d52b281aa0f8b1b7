"""A placement while it is searched for: units on meshes, and its value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from placement.demand import Member, Members, Mesh
from placement.meshes import Machines
from placement.values import IMPOSSIBLE, Values


class Unit(NamedTuple):
    """Members on a mesh, in the order of their numbers."""

    mesh: Mesh
    members: Members


def joined(*groups: Iterable[Member]) -> Members:
    """All members in their order."""
    return tuple(sorted(member for group in groups for member in group))


def distinct(members: Members) -> bool:
    """No model twice: two replicas in one unit would be of no use."""
    return len({member.model for member in members}) == len(members)


class Layout:
    """Units on machines. Every model of `values` has all of its replicas in it or is missing."""

    def __init__(self, values: Values, machines: Machines, units: Iterable[Unit] = ()) -> None:
        self.values = values
        self.machines = machines
        self.units: dict[int, Unit] = {}
        self.counts: Counter[Mesh] = Counter()
        self.missing: set[int] = set(range(len(values.demands)))
        self._next = 0
        self.value = sum(values.objective.missing(values.demands[model]) for model in self.missing)
        self.replace((), tuple(units))

    def copy(self) -> Layout:
        """Another layout with the same units under the same numbers."""
        twin = Layout.__new__(Layout)
        twin.values, twin.machines = self.values, self.machines
        twin.units, twin.counts = dict(self.units), Counter(self.counts)
        twin.missing, twin._next, twin.value = set(self.missing), self._next, self.value
        return twin

    def unit_value(self, unit: Unit) -> float:
        """The value of a unit."""
        return self.values.of(unit.mesh, unit.members)

    def gain(self, old: Sequence[int], new: Sequence[Unit]) -> float:
        """What replacing the units numbered `old` by `new` adds to the value; `IMPOSSIBLE` if a new unit is."""
        values = self.values
        total = 0.0
        for unit in new:
            value = values.of(unit.mesh, unit.members)
            if value == IMPOSSIBLE:
                return IMPOSSIBLE
            total += value
        for number in old:
            unit = self.units[number]
            total -= values.of(unit.mesh, unit.members)
        return total + self._placed(old, new)

    def _placed(self, old: Sequence[int], new: Sequence[Unit]) -> float:
        """What the models that are placed now, or no more, change."""
        out = {member.model for number in old for member in self.units[number].members}
        come = {member.model for unit in new for member in unit.members}
        if out == come and not (come & self.missing):
            return 0.0
        objective, demands = self.values.objective, self.values.demands
        # A model counts as placed with all its replicas or not at all.
        elsewhere = {m.model for n, unit in self.units.items() if n not in old for m in unit.members}
        lost = {model for model in out - come if model not in elsewhere}
        won = come & self.missing
        return sum(objective.missing(demands[m]) for m in lost) - sum(objective.missing(demands[m]) for m in won)

    def allows(self, old: Sequence[int], new: Sequence[Unit]) -> bool:
        """Whether the machines have room for the replacement."""
        counts = Counter(self.counts)
        for number in old:
            counts[self.units[number].mesh] -= 1
        for unit in new:
            counts[unit.mesh] += 1
        return counts <= self.counts or self.machines.fits(counts)

    def replace(self, old: Sequence[int], new: Sequence[Unit]) -> None:
        """Do it. The caller has made sure that it is allowed."""
        self.value += self.gain(old, new)
        for number in old:
            self.counts[self.units.pop(number).mesh] -= 1
        for unit in new:
            self.units[self._next] = unit
            self.counts[unit.mesh] += 1
            self._next += 1
        if old or new:
            self.missing = set(range(len(self.values.demands))) - {
                member.model for unit in self.units.values() for member in unit.members
            }

    def free(self, device: str) -> int:
        """Devices of that type that no unit has."""
        used = sum(mesh.size * n for mesh, n in self.counts.items() if mesh.device == device)
        return self.machines.devices[device] - used

    @property
    def devices(self) -> int:
        """Devices in use."""
        return sum(mesh.size * n for mesh, n in self.counts.items())
