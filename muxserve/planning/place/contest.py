"""Plans that compete: all are tried under all workloads (`workloads`), and the best in the mean is taken.

Estimates of different ways to serve are not comparable enough to choose by them, so simulation decides. All plans are
looked at: simulated on a small part of the declared requests. Where the best of them keeps about all requests under
every workload, no other can be noticeably better, and only the next one competes with it. Elsewhere plans are looked at
under one workload after another, those that are far behind are left out on the way, and the best of the others are
simulated on all requests of the declared workload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from muxserve.planning.place.prediction import Prediction, falls_short
from muxserve.planning.place.workloads import DECLARED, WORKLOADS, Variation
from placement.planner import ClusterPlan

# The part of the requests of each workload that all plans are looked at with, and where queues grow.
LOOK, LONG_LOOK = 0.15, 0.4
# Plans that keep fewer requests less than this part of all are equal.
EQUAL = 0.005
# A plan whose kept parts, added up over the workloads so far, are so far behind the best is left out.
_BEHIND = 0.3
# The most plans that are tried under each workload but the declared one, the best so far; the last number holds for all
# later workloads.
_MOST = (99, 6, 5, 4)
# The number of best plans in the final, beside which it has as many of those with the highest means.
_FINALISTS = 2
# A plan that keeps this part of what is declared keeps all of less.
_ALL = 0.999

Simulate = Callable[[ClusterPlan, float, Variation], Prediction | None]
Ahead = Callable[[Sequence[ClusterPlan], float, Variation], None]


@dataclass(frozen=True, slots=True)
class Rival:
    """One way to serve a fleet, and what its simulations say: `prediction` is that of all requests of the declared
    workload, and `kept` by workload the part of the requests that count. `alike` are other ways with the same plan."""

    way: str
    plan: ClusterPlan
    prediction: Prediction | None = None
    kept: Mapping[str, float] = field(default_factory=dict)
    alike: tuple[str, ...] = ()

    def is_way(self, way: str) -> bool:
        """Whether that is its way, or one with the same plan."""
        return way in (self.way, *self.alike)

    @property
    def mean(self) -> float:
        """The part of the requests that count, over all workloads; 0 without any."""
        return fmean(self.kept.values()) if self.kept else 0.0

    @property
    def keeps_all(self) -> bool:
        """No other plan can be noticeably better."""
        return not self.short and self.mean >= 1.0 - EQUAL

    @property
    def score(self) -> float:
        """Requests per second that are answered under the declared workload, and within their objectives unless the
        objective is throughput; 0 if nothing was simulated."""
        return score(self.plan, self.prediction) if self.prediction else 0.0

    @property
    def is_measured(self) -> bool:
        """Its simulation was long enough to show the score. Any simulation in which no queue grows shows how many
        requests are within their objectives."""
        if self.prediction is None:
            return False
        parts = self.plan.objective.name != "throughput" and not self.prediction.grows
        return parts or self.prediction.is_long_enough

    @property
    def latency(self) -> float:
        """Mean seconds of an answer under the declared workload."""
        latency = self.prediction.summary.overall.latency if self.prediction else None
        return latency.mean if latency else math.inf

    @property
    def is_served(self) -> bool:
        """All requests of its simulation were answered, so that their latency has a mean."""
        overall = self.prediction.summary.overall if self.prediction else None
        return overall is not None and 0 < overall.requests == overall.completed

    @property
    def short(self) -> int:
        """Models that meet their objectives less often than the plan's objective asks, under the declared workload."""
        if self.prediction is None or self.plan.objective.name == "throughput":
            return 0
        return len(falls_short(self.plan, self.prediction))

    @property
    def least(self) -> float:
        """The part of the requests that count, in hundredths, under the workload with the smallest; 0 without any."""
        return round(min(self.kept.values(), default=0.0), 2)

    @property
    def worst(self) -> float:
        """The part of the requests that count, in hundredths, of the model that has the fewest."""
        if self.prediction is None or self.plan.objective.name == "throughput":
            return 1.0
        models = self.prediction.summary.models.items()
        parts = (self.prediction.kept(name) / each.requests for name, each in models if each.requests)
        return round(min(parts, default=1.0), 2)

    @property
    def words(self) -> str:
        """The way with its figures, as far as they were measured."""
        within = "" if self.plan.objective.name == "throughput" else " within their objectives"
        figures = [self.way]
        if self.is_measured:
            figures.append(f"{self.score:.2f} requests/s{within}")
        if self.is_served:
            figures.append(f"{self.latency:.3g} s each")
        return f"{', '.join(figures)} on {self.plan.devices} devices"

    def looked_at(self, workload: Variation, prediction: Prediction | None) -> Rival:
        """The same with what a simulation of that workload shows."""
        part = None if prediction is None else kept(self.plan, prediction, roughly=workload is not DECLARED)
        found = self if part is None else replace(self, kept={**self.kept, workload.name: part})
        return replace(found, prediction=prediction) if workload is DECLARED else found


