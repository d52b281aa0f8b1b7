"""Plans that their own simulation bears out.

The estimator works with means, and is optimistic close to what the devices can do. Where the simulation of a plan
misses objectives that the plan says are met, the models that miss them are planned for once more as if they were asked
for more often, until the simulation of the true rates agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from muxserve.planning.predict import Prediction, falls_short
from placement.demand import Demand
from placement.planner import ClusterPlan

SPARE = 1.25  # a model that falls short is planned for with so much more of its rate, each time
ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Verified:
    """The plan that the simulation bears out best, and that simulation. `spare` are the factors by which rates were
    raised to arrive at it."""

    plan: ClusterPlan
    prediction: Prediction
    spare: Mapping[str, float] = field(default_factory=dict)


def verified(
    demands: Sequence[Demand],
    plan: Callable[[Sequence[Demand]], ClusterPlan],
    simulate: Callable[[ClusterPlan], Prediction],
    attempts: int = ATTEMPTS,
) -> Verified:
    """Plan `demands`, simulate, and plan again with spare for the models that fall short, at most `attempts` times.

    A plan that does not even promise to meet everything is returned as it is: there is nothing to disprove.
    """
    made = plan(demands)
    best = Verified(made, simulate(made))
    spare: dict[str, float] = {}
    short = falls_short(best.plan, best.prediction)
    for _ in range(attempts):
        if not made.meets or not short:
            break
        spare = {**spare, **{name: spare.get(name, 1.0) * SPARE for name in short}}
        made = plan([replace(demand, rate=demand.rate * spare.get(demand.name, 1.0)) for demand in demands])
        if not made.meets:
            break
        candidate = restated(made, demands, spare)
        prediction = simulate(candidate)
        short = falls_short(candidate, prediction)
        if _badness(candidate, prediction) < _badness(best.plan, best.prediction):
            best = Verified(candidate, prediction, spare)
    return best


def restated(plan: ClusterPlan, demands: Sequence[Demand], spare: Mapping[str, float]) -> ClusterPlan:
    """`plan`, made for rates raised by `spare`, as a plan of the true `demands`: what is asked and served is scaled
    back; where models are, and their shares, stay."""
    units = tuple(
        replace(unit, models=tuple(replace(m, rate=m.rate / spare.get(m.model, 1.0)) for m in unit.models))
        for unit in plan.placement.units
    )
    estimates = []
    for estimate in plan.estimates:
        models = []
        for model in estimate.models:
            factor = spare.get(demands[model.member.model].name, 1.0)
            rate = model.rate / factor
            models.append(replace(model, rate=rate, throughput=min(model.throughput, rate)))
        estimates.append(replace(estimate, models=tuple(models)))
    placement = replace(plan.placement, units=units)
    return replace(plan, demands=tuple(demands), placement=placement, estimates=tuple(estimates))


def _badness(plan: ClusterPlan, prediction: Prediction) -> tuple[int, float]:
    figures = prediction.summary.models
    missed = [1.0 - each.slo.get("all", 1.0) for each in figures.values()]
    return len(falls_short(plan, prediction)), max(missed, default=0.0)
