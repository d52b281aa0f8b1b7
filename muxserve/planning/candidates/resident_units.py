"""Which models share the memory of which GPUs, where memory decides who is awake. Pure.

Every model has one unit, and sleeps or is awake there. A model is split over as few GPUs as leave others room
beside it. Each GPU goes to the way to split whose models have least room; the models of each way go
where they can be awake together, evenly by the work that they are expected to bring and by their weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from placement.balance import STARTS, balanced
from placement.demand import Demand
from placement.format import format_size
from placement.memory import MemoryRules, model_bytes

# A model is split over as few GPUs as leave this part of their memory to KV and to other models.
SHARED_PART = 0.4
# A first token, and a token after another, within these times, seconds, where a model has no objectives.
TTFT_SECONDS, TPOT_SECONDS = 5.0, 0.1
# Swaps that are tried at most, about: a second's worth. Those of a start grow with the cube of the models.
_TRIES = 5_000_000


class NoUnitError(ValueError):
    """No unit can have the models; the message says why."""


class ResidentUnit(NamedTuple):
    """Models that share the memory of `gpus` GPUs, of each of which those that never sleep take `awake` bytes."""

    gpus: int
    models: tuple[str, ...]
    awake: int


class _Resident(NamedTuple):
    """A model in a unit: the bytes that it takes of each GPU, whether it sleeps, and its parts in all work and in all
    weights together."""

    name: str
    bytes: int
    sleeps: bool
    part: float


def resident_units(
    demands: Sequence[Demand],
    always: frozenset[str],
    gpus: int,
    memory_bytes: int,
    rules: MemoryRules,
    pool_bytes: int,
) -> list[ResidentUnit]:
    """The units, those over the most GPUs first.

    Args:
        demands: with the shapes of their engines.
        always: models that never sleep.
        gpus: of one machine.
        memory_bytes: of each GPU.
        pool_bytes: of that the part that pools have in each unit.

    Raises:
        NoUnitError: a model is too large, or those that never sleep have no room.
    """
    whole = int(memory_bytes * rules.utilisation) - rules.reserve_bytes
    room = whole - pool_bytes
    by_tp = _by_split(demands, whole, room, gpus, rules)
    counts = _unit_counts(by_tp, room, gpus, rules)
    work = {each.name: _work(each) for each in demands}
    weights = {each.name: each.architecture.weight_bytes(each.dtype) for each in demands}
    parts = {name: work[name] / sum(work.values()) + weights[name] / sum(weights.values()) for name in work}
    units = []
    for tp in sorted(counts, reverse=True):
        members = [
            _Resident(each.name, model_bytes(each, tp, rules.of(each)), each.name not in always, parts[each.name])
            for each in by_tp[tp]
        ]
        # Those that never sleep have to find room; then the largest first.
        members.sort(key=lambda each: (each.sleeps, -each.part, each.name))
        for place in _spread(members, counts[tp], room, gpus):
            unit = [members[number] for number in place]
            units.append(ResidentUnit(tp, tuple(each.name for each in unit), _awake(unit)))
    return [unit for unit in units if unit.models]


def _spread(members: Sequence[_Resident], units: int, room: int, gpus: int) -> list[list[int]]:
    """Which of the members, by number, are in which unit: each at first where there is least, and then as evenly as is
    found.

    Raises:
        NoUnitError: one that never sleeps has no room.
    """

    def cost(numbers: Sequence[int]) -> tuple[float, ...]:
        """Whether the models cannot all be awake together, and how much they have to do."""
        unit = [members[number] for number in numbers]
        most = max((each.bytes for each in unit if each.sleeps), default=0)
        if _awake(unit) + most > room:
            return (math.inf,)
        return float(sum(each.bytes for each in unit) > room), sum(each.part for each in unit)

    places: list[list[int]] = [[] for _ in range(units)]
    for number, member in enumerate(members):
        place = min(places, key=lambda numbers: cost([*numbers, number]))
        if cost([*place, number]) == (math.inf,):
            raise NoUnitError(f"{member.name} has no room beside models that never sleep, on {gpus} GPUs")
        place.append(number)
    return balanced(places, cost, max(1, min(STARTS, _TRIES // len(members) ** 3)))


def _awake(unit: Sequence[_Resident]) -> int:
    """Bytes that are taken all the time."""
    return sum(each.bytes for each in unit if not each.sleeps)


def _split(demand: Demand, whole: int, most: int, rules: MemoryRules) -> int:
    """Over how many GPUs, with `whole` bytes each, the model is split: as few as leave `SHARED_PART` of them.

    Raises:
        NoUnitError: `most` are too few.
    """
    tp = 1
    while tp <= most:
        if (
            model_bytes(demand, tp, rules.of(demand)) <= (1.0 - SHARED_PART) * whole
            and demand.architecture.heads % tp == 0
        ):
            return tp
        tp *= 2
    raise NoUnitError(f"{demand.name} is too large for {most} GPUs of a machine")


def _by_split(
    demands: Sequence[Demand], whole: int, room: int, gpus: int, rules: MemoryRules
) -> dict[int, list[Demand]]:
    """The models by the GPUs that they are split over. Where there are too few for a unit of each way to split, those
    over the fewest are split like those over the next more."""
    by_tp: dict[int, list[Demand]] = {}
    for each in demands:
        try:
            tp = _split(each, whole, gpus, rules)
        except NoUnitError:
            tp = _all_of(each, room, gpus, rules)
        by_tp.setdefault(tp, []).append(each)
    while len(by_tp) > 1 and sum(by_tp) > gpus:
        fewest, more = sorted(by_tp)[:2]
        stuck = [each.name for each in by_tp[fewest] if each.architecture.heads % more]
        if stuck:
            raise NoUnitError(f"{stuck[0]} cannot be split over {more} GPUs, and {gpus} are too few for other units")
        by_tp[more] += by_tp.pop(fewest)
    return by_tp


def _unit_counts(by_tp: Mapping[int, Sequence[Demand]], room: int, gpus: int, rules: MemoryRules) -> dict[int, int]:
    """Units of each size. The next one goes where most models would be for each that has room at the same time."""
    crowds = {}
    for tp, models in by_tp.items():
        mean = sum(model_bytes(each, tp, rules.of(each)) for each in models) / len(models)
        crowds[tp] = len(models) / max(1, int(room / mean))
    units = dict.fromkeys(by_tp, 1)
    left = gpus - sum(by_tp)
    if left < 0:
        raise NoUnitError(f"a unit of each size that models need takes {sum(by_tp)} GPUs, and there are {gpus}")
    while fitting := [tp for tp in units if tp <= left and units[tp] < len(by_tp[tp])]:
        tp = max(fitting, key=lambda each: (crowds[each] / units[each], each))
        units[tp] += 1
        left -= tp
    return units


def _all_of(demand: Demand, room: int, gpus: int, rules: MemoryRules) -> int:
    """Over how many GPUs a model is split that leaves little room beside it on any number of them: over the most."""
    tp = max(1 << n for n in range(gpus.bit_length()) if demand.architecture.heads % (1 << n) == 0)
    needed = model_bytes(demand, tp, rules.of(demand))
    if needed > room:
        where = "a GPU" if tp == 1 else f"each of {tp} GPUs"
        raise NoUnitError(
            f"{demand.name} needs {format_size(needed)} of {where}, and {format_size(max(0, room))} are left for "
            "models beside the KV pool; raise memory.limit, lower kv_pool.size, or give the fleet more GPUs"
        )
    return tp


def _work(demand: Demand) -> float:
    """What a model is expected to have to compute each second, up to a factor that all have: its tokens times its
    weights."""
    return demand.rate * demand.sequence_tokens * demand.architecture.weight_bytes(demand.dtype)
