"""The best placement of a small fleet, as a mixed-integer linear program (PuLP, solved by HiGHS).

Every possible unit, a set of members on a kind of mesh, is a column whose value is known from the same estimator that
the searches ask. Chosen columns must have all replicas of each placed model, and their meshes must fit onto the
machines, each of which is cut in one of the ways in which it can be cut. The number of columns doubles with each model,
so this is for fleets of a few models, and tells how far from the best the searches end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pulp

from placement.demand import Member, Mesh
from placement.greedy import kinds
from placement.layout import Layout, Unit
from placement.meshes import Machines
from placement.values import IMPOSSIBLE, Values


class TooLargeError(ValueError):
    """The fleet has more possible units than may be enumerated."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The program's answer. `bound` is what no placement exceeds; equal to the layout's value if `proven`."""

    layout: Layout
    bound: float
    columns: int
    proven: bool

    def gap(self, layout: Layout) -> float:
        """The part of the bound by which `layout` is worse, at least 0."""
        if self.bound == 0:
            return 0.0
        return max(0.0, (self.bound - layout.value) / abs(self.bound))


def exact(
    values: Values,
    machines: Machines,
    replicas: int = 2,
    seconds: float = 60.0,
    columns: int = 50_000,
) -> Exact:
    """The best layout in which no model has more than `replicas` replicas, or than it is asked to have at least.

    Args:
        seconds: after which the solver gives the best it has; `proven` is then False.
        columns: possible units at most.

    Raises:
        TooLargeError: there are more.
        RuntimeError: the solver failed.
    """
    replicas = max(replicas, *(demand.least for demand in values.demands))
    meshes = kinds(values, machines)
    units = list(itertools.islice(_columns(values, meshes, replicas), columns + 1))
    if len(units) > columns:
        raise TooLargeError(f"more than {columns} possible units; the exact solver is for small fleets")
    problem = pulp.LpProblem("placement", pulp.LpMaximize)
    chosen = [problem.add_variable(f"u{i}", 0, None, pulp.LpInteger) for i in range(len(units))]
    placed = {
        Member(model, n): problem.add_variable(f"p{model}_{n}", 0, 1, pulp.LpInteger)
        for model in range(len(values.demands))
        for n in range(1, replicas + 1)
    }
    missing = [values.objective.missing(demand) for demand in values.demands]
    problem += (
        pulp.lpSum(values.of(unit.mesh, unit.members) * x for unit, x in zip(units, chosen, strict=True))
        + sum(missing)
        - pulp.lpSum(missing[member.model] * y for member, y in placed.items())
    )
    homes: dict[Member, list[pulp.LpVariable]] = {member: [] for member in placed}
    for unit, x in zip(units, chosen, strict=True):
        for member in unit.members:
            homes[member].append(x)
    for member, y in placed.items():
        problem += pulp.lpSum(homes[member]) == member.replicas * y
    for model in range(len(values.demands)):
        problem += pulp.lpSum(placed[Member(model, n)] for n in range(1, replicas + 1)) <= 1
    _machines(problem, machines, meshes, units, chosen)
    problem.solve(pulp.HiGHS(msg=False, timeLimit=seconds, threads=1, gapRel=1e-9))
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise RuntimeError(f"the solver ended with {pulp.LpSolution[problem.sol_status]}")
    answer = [unit for unit, x in zip(units, chosen, strict=True) for _ in range(round(x.varValue or 0))]
    layout = Layout(values, machines, answer)
    proven = problem.sol_status == pulp.LpSolutionOptimal
    info = problem.solverModel.getInfo()
    bound = layout.value if proven else max(layout.value, float(info.mip_dual_bound))
    return Exact(layout, bound, len(units), proven)


def _columns(values: Values, meshes: list[Mesh], replicas: int) -> Iterator[Unit]:
    """Every possible unit; nothing is added to members that are impossible already."""
    models = range(len(values.demands))
    for mesh in meshes:
        open_: list[tuple[Member, ...]] = [()]
        while open_:
            grown: list[tuple[Member, ...]] = []
            for members in open_:
                for model in models:
                    if members and model <= members[-1].model:
                        continue
                    for n in range(1, replicas + 1):
                        more = (*members, Member(model, n))
                        if values.of(mesh, more) != IMPOSSIBLE:
                            grown.append(more)
                            yield Unit(mesh, more)
            open_ = grown


def _machines(
    problem: pulp.LpProblem,
    machines: Machines,
    meshes: list[Mesh],
    units: list[Unit],
    chosen: list[pulp.LpVariable],
) -> None:
    """Every machine is cut in one way; no more meshes than these cuts give."""
    supply: dict[Mesh, list[pulp.LpAffineExpression]] = {mesh: [] for mesh in meshes}
    for device, nodes in machines.nodes.items():
        for size, count in Counter(nodes).items():
            sizes = sorted((m.size for m in meshes if m.device == device and m.size <= size), reverse=True)
            used = []
            for i, cut in enumerate(_cuts(size, tuple(sizes))):
                ways = problem.add_variable(f"cut_{device}_{size}_{i}".replace("-", "_"), 0, count, pulp.LpInteger)
                used.append(ways)
                for part, n in cut.items():
                    supply[Mesh(device, part)].append(n * ways)
            problem += pulp.lpSum(used) <= count
    for mesh in meshes:
        mine = [x for unit, x in zip(units, chosen, strict=True) if unit.mesh == mesh]
        problem += pulp.lpSum(mine) <= pulp.lpSum(supply[mesh])


def _cuts(size: int, parts: tuple[int, ...]) -> Iterator[Counter[int]]:
    """Every way of cutting `size` devices into `parts` (descending) that leaves no room for another."""
    if not parts:
        yield Counter()
        return
    first, rest = parts[0], parts[1:]
    for n in range(size // first, -1, -1):
        for cut in _cuts(size - n * first, rest):
            left = size - n * first - sum(part * m for part, m in cut.items())
            if left < min(parts):
                yield Counter({first: n}) + cut if n else cut