def score(plan: ClusterPlan, prediction: Prediction) -> float:
    """Requests per second that are answered, and within their objectives unless the objective is throughput; whether
    that was measured, `Rival.is_measured` says."""
    if plan.objective.name == "throughput":
        return prediction.rate
    total = 0.0
    for demand in plan.demands:
        figures = prediction.summary.models.get(demand.name)
        if figures is not None and figures.requests:
            total += demand.rate * (prediction.kept(demand.name) / figures.requests)
    return total


def kept(plan: ClusterPlan, prediction: Prediction, roughly: bool = False) -> float | None:
    """The part of the requests that are answered within their objectives (in time, if no model has any), or within the
    simulated time if the objective is throughput, whatever their rate; None if that was not measured. `roughly`: a
    simulation that is too short shows it, too."""
    overall, throughput = prediction.summary.overall, prediction.rate if roughly else prediction.throughput
    if not overall.requests:
        return None
    if plan.objective.name != "throughput":
        in_time = sum(map(prediction.kept, prediction.summary.models)) / overall.requests
        return overall.slo.get("all", in_time)
    return None if throughput is None else min(1.0, throughput * prediction.seconds / overall.requests)


@dataclass(frozen=True, slots=True)
class Contest:
    """Holds the contest of some plans.

    Args:
        simulate: a plan on a part of the requests of a workload, the same for all; None: that is not possible.
        workloads: the declared one is the first.
        look: the part of the requests that all plans are looked at with. With all of them that is done under the
            declared workload alone, and with the others in the final.
        ahead: simulates several plans at the same time, before `simulate` is asked for each of them.
    """

    simulate: Simulate
    workloads: Sequence[Variation] = WORKLOADS
    look: float = LOOK
    ahead: Ahead = lambda plans, part, workload: None

    @property
    def whole(self) -> bool:
        """Whether all requests are simulated, since a part of them shows nothing."""
        return self.look == 1.0

    def ranked(self, rivals: Sequence[Rival], always: str = "") -> list[Rival]:
        """The plans of the final, the best first. Plans without a place for a model that others have one for do not
        compete. The plan of the way `always` is among them if it competes at all.

        Args:
            rivals: the first is taken where nothing can be simulated. A prediction that one has is of all requests of
                the declared workload.
        """
        fewest = min(len(each.plan.missing) for each in rivals)
        heat = [each for each in rivals if len(each.plan.missing) == fewest]
        looks = self._declared(heat)
        settled = self._settled([*looks.values()], always)
        if settled:
            return settled
        looks = self._looks(looks, always)
        order = ranked([each for each in looks.values() if each.prediction])
        number_of = {id(look): number for number, look in looks.items()}
        first = order[:_FINALISTS] + sorted(order, key=lambda look: -look.mean)[:_FINALISTS]
        finalists = [look for look in order if look.is_way(always) or any(look is each for each in first)]
        final = self._final(finalists, [heat[number_of[id(look)]].prediction for look in finalists])
        return ranked(final) or list(rivals[:1])

    def joined(self, final: Sequence[Rival], another: Rival) -> list[Rival]:
        """The plans of a final and another one, the best first."""
        another = self._in_final(self._everywhere(another), None)
        return list(final) if another.prediction is None else ranked([*final, another])

    def _declared(self, heat: Sequence[Rival]) -> dict[int, Rival]:
        """The plans with a part of the declared requests, by their number in `heat`."""
        looks = [replace(each, prediction=None, kept={}) for each in heat]
        known = [each.prediction if self.whole else None for each in heat]
        self._ahead([look for look, seen in zip(looks, known, strict=True) if seen is None], DECLARED, self.look)
        return {n: self._look(look, DECLARED, seen) for n, (look, seen) in enumerate(zip(looks, known, strict=True))}

    def _settled(self, looks: Sequence[Rival], always: str) -> list[Rival]:
        """The final of the plan that is best by the part of the declared requests, the next one, and that of the way
        `always`, if the best one keeps about all requests under every workload: no other can be noticeably better.
        Where it does not, or the fewest devices are asked for: none."""
        order = ranked([each for each in looks if each.prediction])
        if self.whole or not order or order[0].plan.objective.name == "gpus":
            return []
        first = self._everywhere(order[0], as_long_as_all=True)
        if not first.keeps_all or not (first := self._in_final(first, None)).keeps_all:
            return []
        others = [each for place, each in enumerate(order) if place == 1 or (place > 1 and each.is_way(always))]
        for workload in self.workloads:
            self._ahead(others, workload, self.look)
        final = [first, *self._final([self._everywhere(each) for each in others], [None] * len(others))]
        return ranked([each for each in final if each.prediction is not None])

    def _everywhere(self, look: Rival, as_long_as_all: bool = False) -> Rival:
        """The plan with a part of the requests of every workload, or of one after another while it keeps about all."""
        for workload in self.workloads:
            if as_long_as_all and look.kept and not look.keeps_all:
                break
            look = self._look(look, workload)
        return look

    def _looks(self, looks: Mapping[int, Rival], always: str) -> dict[int, Rival]:
        """Those of the plans that are not far behind, by their number."""
        found = dict(looks)
        for place, workload in enumerate(() if self.whole else self.workloads[1:]):
            found = self._best(found, _MOST[min(place, len(_MOST) - 1)], always)
            self._ahead([*found.values()], workload, self.look)
            found = {number: self._look(look, workload) for number, look in found.items()}
        return found

    def _look(self, look: Rival, workload: Variation, known: Prediction | None = None) -> Rival:
        """The plan with a part of the requests of one workload more."""
        if workload.name in look.kept:
            return look
        if _keeps_all_of(look, workload):
            return replace(look, kept={**look.kept, workload.name: 1.0})
        return look.looked_at(workload, known or self.simulate(look.plan, self.look, workload))

    def _ahead(self, looks: Sequence[Rival], workload: Variation, part: float) -> None:
        """Simulate those of the plans together that are not known under that workload."""
        known = [workload.name in look.kept or _keeps_all_of(look, workload) for look in looks]
        self.ahead([look.plan for look, seen in zip(looks, known, strict=True) if not seen], part, workload)

    @staticmethod
    def _best(looks: Mapping[int, Rival], count: int, always: str) -> dict[int, Rival]:
        """At most so many of the plans, without those that are far behind."""
        most = max((look.mean for look in looks.values()), default=0.0)
        order = sorted(looks, key=lambda number: (-looks[number].mean, looks[number].latency, number))
        left = [n for n in order if looks[n].mean * len(looks[n].kept) >= most * len(looks[n].kept) - _BEHIND][:count]
        return {number: look for number, look in looks.items() if number in left or look.is_way(always)}

    def _final(self, looks: Sequence[Rival], known: Sequence[Prediction | None]) -> list[Rival]:
        """As `_in_final`, all that can be simulated."""
        unknown = [look.plan for look, seen in zip(looks, known, strict=True) if seen is None]
        self.ahead(unknown, 1.0, DECLARED)
        for workload in self.workloads if self.whole else ():
            self._ahead(looks, workload, 1.0)
        final = [self._in_final(look, seen) for look, seen in zip(looks, known, strict=True)]
        return [each for each in final if each.prediction is not None]

    def _in_final(self, look: Rival, known: Prediction | None) -> Rival:
        """The plan with all requests of the declared workload, and with all workloads."""
        for workload in self.workloads:
            if workload is DECLARED:
                look = look.looked_at(workload, known or self.simulate(look.plan, 1.0, workload))
            elif workload.name not in look.kept and self.whole:
                look = look.looked_at(workload, self.simulate(look.plan, 1.0, workload))
        return look


