"""Local search: makes a layout better, never worse.

Descends through the moves of `moves.py` until none helps; then, again and again, takes a few units apart, rebuilds
them with some luck, descends from there, and keeps what is better. The same seed gives the same answer unless `stop`
cuts the search short.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from placement.demand import Member, Members, Mesh
from placement.greedy import kinds, work
from placement.layout import Layout, Unit, distinct, joined
from placement.values import IMPOSSIBLE

_ALL_SPLITS = 5  # members up to which every way of splitting them is tried


class Move(NamedTuple):
    """Replace the units numbered `old` by `new`."""

    old: tuple[int, ...]
    new: tuple[Unit, ...]


def of_one(layout: Layout, number: int, kinds: Sequence[Mesh], rng: random.Random) -> Iterator[Move]:
    """Resize the unit's mesh, split the unit in two, replicate a model of it or take a replica back."""
    mesh, members = layout.units[number]
    room = _room(layout, (mesh,))
    usable = [kind for kind in kinds if kind.size <= room[kind.device]]
    for kind in usable:
        if kind != mesh:
            yield Move((number,), (Unit(kind, members),))
    if len(members) > 1:
        for one, other in _splits(members, rng):
            for first, second in itertools.product(usable, usable):
                if _within(room, (first, second)):
                    yield Move((number,), (Unit(first, one), Unit(second, other)))
    for member in members:
        yield from _replicated(layout, number, member, kinds)


def of_two(layout: Layout, a: int, b: int, kinds: Sequence[Mesh]) -> Iterator[Move]:
    """Move members from one unit to the other, swap members, exchange the meshes, merge both into one mesh."""
    (mesh_a, in_a), (mesh_b, in_b) = layout.units[a], layout.units[b]
    both = joined(in_a, in_b)
    for member in in_a:
        yield from _moved(a, b, mesh_a, mesh_b, in_a, in_b, member)
    for member in in_b:
        yield from _moved(b, a, mesh_b, mesh_a, in_b, in_a, member)
    for x, y in itertools.product(in_a, in_b):
        one = joined((m for m in in_a if m != x), (y,))
        other = joined((m for m in in_b if m != y), (x,))
        if x.model != y.model and distinct(one) and distinct(other):
            yield Move((a, b), (Unit(mesh_a, one), Unit(mesh_b, other)))
    if mesh_a != mesh_b:
        yield Move((a, b), (Unit(mesh_b, in_a), Unit(mesh_a, in_b)))
    if distinct(both):
        room = _room(layout, (mesh_a, mesh_b))
        for kind in kinds:
            if kind.size <= room[kind.device]:
                yield Move((a, b), (Unit(kind, both),))


def placements(layout: Layout, member: Member, kinds: Sequence[Mesh], into: Sequence[int]) -> Iterator[Move]:
    """Put a member that is placed nowhere into one of the units `into`, or on a mesh of its own."""
    for number in into:
        mesh, members = layout.units[number]
        if all(other.model != member.model for other in members):
            yield Move((number,), (Unit(mesh, joined(members, (member,))),))
    for kind in kinds:
        if kind.size <= layout.free(kind.device):
            yield Move((), (Unit(kind, (member,)),))


def best(layout: Layout, moves: Iterator[Move], least: float = 0.0) -> tuple[float, Move | None]:
    """The move that gains most among those that are allowed; None if none gains more than `least`."""
    gain: float = max(least, 1e-9)
    chosen = None
    for move in moves:
        found = layout.gain(move.old, move.new)
        if found > gain and layout.allows(move.old, move.new):
            gain, chosen = found, move
    return gain, chosen


def _moved(a: int, b: int, mesh_a: Mesh, mesh_b: Mesh, in_a: Members, in_b: Members, member: Member) -> Iterator[Move]:
    other = joined(in_b, (member,))
    if not distinct(other):
        return
    left = tuple(m for m in in_a if m != member)
    units = (Unit(mesh_b, other),) if not left else (Unit(mesh_a, left), Unit(mesh_b, other))
    yield Move((a, b), units)


def _splits(members: Members, rng: random.Random) -> Iterator[tuple[Members, Members]]:
    """Ways of dividing members in two; all of them if they are few."""
    if len(members) <= _ALL_SPLITS:
        for bits in range(1, 1 << (len(members) - 1)):
            yield _by_bits(members, bits)
        return
    for index in range(len(members)):
        yield _by_bits(members, 1 << index)
    for _ in range(1 << (_ALL_SPLITS - 1)):
        yield _by_bits(members, rng.randrange(1, (1 << len(members)) - 1))


