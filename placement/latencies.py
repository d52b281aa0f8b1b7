"""TTFT, TPOT and SLO attainment of a unit in its steady state, from queueing theory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from placement.candidates import MEETS
from placement.demand import Demand
from placement.settle import Runner, Steady

HORIZON = 60.0  # seconds of overload after which attainment is told
# Simulated TPOTs of loaded units are up to a tenth above the estimate: prefill comes in bursts.
_MARGIN = 1.1
_STEP = 1.2


def waiting(runners: Sequence[Runner], state: Steady) -> float:
    """Mean seconds that a request waits for prefill: Pollaczek-Khinchine for the queue of all models, where prompts of
    each model spread as an exponential distribution does (the mean square of their times is twice the squared mean)."""
    busy = min(state.prefill, 0.999)
    square = 0.0
    for runner, rate, batch in zip(runners, state.rates, state.batches, strict=True):
        seconds = runner.prefill.seconds_at(batch) * runner.prefill_stretch
        square += rate * seconds * seconds
    return square / (1.0 - busy)


def latencies(
    demand: Demand, runner: Runner, batch: float, rate: float, state: Steady, wait: float
) -> tuple[float, float, float]:
    """TTFT and TPOT (means, seconds) and attainment of one model.

    The wait for prefill is taken as exponential with probability U of not being zero. The batch is taken as normal; its
    variance is the mean, as of a Poisson distribution, over the elasticity of capacity in the batch: where larger
    batches hardly serve more, a few requests too many stay for long. TPOT gets a margin of a tenth. Where only
    a part r of the rate is served, the wait after t seconds is t (1 - r) / r, told for the first `HORIZON` seconds.
    """
    prefill = runner.prefill.seconds_at(1.0) * runner.prefill_stretch
    step = runner.decode.seconds_at(batch) * runner.decode_stretch / max(state.progress, 1e-9)
    served = rate / runner.rate
    met = served >= MEETS
    ttft = wait + prefill if met else math.inf
    attainment = min(1.0, served) if not met else 1.0
    if demand.slo_ttft is not None:
        slack = demand.slo_ttft - prefill
        if slack <= 0:
            in_time = 0.0
        else:
            busy = state.prefill
            in_time = 1.0 - busy * math.exp(-slack * busy / wait) if wait > 0 and busy > 0 else 1.0
            if not met:
                in_time *= min(1.0, slack * served / ((1.0 - served) * HORIZON))
        attainment = min(attainment, in_time)
    if demand.slo_tpot is not None and demand.decode_steps > 0:
        within = runner.decode.batch_within(demand.slo_tpot / _MARGIN * state.progress / runner.decode_stretch)
        if within < 1.0:
            attainment = 0.0
        elif within < runner.decode.batch[-1]:
            attainment *= _normal((within + 0.5 - batch) / _deviation(runner, batch))
    return ttft, step, attainment


def _deviation(runner: Runner, batch: float) -> float:
    """Standard deviation of the batch."""
    capacity = runner.decode.capacity_at(batch)
    elasticity = (runner.decode.capacity_at(_STEP * batch) / capacity - 1.0) / (_STEP - 1.0)
    return math.sqrt(max(batch, 0.25) / max(elasticity, 0.05))


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))
