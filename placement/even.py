"""The simplest placement: devices are divided among the models evenly, whatever their rates."""

from __future__ import annotations

from collections import Counter

from placement.demand import Member, Mesh
from placement.greedy import kinds
from placement.layout import Layout, Unit, joined
from placement.meshes import Machines
from placement.values import IMPOSSIBLE, Values


def even(values: Values, machines: Machines) -> Layout:
    """Every model has an equal part of the devices, at least the smallest mesh that it fits on: one replica on as many
    of them as it can be split over, and more replicas on the rest. Models that no device is left for share the meshes
    with the fewest models.
    """
    meshes = sorted(kinds(values, machines), key=lambda mesh: mesh.size)
    fits = values.estimator.engines.fits
    ways = {model: [mesh for mesh in meshes if fits(model, mesh)] for model in range(len(values.demands))}
    part = sum(machines.devices.values()) // len(values.demands)
    counts: Counter[Mesh] = Counter()
    homes: dict[int, list[Mesh]] = {}
    # The largest models first, which have the least choice.
    order = sorted(ways, key=lambda model: (-(ways[model][0].size if ways[model] else 0), model))
    for model in order:
        wide = [mesh for mesh in ways[model] if mesh.size <= part]
        for mesh in [*reversed(wide), *ways[model][len(wide) :]]:
            if _take(machines, counts, mesh):
                homes[model] = [mesh]
                break
    growing = set(homes)
    while growing:
        model = min(growing, key=lambda each: (len(homes[each]) * homes[each][0].size, each))
        mesh, replicas = homes[model][0], len(homes[model])
        if values.demands[model].may_have(replicas + 1) and _take(machines, counts, mesh):
            homes[model].append(mesh)
        else:
            growing.discard(model)
    units = [Unit(mesh, (Member(model, len(mine)),)) for model, mine in homes.items() for mesh in mine]
    for model in order:
        member = Member(model)
        if model in homes or not values.demands[model].may_have(1):
            continue
        for place in sorted(range(len(units)), key=lambda number: len(units[number].members)):
            mesh, members = units[place]
            if values.of(mesh, joined(members, (member,))) != IMPOSSIBLE:
                units[place] = Unit(mesh, joined(members, (member,)))
                break
    return Layout(values, machines, [unit for unit in units if values.of(unit.mesh, unit.members) != IMPOSSIBLE])


def _take(machines: Machines, counts: Counter[Mesh], mesh: Mesh) -> bool:
    """One more such mesh, if the machines have it."""
    counts[mesh] += 1
    if machines.fits(counts):
        return True
    counts[mesh] -= 1
    return False