def _by_bits(members: Members, bits: int) -> tuple[Members, Members]:
    one = tuple(m for i, m in enumerate(members) if bits >> i & 1)
    return one, tuple(m for i, m in enumerate(members) if not bits >> i & 1)


def _replicated(layout: Layout, number: int, member: Member, kinds: Sequence[Mesh]) -> Iterator[Move]:
    """One replica more, on a free mesh; one replica fewer: that of this unit."""
    homes = [n for n, unit in layout.units.items() if member in unit.members]
    more = Member(member.model, member.replicas + 1)
    with_more = tuple(_renamed(layout.units[n], member, more) for n in homes)
    for kind in kinds:
        if kind.size <= layout.free(kind.device):
            yield Move(tuple(homes), (*with_more, Unit(kind, (more,))))
    if member.replicas > 1 and len(homes) == member.replicas:
        fewer = Member(member.model, member.replicas - 1)
        units = [_renamed(layout.units[n], member, fewer if n != number else None) for n in homes]
        yield Move(tuple(homes), tuple(unit for unit in units if unit.members))


def _renamed(unit: Unit, member: Member, into: Member | None) -> Unit:
    members = tuple(m for m in (into if m == member else m for m in unit.members) if m is not None)
    return Unit(unit.mesh, members)


def _room(layout: Layout, given_up: Sequence[Mesh]) -> dict[str, int]:
    """Devices of each type that there are when those meshes are given up."""
    room = {device: layout.free(device) for device in layout.machines.devices}
    for mesh in given_up:
        room[mesh.device] += mesh.size
    return room


def _within(room: dict[str, int], meshes: Sequence[Mesh]) -> bool:
    return all(
        sum(mesh.size for mesh in meshes if mesh.device == device) <= room[device]
        for device in {mesh.device for mesh in meshes}
    )


_LEAST_GAIN = 2e-5  # of the fleet's whole value: less is not worth a move
_TRIES = 8  # to place all replicas that a model has at least


@dataclass(frozen=True, slots=True)
class ImproveLimits:
    """The search ends after `kicks` in a row that did not help, or after `evaluations` of new units. Each unit is
    paired with at most `partners` others. A kick takes apart up to `ruin` units."""

    kicks: int = 120
    evaluations: int = 200_000
    partners: int = 12
    ruin: int = 3
    seed: int = 0


def improve(
    layout: Layout,
    limits: ImproveLimits | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[str], None] = lambda _: None,
) -> Layout:
    """The best layout found from `layout`, which is left as it is. `stop` is asked often and ends the search."""
    search = _Improver(layout, limits or ImproveLimits(), stop, progress)
    return search.run()


