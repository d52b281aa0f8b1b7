"""Models are divided among GPUs whose memory they share when they are awake."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.planning.candidates.resident_units import NoUnitError, resident_units
from placement.demand import Demand
from placement.memory import MemoryRules, model_bytes
from tests.placement.analytic import B7, B13, B30, B65
from tests.placement.analytic import demand as demand_of

GIB = 1 << 30
RULES = MemoryRules.served(0.92)
SIZES = {"7b": B7, "13b": B13, "30b": B30, "65b": B65}


def demand(architecture: str, rate: float, name: str) -> Demand:
    return demand_of(name, SIZES[architecture], rate)


def models(*architectures: str, rate: float = 1.0) -> list[Demand]:
    return [demand(name, rate, name=f"m{n}") for n, name in enumerate(architectures)]


def test_small_models_have_a_gpu_each_and_large_ones_several() -> None:
    units = resident_units(models(*["7b"] * 6, "65b"), frozenset(), 8, 80 * GIB, RULES, 10 * GIB)
    assert [(unit.gpus, len(unit.models)) for unit in units] == [(4, 1), (1, 2), (1, 2), (1, 1), (1, 1)]


def test_where_gpus_are_few_small_models_are_split_like_large_ones() -> None:
    (unit,) = resident_units(models("7b", "65b"), frozenset(), 4, 80 * GIB, RULES, 10 * GIB)
    assert (unit.gpus, sorted(unit.models)) == (4, ["m0", "m1"])


def test_what_is_asked_much_and_what_is_large_is_spread() -> None:
    busy = models("7b", "7b", rate=9.0)
    idle = [demand("7b", 0.1, name=f"i{n}") for n in range(6)]
    units = resident_units([*busy, *idle], frozenset(), 2, 80 * GIB, RULES, 10 * GIB)
    assert [sorted(unit.models)[-1] for unit in units] == ["m0", "m1"]
    assert [len(unit.models) for unit in units] == [4, 4]


def test_models_that_never_sleep_find_room_or_are_named() -> None:
    asked = models(*["7b"] * 6)
    always = frozenset(each.name for each in asked)
    units = resident_units(asked, always, 2, 80 * GIB, RULES, 10 * GIB)
    assert [len(unit.models) for unit in units] == [3, 3]
    with pytest.raises(NoUnitError, match=r"m\d has no room beside models that never sleep, on 1 GPUs"):
        resident_units(asked, always, 1, 80 * GIB, RULES, 10 * GIB)


def test_a_model_that_is_too_large_is_named() -> None:
    with pytest.raises(
        NoUnitError, match=r"m0 needs 12.* GiB of a GPU, and 62.6 GiB are left for models beside the KV pool; raise"
    ):
        resident_units(models("65b"), frozenset(), 1, 80 * GIB, RULES, 10 * GIB)


@given(st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.floats(0.01, 20), st.booleans()), min_size=1, max_size=30),
       st.integers(1, 16))  # fmt: skip
def test_every_model_has_one_place_with_room_for_it(asked: list[tuple[str, float, bool]], gpus: int) -> None:
    demands = [demand(name, rate, name=f"m{n}") for n, (name, rate, _) in enumerate(asked)]
    always = frozenset(f"m{n}" for n, (_, _, kept) in enumerate(asked) if kept)
    pool = 8 * GIB
    try:
        units = resident_units(demands, always, gpus, 80 * GIB, RULES, pool)
    except NoUnitError:
        return
    assert sum(unit.gpus for unit in units) <= gpus
    assert sorted(name for unit in units for name in unit.models) == sorted(each.name for each in demands)
    by_name = {each.name: each for each in demands}
    usable = int(0.92 * 80 * GIB) - RULES.reserve_bytes - pool
    for unit in units:
        size = {name: model_bytes(by_name[name], unit.gpus, RULES) for name in unit.models}
        kept = sum(size[name] for name in unit.models if name in always)
        largest = max((size[name] for name in unit.models if name not in always), default=0)
        assert kept + largest <= usable
