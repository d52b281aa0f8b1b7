"""The steady state of a unit: Eq. 3 of MuxServe (arXiv:2404.02015), solved by search for the batch sizes.

The paper's throughput of model m in a unit is min(b_m / (sum_i t_p^i(b_i) + t_d^m(b_m) * l_m), W_m): while a batch of m
is in service for l_m decode steps, every model of the unit prefills a batch once, and prefill holds decode up. That
takes all models for equally long in service. Here each model i prefills W_i requests a second, whoever else is in
service for how long, so that prefill jobs run for the part U = sum_i rate_i * t_p^i(b_i) / b_i of all time. Decode
makes progress at the rate

    phi = U * min(1, (1 - p) / D) + (1 - U) * min(1, 1 / D)

where p is the share of compute that prefill takes and D = sum_i P(i has something to decode) * s_i what decode asks
for; jobs that do not fit beside each other take turns. Then rate_m = min(phi * b_m / (t_d^m(b_m) * l_m), W_m). With
p = 1, D <= 1 and equal times in service this is Eq. 3.

b_m is the smallest batch that meets the model's rate, within its number of sequences and its part of the page pool,
which is divided by demand, as quotas are, except that nobody gets more than it needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from placement.curves import DecodeCurve, PrefillCurve

_ROUNDS = 24
_CLOSE = 1e-4
_OVERLAP = 1e-9


class Runner(NamedTuple):
    """A model as the steady state sees it: `rate` in requests per second, `sequence` bytes of KV per request on each
    device, `most` sequences at once, decode share and curves. Stretches are slowdowns by what runs beside it."""

    rate: float
    sequence: float
    most: float
    share: float
    decode: DecodeCurve
    prefill: PrefillCurve
    decode_stretch: float = 1.0
    prefill_stretch: float = 1.0


class Steady(NamedTuple):
    """What a unit settles at. `progress` is phi, `prefill` U, `decode` D; `short` says which models the pool cuts."""

    progress: float
    prefill: float
    decode: float
    batches: list[float]
    rates: list[float]
    pool_used: float
    short: list[bool]


def settle(runners: Sequence[Runner], prefill_share: float, pool: float, guess: float = 1.0) -> Steady:
    """The steady state of `runners` in a unit with `pool` bytes of KV on each device; `guess` is a phi to start from.

    Bisects phi, since the batches that a lower phi asks for change U and D in opposite ways.
    """
    beside = _beside(runners, prefill_share)
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        state = _at(guess, runners, beside, pool)
        error = state.progress - guess
        if abs(error) <= _CLOSE * guess:
            break
        if error > 0:
            low = guess
        else:
            high = guess
        # What the guess leads to is nearly right when the unit is lightly loaded; else the middle.
        near = low < state.progress < high and abs(error) < 0.25 * guess
        guess = state.progress if near else (low + high) / 2
        if high - low < _CLOSE * low:
            break
    return state._replace(progress=guess)


def _beside(runners: Sequence[Runner], prefill_share: float) -> float:
    """Compute that decode may take while a prefill runs; 0 if some decode job does not fit there at all."""
    left = 1.0 - prefill_share
    return left if all(runner.share <= left + _OVERLAP for runner in runners) else 0.0


def _at(phi: float, runners: Sequence[Runner], beside: float, pool: float) -> Steady:
    """Batches, rates and the phi that they lead to, if decode progresses at `phi`."""
    batches: list[float] = []
    used = 0.0
    for rate, sequence, most, _, decode, _, stretch, _ in runners:
        batch = decode.batch_for(rate * stretch / phi)
        if batch > most:
            batch = most
        batches.append(batch)
        used += batch * sequence
    short = [False] * len(batches)
    if used > pool:
        limits = _divide(pool, batches, runners)
        short = [limit < batch - 1e-6 for limit, batch in zip(limits, batches, strict=True)]
        batches = limits
        used = pool
    busy = asked = 0.0
    rates: list[float] = []
    for (wanted, _, most, share, decode, prefill, stretch, slower), batch, cut in zip(
        runners, batches, short, strict=True
    ):
        rate = wanted
        if cut or batch >= most:
            rate = min(wanted, phi * decode.capacity_at(batch) / stretch)
        rates.append(rate)
        busy += rate * prefill.seconds_at(batch) * slower
        asked += (1.0 - math.exp(-batch)) * share
    if busy >= 1.0:
        # Prefill alone is more than the unit can do: less than this phi must suffice.
        return Steady(0.0, 1.0, asked, batches, [rate / busy for rate in rates], used, short)
    during = min(1.0, beside / asked) if asked > 0 else 1.0
    between = min(1.0, 1.0 / asked) if asked > 0 else 1.0
    return Steady(busy * during + (1.0 - busy) * between, busy, asked, batches, rates, used, short)


def _divide(pool: float, wanted: Sequence[float], runners: Sequence[Runner]) -> list[float]:
    """Batches that fill the pool: in proportion to rate x KV of a request, nobody more than `wanted`."""
    batches = [0.0] * len(wanted)
    open_ = list(range(len(wanted)))
    left = pool
    while open_:
        # Equal batch per rate is what quotas in proportion to rate x KV come to.
        scale = left / sum(runners[i].rate * runners[i].sequence for i in open_)
        full = [i for i in open_ if wanted[i] <= scale * runners[i].rate]
        if not full:
            for i in open_:
                batches[i] = scale * runners[i].rate
            break
        for i in full:
            batches[i] = wanted[i]
            left -= wanted[i] * runners[i].sequence
        open_ = [i for i in open_ if i not in full]
    return batches
