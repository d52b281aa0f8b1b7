"""How much jobs on one device slow each other down.

Alone, job j needs the fraction b_j of the device's bandwidth and c_j of its compute. Together they cannot get more than
there is. Where they ask for more, the part of each job that waits for that resource is stretched by one common factor
sigma (tau for compute): the job then takes `1 + b_j (sigma - 1)` times as long, so it asks for less per second, and
sigma is the smallest factor at which the demands fit:

    sum_j b_j / (1 + b_j (sigma - 1)) = 1        sigma >= 1

That is the least that colocation costs: neighbours may also cost something where everything fits (shared caches,
clocks).
"""

from __future__ import annotations

from collections.abc import Sequence

from muxserve.costs.latency import Load

_PRECISION = 1e-9


def slowdowns(loads: Sequence[Load]) -> list[float]:
    """Factor (at least 1) by which each of the jobs is slower beside the others."""
    if len(loads) == 1:
        return [1.0]
    memory = stretch([load.bandwidth for load in loads]) - 1.0
    compute = stretch([load.compute for load in loads]) - 1.0
    return [1.0 + load.bandwidth * memory + load.compute * compute for load in loads]


def stretch(demands: Sequence[float]) -> float:
    """The smallest factor of at least 1 by which the waiting parts of jobs must be stretched for their demands
    (fractions of a resource) to fit into the device."""
    waiting = [demand if demand < 1.0 else 1.0 for demand in demands if demand > _PRECISION]
    if sum(waiting) <= 1.0:
        return 1.0
    # With x = sigma - 1 each term b / (1 + b x) is convex and falling: Newton from x = 0 rises to the root and never
    # passes it.
    x = 0.0
    for _ in range(64):
        value = slope = 0.0
        for b in waiting:
            term = b / (1.0 + b * x)
            value += term
            slope += term * term
        value -= 1.0
        if value < _PRECISION:
            break
        x += value / slope
    return 1.0 + x