class _Improver:
    def __init__(
        self, layout: Layout, limits: ImproveLimits, stop: Callable[[], bool], progress: Callable[[str], None]
    ) -> None:
        self.layout = layout.copy()
        self.limits, self.progress = limits, progress
        self.values = layout.values
        self.rng = random.Random(limits.seed)
        self.kinds = kinds(layout.values, layout.machines)
        self._stop = stop
        scale = sum(d.weight * d.rate for d in self.values.demands)
        self._least = _LEAST_GAIN * (1.0 if self.values.objective.name == "gpus" else scale)
        self._until = self.values.evaluations + limits.evaluations

    def run(self) -> Layout:
        self._insert_missing()
        self._descend(list(self.layout.units))
        fails = kicks = 0
        while fails < self.limits.kicks and not self._over() and not self._ideal():
            before = self.layout.copy()
            touched = self._kick()
            self._descend(touched)
            kicks += 1
            if self.layout.value > before.value + 1e-9:
                fails = 0
            else:
                fails += 1
                if self.layout.value < before.value - 1e-12:
                    self.layout = before
            self.progress(f"{kicks} rebuilds, value {self.layout.value:.4g}")
        return Layout(self.values, self.layout.machines, self.layout.units.values())

    def _ideal(self) -> bool:
        """Whether nothing is left to gain."""
        return not self.layout.missing and sum(map(self._deficit, self.layout.units)) <= self._least

    def _over(self) -> bool:
        return self.values.evaluations >= self._until or self._stop()

    # ------------------------------------------------------------ descent

    def _descend(self, dirty: Iterable[int]) -> None:
        """First improvement, best of each neighbourhood; only units that changed are looked at again."""
        queue = sorted(dirty)
        while queue and not self._over():
            number = queue.pop(0)
            if number not in self.layout.units:
                continue
            changed = self._improve_unit(number)
            if changed:
                queue = [n for n in queue if n in self.layout.units] + changed

    def _improve_unit(self, number: int) -> list[int]:
        layout = self.layout
        own = self._deficit(number)
        if own > self._least:
            _, move = best(layout, of_one(layout, number, self.kinds, self.rng), self._least)
            if move is not None:
                return self._apply(move)
        for other in self._partners(number):
            if own + self._deficit(other) > self._least:
                _, move = best(layout, of_two(layout, number, other, self.kinds), self._least)
                if move is not None:
                    return self._apply(move)
        return []

    def _deficit(self, number: int) -> float:
        """How much better the unit's members could be off at most; nothing is gained from moving the content."""
        unit = self.layout.units[number]
        ideal = sum(self.values.ideal(member, self.kinds) for member in unit.members)
        return ideal - self.layout.unit_value(unit)

    def _partners(self, number: int) -> list[int]:
        others = [n for n in self.layout.units if n != number]
        if len(others) > self.limits.partners:
            others = self.rng.sample(others, self.limits.partners)
        return others

    def _apply(self, move: Move) -> list[int]:
        first = self.layout._next
        self.layout.replace(move.old, move.new)
        return list(range(first, self.layout._next))

    # ------------------------------------------------------------ kicks

    def _kick(self) -> list[int]:
        """Take a few units apart and place their members anew; the numbers of the units that came of it."""
        layout = self.layout
        numbers = sorted(layout.units)
        count = min(len(numbers), self.rng.randint(1, self.limits.ruin))
        ruined = self.rng.sample(numbers, count)
        gone = [layout.units[n] for n in ruined]
        members = {member.model: member for unit in gone for member in unit.members}
        # Replicas elsewhere stay where they are; those here keep their number.
        loose = [member for unit in gone for member in unit.members]
        loose += [each for model in sorted(layout.missing) if model not in members for each in self._fewest(model)]
        rebuilt = self._rebuild(ruined, loose)
        if rebuilt is None:
            return []
        first = layout._next
        layout.replace(rebuilt.old, rebuilt.new)
        return list(range(first, layout._next))

    def _rebuild(self, ruined: list[int], loose: list[Member]) -> Move | None:
        """The ruined units' devices cut anew at random, and their members placed where they add most, in an order with
        some luck. None if they do not fit that way."""
        layout, rng, values = self.layout, self.rng, self.values
        room = {device: layout.free(device) for device in layout.machines.devices}
        for number in ruined:
            room[layout.units[number].mesh.device] += layout.units[number].mesh.size
        guests = [n for n in sorted(layout.units) if n not in ruined]
        guests = rng.sample(guests, min(len(guests), 2)) if guests and rng.random() < 0.5 else []
        open_: list[tuple[Mesh, tuple[Member, ...]]] = [tuple(layout.units[n]) for n in guests]  # type: ignore[misc]
        order = sorted(loose, key=lambda member: -work(values, member.model) * rng.uniform(0.5, 2.0))
        eager = rng.random()
        for member in order:
            options: list[tuple[float, int, Mesh]] = []
            for index, (mesh, members) in enumerate(open_):
                if all(other.model != member.model for other in members):
                    value = values.of(mesh, joined(members, (member,)))
                    if value != IMPOSSIBLE:
                        options.append((value - values.of(mesh, members), index, mesh))
            for kind in self.kinds:
                if kind.size <= room[kind.device]:
                    value = values.of(kind, (member,))
                    if value != IMPOSSIBLE:
                        options.append((value, -1, kind))
            if not options:
                return None
            options.sort(key=lambda option: -option[0])
            if rng.random() < eager:
                _, index, mesh = options[0]
            else:
                _, index, mesh = rng.choice(options[:4])
            if index < 0:
                room[mesh.device] -= mesh.size
                open_.append((mesh, (member,)))
            else:
                open_[index] = (mesh, joined(open_[index][1], (member,)))
        move = Move((*ruined, *guests), tuple(Unit(mesh, members) for mesh, members in open_))
        return move if layout.allows(move.old, move.new) else None

    def _insert_missing(self) -> None:
        for model in sorted(self.layout.missing):
            wanted = self._fewest(model)
            if len(wanted) == 1:
                moves = placements(self.layout, wanted[0], self.kinds, list(self.layout.units))
            else:
                moves = (move for _ in range(_TRIES) if (move := self._rebuild([], wanted)) is not None)
            _, move = best(self.layout, moves)
            if move is not None:
                self._apply(move)

    def _fewest(self, model: int) -> list[Member]:
        """The replicas with which a model that is placed nowhere is placed at least."""
        least = self.values.demands[model].least
        return [Member(model, least)] * least
