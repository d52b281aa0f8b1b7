"""The value of any unit, worked out once: what every search below asks for, thousands of times."""

from __future__ import annotations

import math
from collections.abc import Sequence

from placement.demand import Member, Members, Mesh
from placement.estimator import Estimator, Shares, UnitEstimate, service_level, waiting
from placement.objective import Objective

IMPOSSIBLE = -math.inf
_RESERVES = (1.5, 2.0, 3.0)


class Values:
    """Values of units under an objective.

    `evaluations` counts those worked out. Shares are chosen per unit, the best of `Estimator.choices`. Without
    `colocate` a unit of two models is impossible (spatial partitioning).
    """

    def __init__(self, estimator: Estimator, objective: Objective, colocate: bool = True) -> None:
        self.colocate = colocate
        self.estimator = estimator
        self.objective = objective
        self.demands = estimator.demands
        self.evaluations = 0
        self._values: dict[tuple[Mesh, Members], float] = {}
        self._ideals: dict[Member, float] = {}
        self._weights: dict[tuple[Member, Mesh], float] = {}

    def of(self, mesh: Mesh, members: Members) -> float:
        """The value of a unit; `IMPOSSIBLE` if it cannot be."""
        if not members:
            return 0.0
        key = (mesh, members)
        found = self._values.get(key)
        if found is None:
            self.evaluations += 1
            allowed = all(self.demands[member.model].may_have(member.replicas) for member in members)
            found = self._values[key] = self._best(mesh, members)[0] if allowed else IMPOSSIBLE
        return found

    def estimate(self, mesh: Mesh, members: Members) -> UnitEstimate:
        """The estimate behind the value.

        Raises:
            ValueError: the unit is impossible.
        """
        shares = self._best(mesh, members, thorough=True)[1]
        estimate = self.estimator.unit(mesh, members, shares) if shares else None
        if estimate is None:
            raise ValueError(f"{[self.demands[m.model].name for m in members]} do not fit on {mesh.size} {mesh.device}")
        return estimate

    def ideal(self, member: Member, kinds: Sequence[Mesh]) -> float:
        """More than the member can add to any unit, whatever else is in it, devices not counted."""
        found = self._ideals.get(member)
        if found is None:
            free = (self.of(kind, (member,)) - self.objective.unit(kind.size) for kind in kinds)
            found = self._ideals[member] = max(free, default=IMPOSSIBLE)
        return found

    def weight(self, member: Member, mesh: Mesh) -> float:
        """Roughly the part of a mesh that a member takes, of its compute or its memory: to tell loaded from idle."""
        key = (member, mesh)
        found = self._weights.get(key)
        if found is None:
            candidate = self.estimator.candidates.of(member, mesh)
            if candidate is None:
                found = math.inf
            else:
                footprint = self.estimator.engines.footprint(member.model, mesh)
                held = footprint.own + candidate.batch * footprint.sequence
                busy = candidate.share * (1.0 - math.exp(-candidate.batch))
                found = max(held / self.estimator.engines.memory[mesh.device], busy)
                if not candidate.meets:
                    found = max(found, self.demands[member.model].rate / member.replicas / candidate.throughput)
            self._weights[key] = found
        return found

    def _best(self, mesh: Mesh, members: Members, thorough: bool = False) -> tuple[float, Shares | None]:
        """The best choice of shares. Unless `thorough`, the first that gives everyone what is asked will do: others
        could only be a little quicker."""
        best, best_shares = IMPOSSIBLE, None
        if (len(members) > 1 and not self.colocate) or self.estimator.room(mesh, members) <= 0:
            return best, None
        choices = self.estimator.choices(mesh, members)
        if thorough or self.objective.name != "throughput":
            # More SMs than the fewest shorten latencies, which only these objectives are about.
            choices += [shares for reserve in _RESERVES for shares in self.estimator.choices(mesh, members, reserve)]
        for shares in dict.fromkeys(choices):
            settled = self.estimator.settled(mesh, members, shares)
            if settled is None:
                continue
            runners, state, _ = settled
            wait = waiting(runners, state)
            value = self.objective.unit(mesh.size)
            content = True
            for i, runner in enumerate(runners):
                demand = self.demands[members[i].model]
                rate = state.rates[i]
                level = service_level(demand, runner, state.batches[i], rate, state, wait)
                value += self.objective.member(demand, runner.rate, rate, level)
                content = content and self.objective.content(runner.rate, rate, level.attainment)
            if value > best:
                best, best_shares = value, shares
            if content and not thorough:
                break
        return best, best_shares
