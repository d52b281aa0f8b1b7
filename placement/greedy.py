"""Algorithm 1 of MuxServe (arXiv:2404.02015), for clusters of any shape and size.

The paper enumerates all groups of meshes that the cluster can be cut into. On each group it places the models one by
one, most computation first, where each adds most. It takes the best group. The number of groups explodes with the
number of devices, so they are enumerated here only while they are few. Otherwise the search starts from groups that
suit the models: those of equal meshes, and one of the meshes that Algorithm 2 prefers. From the best of them it splits
and merges meshes, several of a kind at a time in large clusters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from placement.candidates import Candidate
from placement.demand import Member, Mesh
from placement.layout import Layout, Unit, joined
from placement.meshes import Machines
from placement.values import IMPOSSIBLE, Values

Group = tuple[tuple[Mesh, int], ...]


@dataclass(frozen=True, slots=True)
class GreedyLimits:
    """`enumerate_up_to` groups are all tried. Otherwise `rounds` of changes, each of at most `neighbours` groups.
    `width` units of each kind, the least loaded ones, are looked at for each model."""

    enumerate_up_to: int = 24
    rounds: int = 12
    neighbours: int = 12
    width: int = 6


def greedy(
    values: Values,
    machines: Machines,
    limits: GreedyLimits | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Layout:
    """The best layout that Algorithm 1 finds; models that fit nowhere are missing in it."""
    limits = limits or GreedyLimits()
    search = _Search(values, machines, limits, progress)
    return search.run()


def work(values: Values, model: int) -> float:
    """Operations per second that a model's load asks for, up to a constant: scale times popularity."""
    demand = values.demands[model]
    return demand.rate * demand.architecture.parameters * demand.sequence_tokens


def kinds(values: Values, machines: Machines) -> list[Mesh]:
    """The kinds of meshes on which some model runs."""
    fits = values.estimator.engines.fits
    return [mesh for mesh in machines.kinds() if any(fits(model, mesh) for model in range(len(values.demands)))]


def replicas_needed(values: Values, machines: Machines, meshes: list[Mesh]) -> list[int]:
    """Per model the fewest replicas with which each meets its part of the rate on some kind of mesh, within the bounds
    of what is asked."""
    devices = sum(machines.devices.values())
    needed = []
    for model, demand in enumerate(values.demands):
        most = max(demand.least, devices if demand.most is None else min(devices, demand.most))
        count = demand.least
        while count < most:
            found = [values.estimator.candidates.whole(Member(model, count), mesh) for mesh in meshes]
            if not any(found) or any(candidate.meets for candidate in found if candidate):
                break
            # Each replica serves at most that much.
            best = max(candidate.throughput for candidate in found if candidate)
            count = max(count + 1, int(demand.rate / best)) if best > 0 else most
        needed.append(min(count, most))
    return needed


