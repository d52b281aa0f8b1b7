"""Which models share the memory of which GPUs, where memory decides who is awake. Pure.

Every model has one unit, and sleeps or is awake there. A model is split over as few GPUs as leave others room
beside it. Each GPU goes to the way to split whose models have least room; the models of each way go
where they can be awake together, evenly by the work that they are expected to bring and by their weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from placement.demand import Demand
from placement.format import format_size
from placement.memory import MemoryRules, model_bytes

# A model is split over as few GPUs as leave this part of their memory to KV and to other models.
SHARED_PART = 0.4
# A first token, and a token after another, within these times, seconds, where a model has no objectives.
TTFT_SECONDS, TPOT_SECONDS = 5.0, 0.1


class NoUnitError(ValueError):
    """No unit can have the models; the message says why."""


@dataclass(slots=True)
class ResidentUnit:
    """Models that share the memory of `gpus` GPUs, of each of which they take `bytes` together; `awake` are those of
    models that never sleep, `most` those of the largest that does. `part` adds up the parts of its models in all work
    and in all weights."""

    gpus: int
    models: list[str] = field(default_factory=list)
    part: float = 0.0
    bytes: int = 0
    awake: int = 0
    most: int = 0

    def needed_with(self, size: int, sleeps: bool) -> int:
        """Bytes of each GPU that have to be there, when a model that takes `size` comes, too."""
        return self.awake + max(self.most, size) if sleeps else self.awake + size + self.most

    def add(self, name: str, size: int, sleeps: bool, part: float) -> None:
        """Have the model, too."""
        self.models.append(name)
        self.part += part
        self.bytes += size
        if sleeps:
            self.most = max(self.most, size)
        else:
            self.awake += size


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
    units = [ResidentUnit(tp) for tp in sorted(counts, reverse=True) for _ in range(counts[tp])]
    work = {each.name: _work(each) for each in demands}
    weights = {each.name: each.architecture.weight_bytes(each.dtype) for each in demands}
    parts = {name: work[name] / sum(work.values()) + weights[name] / sum(weights.values()) for name in work}
    for tp, models in by_tp.items():
        places = [unit for unit in units if unit.gpus == tp]
        # Those that never sleep have to find room; then the largest first, each where there is least.
        for each in sorted(models, key=lambda each: (each.name not in always, -parts[each.name], each.name)):
            sleeps, size = each.name not in always, model_bytes(each, tp, rules)
            fitting = [unit for unit in places if unit.needed_with(size, sleeps) <= room]
            if not fitting:
                raise NoUnitError(f"{each.name} has no room beside models that never sleep, on {gpus} GPUs")
            place = min(fitting, key=lambda unit: (max(0, unit.bytes + size - room), unit.part))
            place.add(each.name, size, sleeps, parts[each.name])
    return [unit for unit in units if unit.models]


def _split(demand: Demand, whole: int, most: int, rules: MemoryRules) -> int:
    """Over how many GPUs, with `whole` bytes each, the model is split: as few as leave `SHARED_PART` of them.

    Raises:
        NoUnitError: `most` are too few.
    """
    tp = 1
    while tp <= most:
        if model_bytes(demand, tp, rules) <= (1.0 - SHARED_PART) * whole and demand.architecture.heads % tp == 0:
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
        mean = sum(model_bytes(each, tp, rules) for each in models) / len(models)
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
    needed = model_bytes(demand, tp, rules)
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
