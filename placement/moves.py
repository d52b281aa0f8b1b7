"""The changes that the local search tries: move, swap, exchange, resize, split, merge, replicate."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from placement.demand import Member, Members, Mesh
from placement.layout import Layout, Unit, distinct, joined

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
