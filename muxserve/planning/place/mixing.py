"""Chooses, for each group of units that have models in common, the way to serve it that keeps most of its requests.

Groups do not know of each other, so that one simulation of a plan tries a way for all of them. A group is served in
another way than the plan says only where no workload keeps fewer of its requests. The workload under which the plan
loses most is tried first: what gains nothing there is not tried any further.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from muxserve.planning.candidates.mixed import Alternative, with_units
from muxserve.planning.place.contest import EQUAL, Contest
from muxserve.planning.place.prediction import Prediction
from muxserve.planning.place.workloads import Variation
from placement.planner import ClusterPlan


@dataclass(slots=True)
class _Trial:
    """What an alternative gains: parts of all requests to the fleet, added up over the workloads."""

    alternative: Alternative
    gained: float = 0.0

    @property
    def models(self) -> frozenset[str]:
        """Those of its units."""
        return self.alternative.models


def mixed(
    plan: ClusterPlan, others: Callable[[Collection[str]], Iterable[Alternative]], contest: Contest
) -> ClusterPlan | None:
    """The plan with every group of units served as it is best; None if it is as good as that.

    Args:
        others: other ways to serve the units of these models.
    """
    least = EQUAL * len(contest.workloads)
    before: dict[Variation, Prediction] = {}
    for workload in contest.workloads:
        # Who keeps no less of what is declared keeps no less of less.
        made = None if workload.is_less else contest.simulate(plan, contest.look, workload)
        if made is not None:
            before[workload] = made
    asked = {workload: max(1, _asked(made, made.summary.models)) for workload, made in before.items()}
    if sum(1.0 - _kept(made, made.summary.models) / asked[workload] for workload, made in before.items()) <= least:
        return None
    losing = {
        name for made in before.values() for name in made.summary.models if _kept(made, [name]) < _asked(made, [name])
    }
    trials = [_Trial(each) for each in others(losing)]
    order = sorted(before, key=lambda each: _kept(before[each], before[each].summary.models) / asked[each])
    for place, workload in enumerate(order):
        made = before[workload]
        ways = dict.fromkeys(trial.alternative.way for trial in trials)
        alike = [[trial for trial in trials if trial.alternative.way == way] for way in ways]
        contest.ahead([_with(plan, together) for together in alike], contest.look, workload)
        for together in alike:
            tried = contest.simulate(_with(plan, together), contest.look, workload)
            for trial in together:
                gained = -1 if tried is None else _kept(tried, trial.models) - _kept(made, trial.models)
                if gained < 0 or (place == 0 and not gained):
                    trials.remove(trial)
                else:
                    trial.gained += gained / asked[workload]
    best: dict[frozenset[str], _Trial] = {}
    for trial in trials:
        if trial.gained > 0.0 and (trial.models not in best or trial.gained > best[trial.models].gained):
            best[trial.models] = trial
    return _with(plan, [*best.values()]) if sum(trial.gained for trial in best.values()) > least else None


def _with(plan: ClusterPlan, trials: Sequence[_Trial]) -> ClusterPlan:
    return with_units(plan, {number: unit for trial in trials for number, unit in trial.alternative.units.items()})


def _asked(made: Prediction, models: Iterable[str]) -> int:
    """Requests for these models."""
    return sum(made.summary.models[name].requests for name in models if name in made.summary.models)


def _kept(made: Prediction, models: Iterable[str]) -> int:
    """How many of them are answered within their objectives."""
    return sum(map(made.kept, models))