class _Search:
    def __init__(
        self, values: Values, machines: Machines, limits: GreedyLimits, progress: Callable[[str], None]
    ) -> None:
        self.values, self.machines, self.limits, self.progress = values, machines, limits, progress
        self.kinds = kinds(values, machines)
        replicas = replicas_needed(values, machines, self.kinds)
        order = sorted(range(len(values.demands)), key=lambda model: (-work(values, model), model))
        # First one of each model; what else its load asks for comes when all have a place.
        self.members = [Member(model, replicas[model]) for model in order]
        self.best: Layout | None = None
        self.tried: dict[Group, float] = {}

    def run(self) -> Layout:
        if not self.kinds:
            return Layout(self.values, self.machines)
        few = self._all_groups()
        if few is not None:
            for group in few:
                self._try(group)
        else:
            self._climb()
        assert self.best is not None
        return self.best

    # ------------------------------------------------------------ groups

    def _all_groups(self) -> list[Group] | None:
        """Every group that leaves no room for another mesh and has no more meshes than replicas; None if many."""
        most = sum(member.replicas for member in self.members)
        found: list[Group] = []
        steps = 0
        meshes = sorted(self.kinds, key=lambda mesh: -mesh.size)

        def extend(start: int, counts: Counter[Mesh], total: int) -> bool:
            nonlocal steps
            steps += 1
            if steps > 40 * self.limits.enumerate_up_to:
                return False
            grown = False
            for i in range(start, len(meshes)):
                counts[meshes[i]] += 1
                if total < most and self.machines.fits(counts):
                    grown = True
                    if not extend(i, counts, total + 1):
                        return False
                counts[meshes[i]] -= 1
            if not grown and total:
                found.append(_group(counts))
            return len(found) <= self.limits.enumerate_up_to

        return found if extend(0, Counter(), 0) else None

    def _climb(self) -> None:
        scores = sorted(((self._try(group), group) for group in self._starts()), reverse=True)
        if not scores:
            return
        value, group = scores[0]
        for _ in range(self.limits.rounds):
            better = None
            for near in self._near(group):
                if near in self.tried:
                    continue
                score = self._try(near)
                if score > value + 1e-9:
                    value, better = score, near
            if better is None:
                return
            group = better

    def _starts(self) -> list[Group]:
        """Groups of equal meshes per device type, and one with the meshes that the models would choose."""
        starts = []
        sizes = sorted({mesh.size for mesh in self.kinds})
        most = sum(member.replicas for member in self.members)
        for size in sizes:
            counts: Counter[Mesh] = Counter()
            for device in self.machines.devices:
                usable = [m for m in self.kinds if m.device == device and m.size <= size]
                self._fill(counts, sorted(usable, key=lambda mesh: -mesh.size), most)
            starts.append(_group(counts))
        starts.append(self._chosen(most))
        return list(dict.fromkeys(group for group in starts if group))

    def _fill(self, counts: Counter[Mesh], meshes: list[Mesh], most: int) -> None:
        """Add meshes, in that order of preference, until nothing fits any more or they are `most`."""
        for mesh in meshes:
            count = min(most - sum(counts.values()), self.machines.devices[mesh.device] // mesh.size)
            while count > 0:
                counts[mesh] += count
                if self.machines.fits(counts):
                    break
                counts[mesh] -= count
                count -= 1

    def _chosen(self, most: int) -> Group:
        """The smallest meshes that carry each model, shared where a model takes only a part."""
        parts: Counter[Mesh] = Counter()
        taken: dict[Mesh, float] = {}
        for member in self.members:
            found = self.values.estimator.candidates.all(member, self.kinds)
            if not found:
                continue
            choice = min(found, key=_preference)
            weight = min(1.0, self.values.weight(member, choice.mesh))
            taken[choice.mesh] = taken.get(choice.mesh, 0.0) + weight * member.replicas
        for mesh in sorted(taken, key=lambda mesh: -mesh.size):
            parts[mesh] += max(1, round(taken[mesh]))
            while parts[mesh] > 0 and not self.machines.fits(parts):
                parts[mesh] -= 1
        self._fill(parts, sorted(self.kinds, key=lambda mesh: mesh.size), most)
        return _group(parts)

    def _near(self, group: Group) -> Iterator[Group]:
        """Groups with a mesh, or many of a kind, split or merged."""
        made = 0
        counts = Counter(dict(group))
        most = sum(member.replicas for member in self.members)
        for many in (4, 1):
            for mesh, count in group:
                some = count // many if many > 1 else 1
                if some < 1 or (many > 1 and some < 2):
                    continue
                for parts in self._parts(mesh):
                    near = _changed(counts, {mesh: -some} | {part: n * some for part, n in parts.items()})
                    if near and sum(n for _, n in near) <= most and self.machines.fits(dict(near)):
                        made += 1
                        yield near
                for whole, n in self._wholes(mesh):
                    bunch = some // n if many > 1 else 1
                    if bunch < 1 or count < n * bunch:
                        continue
                    near = _changed(counts, {mesh: -n * bunch, whole: bunch})
                    if near and self.machines.fits(dict(near)):
                        made += 1
                        yield near
                if made >= self.limits.neighbours:
                    return

    def _parts(self, mesh: Mesh) -> Iterator[Mapping[Mesh, int]]:
        usable = sorted((m for m in self.kinds if m.device == mesh.device), key=lambda m: -m.size)
        for large in usable:
            if large.size < mesh.size <= 2 * large.size:
                rest = mesh.size - large.size
                parts = Counter({large: 1})
                for small in usable:
                    while small.size <= rest:
                        parts[small] += 1
                        rest -= small.size
                yield parts

    def _wholes(self, mesh: Mesh) -> Iterator[tuple[Mesh, int]]:
        for whole in self.kinds:
            if whole.device == mesh.device and whole.size > mesh.size and whole.size % mesh.size == 0:
                yield whole, whole.size // mesh.size

    # ------------------------------------------------------------ one group

    def _try(self, group: Group) -> float:
        layout = fill(self.values, self.machines, group, self.members, self.limits.width)
        value = layout.value
        self.tried[group] = value
        if self.best is None or value > self.best.value + 1e-12:
            self.best = layout
        self.progress(f"{len(self.tried)} mesh groups tried")
        return value


def fill(values: Values, machines: Machines, group: Group, members: list[Member], width: int) -> Layout:
    """The inner loop of Algorithm 1: place `members` in their order onto the meshes of `group`, each where it adds most
    (of equals the smallest mesh); replicas after the first when every model has a place."""
    open_: dict[Mesh, Counter[tuple[Member, ...]]] = {mesh: Counter({(): n}) for mesh, n in group}
    rest: list[Member] = []
    for member in members:
        if _place(values, open_, member, width):
            rest += [member] * (member.replicas - 1)
    for member in rest:
        _place(values, open_, member, width)
    units = [
        Unit(mesh, content)
        for mesh, contents in open_.items()
        for content, n in contents.items()
        for _ in range(n)
        if content
    ]
    return Layout(values, machines, _settle_replicas(units, values))


def _settle_replicas(units: list[Unit], values: Values) -> list[Unit]:
    """Units whose members say how many replicas were really placed. Models with too few of them are left out."""
    placed = Counter(member.model for unit in units for member in unit.members)
    settled = [
        Unit(
            unit.mesh,
            tuple(
                Member(m.model, placed[m.model])
                for m in unit.members
                if values.demands[m.model].may_have(placed[m.model])
            ),
        )
        for unit in units
    ]
    return [unit for unit in settled if unit.members]


def _place(values: Values, open_: dict[Mesh, Counter[tuple[Member, ...]]], member: Member, width: int) -> bool:
    best: tuple[float, int, Mesh, tuple[Member, ...]] | None = None
    for mesh, contents in open_.items():
        if not values.estimator.engines.fits(member.model, mesh):
            continue
        usable = [c for c, n in contents.items() if n and all(other.model != member.model for other in c)]
        if len(usable) > width:
            usable.sort(key=lambda c: (sum(values.weight(other, mesh) for other in c), c))
            usable = usable[:width]
        for content in usable:
            value = values.of(mesh, joined(content, (member,)))
            if value == IMPOSSIBLE:
                continue
            gain = value - values.of(mesh, content)
            if best is None or gain > best[0] + 1e-12 or (gain > best[0] - 1e-12 and mesh.size < best[1]):
                best = (gain, mesh.size, mesh, content)
    if best is None:
        return False
    _, _, mesh, content = best
    open_[mesh][content] -= 1
    open_[mesh][joined(content, (member,))] += 1
    return True


def _preference(candidate: Candidate) -> tuple[bool, float, float]:
    """Meets the rate, then the smallest mesh; else most throughput per device."""
    size = candidate.mesh.size
    return (not candidate.meets, size if candidate.meets else -candidate.throughput / size, candidate.share)


def _group(counts: Mapping[Mesh, int]) -> Group:
    return tuple(sorted((mesh, n) for mesh, n in counts.items() if n > 0))


def _changed(counts: Mapping[Mesh, int], by: Mapping[Mesh, int]) -> Group | None:
    changed = Counter(counts)
    for mesh, n in by.items():
        changed[mesh] += n
    return None if any(n < 0 for n in changed.values()) else _group(changed)