def _keeps_all_of(look: Rival, workload: Variation) -> bool:
    """Whether the workload brings less than what the plan keeps all of."""
    return workload.is_less and look.kept.get(DECLARED.name, 0.0) >= _ALL


def ranked(rivals: Sequence[Rival]) -> list[Rival]:
    """The best first: those of which no model falls short of the declared objectives, with the objective `gpus` those
    of them on the fewest devices, then those that keep most requests in the mean of all workloads; of equal ones the
    one that keeps most under its worst workload, then the one whose worst model is best off, and then the one that
    answers soonest."""
    remaining, order = list(rivals), []
    while remaining:
        first = _best(remaining)
        order.append(first)
        remaining = [each for each in remaining if each is not first]
    return order


def _best(rivals: Sequence[Rival]) -> Rival:
    pool = [each for each in rivals if not each.short]
    if pool and pool[0].plan.objective.name == "gpus":
        fewest = min(each.plan.devices for each in pool)
        pool = [each for each in pool if each.plan.devices == fewest]
    pool = pool or list(rivals)
    most = max(each.mean for each in pool)
    equal = [each for each in pool if each.mean >= most - EQUAL]
    return min(equal, key=lambda each: (-each.least, -each.worst, each.latency))


def why(first: Rival, other: Rival) -> str:
    """Why the other one is not taken in place of the first."""
    if other.short and not first.short:
        return f"{other.short} of its models fall short of their objectives"
    if first.plan.objective.name == "gpus" and other.plan.devices > first.plan.devices:
        return "more devices"
    if not (first.is_measured and other.is_measured):
        return "not compared by requests per second, which its simulation was too short to show"
    common = [name for name in first.kept if name in other.kept]
    if first.mean - other.mean > EQUAL:
        worst = max(common, key=lambda name: first.kept[name] - other.kept[name])
        parts = f"{other.kept[worst]:.0%} of the requests count there, not {first.kept[worst]:.0%}"
        return f"{100 * (first.mean - other.mean):.1f} points fewer over all workloads, most of them {worst!r}: {parts}"
    if other.least < first.least:
        worst = min(common, key=lambda name: other.kept[name])
        return (
            f"as many requests in the mean, but {other.kept[worst]:.0%} of them with {worst!r}, not {first.least:.0%}"
        )
    if other.worst < first.worst:
        return f"as many requests, but {other.worst:.0%} of some model's, not {first.worst:.0%}"
    return "as many requests, but slower answers"
