"""How much jobs on one device slow each other down.

Alone, job j needs the fraction b_j of the device's bandwidth and c_j of its compute. Together they cannot get more than
there is. Where they ask for more, the part of each job that waits for that resource is stretched by one common factor
sigma (tau for compute): the job then takes `1 + b_j (sigma - 1)` times as long, so it asks for less per second, and
sigma is the smallest factor at which the demands fit:

    sum_j b_j / (1 + b_j (sigma - 1)) = capacity        sigma >= 1

What is left beyond conservation are the constants of `Interference`: which part of a resource several jobs reach
together, and what neighbours cost even where everything fits (shared caches, clocks). They are fitted from
measurements of pairs; without any they are 1 and 0, which is the least that colocation costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from muxserve.costs.latency import Load

_PRECISION = 1e-9


class Interference(msgspec.Struct, frozen=True, omit_defaults=True):
    """Constants of a device.

    `bandwidth` and `compute` are the fractions of the device that jobs reach together, relative to what one reaches
    alone. `friction` is the slowdown that a neighbour brings which uses all of the device's compute, in addition.
    """

    bandwidth: float = 1.0
    compute: float = 1.0
    friction: float = 0.0


def slowdowns(constants: Interference, loads: Sequence[Load]) -> list[float]:
    """Factor (at least 1) by which each of the jobs is slower beside the others."""
    if len(loads) == 1:
        return [1.0]
    needed = [load.compute for load in loads]
    memory = stretch([load.bandwidth for load in loads], constants.bandwidth) - 1.0
    compute = stretch(needed, constants.compute) - 1.0
    found = [1.0 + load.bandwidth * memory + load.compute * compute for load in loads]
    if constants.friction:
        beside = sum(needed)
        found = [
            slower + constants.friction * min(1.0, beside - own) for slower, own in zip(found, needed, strict=True)
        ]
    return found


def stretch(demands: Sequence[float], capacity: float) -> float:
    """The smallest factor of at least 1 by which the waiting parts of jobs must be stretched for their demands
    (fractions of a resource) to fit into `capacity`."""
    waiting = [demand if demand < 1.0 else 1.0 for demand in demands if demand > _PRECISION]
    if sum(waiting) <= capacity:
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
        value -= capacity
        if value < _PRECISION:
            break
        x += value / slope
    return 1.0 + x


def fit(measured: Sequence[tuple[Load, tuple[Load, ...], float]]) -> Interference:
    """The constants that explain measured slowdowns best: (the job's load, its neighbours' loads, factor) each.

    Least squares of the logarithms, searched on a grid that is refined around the best point. A constant that the
    measurements do not tell anything about keeps its neutral value.
    """
    if not measured:
        return Interference()

    def error(constants: Interference) -> float:
        # A pull to the neutral values, far below what any measurement weighs.
        pull = (constants.bandwidth - 1) ** 2 + (constants.compute - 1) ** 2 + constants.friction**2
        wrong = sum(
            math.log(slowdowns(constants, (mine, *others))[0] / factor) ** 2 for mine, others, factor in measured
        )
        return wrong / len(measured) + 1e-6 * pull

    best = Interference()
    step = 0.25
    for _ in range(6):
        around = (-2 * step, -step, 0.0, step, 2 * step)
        candidates = [
            Interference(max(0.2, best.bandwidth + b), max(0.2, best.compute + c), max(0.0, best.friction + f))
            for b, c, f in itertools.product(around, around, around)
        ]
        best = min([best, *candidates], key=error)
        step /= 2.5
    return best
