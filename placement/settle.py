"""The steady state of a unit: Eq. 3 of MuxServe (arXiv:2404.02015), solved by search for the batch sizes.

The paper's throughput of model m in a unit is min(b_m / (sum_i t_p^i(b_i) + t_d^m(b_m) * l_m), W_m): while a batch of m
is in service for l_m decode steps, every model of the unit prefills a batch once, and prefill holds decode up. That
takes all models for equally long in service. Here each model i prefills W_i requests a second, whoever else is in
service for how long, so that prefill jobs run for the part U = sum_i rate_i * t_p^i(b_i) / b_i of all time. Decode
makes progress at the rate

    phi = U / max(1, R(1 - p)) + (1 - U) / max(1, R(1))

where p is the share of compute that prefill takes and R(c) how many turns decode jobs take in compute c: their shares
are packed into as few turns as possible, and a turn counts with the probability that it has something to decode (R is
infinite if a job fits into no turn). Then rate_m = min(phi * b_m / (t_d^m(b_m) * l_m), W_m). With p = 1, shares that
fit beside each other and equal times in service this is Eq. 3.

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


Turns = list[list[int]]


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
    """What a unit settles at. `progress` is phi, `prefill` U, `decode` the compute that decode asks for
    on average; `short` says which models the pool cuts."""

    progress: float
    prefill: float
    decode: float
    batches: list[float]
    rates: list[float]
    pool_used: float
    short: list[bool]


def settle(runners: Sequence[Runner], prefill_share: float, pool: float, guess: float = 1.0) -> Steady:
    """The steady state of `runners` in a unit with `pool` bytes of KV on each device; `guess` is a phi to start from.

    Bisects phi, since the batches that a lower phi asks for change U and R in opposite ways.
    """
    shares = [runner.share for runner in runners]
    between, during = turns(shares, 1.0), turns(shares, 1.0 - prefill_share)
    assert between is not None, "a share is at most 1"
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        state = _at(guess, runners, between, during, pool)
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


def turns(shares: Sequence[float], compute: float) -> Turns | None:
    """Jobs with these shares in as few groups as possible, each within `compute` (first fit, the largest first); None
    if one does not fit at all."""
    rooms: list[float] = []
    groups: Turns = []
    for index in sorted(range(len(shares)), key=lambda i: -shares[i]):
        share = shares[index]
        if share > compute + _OVERLAP:
            return None
        for i, room in enumerate(rooms):
            if share <= room + _OVERLAP:
                rooms[i] -= share
                groups[i].append(index)
                break
        else:
            rooms.append(compute - share)
            groups.append([index])
    return groups


def _speed(groups: Turns | None, active: Sequence[float]) -> float:
    """The speed of decode that takes these turns."""
    if groups is None:
        return 0.0
    if len(groups) == 1:
        return 1.0
    return 1.0 / max(1.0, sum(max(active[i] for i in group) for group in groups))


def _at(phi: float, runners: Sequence[Runner], between: Turns, during: Turns | None, pool: float) -> Steady:
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
    active: list[float] = []
    for (wanted, _, most, share, decode, prefill, stretch, slower), batch, cut in zip(
        runners, batches, short, strict=True
    ):
        rate = wanted
        if cut or batch >= most:
            rate = min(wanted, phi * decode.capacity_at(batch) / stretch)
        rates.append(rate)
        busy += rate * prefill.seconds_at(batch) * slower
        active.append(1.0 - math.exp(-batch))
        asked += active[-1] * share
    if busy >= 1.0:
        # Prefill alone is more than the unit can do: less than this phi must suffice.
        return Steady(0.0, 1.0, asked, batches, [rate / busy for rate in rates], used, short)
    speed = busy * _speed(during, active) + (1.0 - busy) * _speed(between, active)
    return Steady(speed, busy, asked, batches, rates, used, short)


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
