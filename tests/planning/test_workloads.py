"""The workloads that every plan is tried on, and what they have in common with the declared one."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from muxserve.planning.demand.known_models import planned_architecture
from muxserve.planning.place.workloads import DECLARED, WORKLOADS, Variation, loads_of
from muxserve.workload import generate
from muxserve.workload.trace import TraceRequest
from placement.demand import Demand

SECONDS = 300.0
NAMES = ("a", "b", "c", "d", "e", "f")


def demands() -> list[Demand]:
    shape = planned_architecture("llama-2-7b", Path())
    return [
        Demand(name=name, architecture=shape, rate=6.0 - number, prompt_tokens=200, output_tokens=100)
        for number, name in enumerate(NAMES)
    ]


def requests(varied: Variation, seconds: float = SECONDS) -> list[TraceRequest]:
    loads = loads_of(demands(), dict.fromkeys(NAMES, 4096), seconds, varied)
    return list(generate(loads, seconds, 0))


def by_model(found: list[TraceRequest]) -> dict[str, int]:
    return {name: sum(each.model == name for each in found) for name in NAMES}


def tokens(found: list[TraceRequest]) -> float:
    return sum(each.prompt_tokens + each.output_tokens for each in found) / len(found)


WHICH = {each.name: each for each in WORKLOADS}
PLAIN = requests(DECLARED)


@pytest.mark.parametrize(("name", "factor"), [("30 % more", 1.3), ("30 % less", 0.7)])
def test_more_and_less_are_of_rates_and_of_lengths(name: str, factor: float) -> None:
    found = requests(WHICH[name])
    assert len(found) / len(PLAIN) == pytest.approx(factor, rel=0.03)
    assert tokens(found) / tokens(PLAIN) == pytest.approx(factor, rel=0.05)


def test_one_model_has_three_times_the_requests_and_no_other_has_more() -> None:
    found, plain = by_model(requests(WHICH["one model x3"])), by_model(PLAIN)
    assert found["a"] / plain["a"] == pytest.approx(3.0, rel=0.1)
    assert all(found[name] == plain[name] for name in NAMES[1:])


def test_bursts_bring_as_many_requests_in_clumps() -> None:
    found = [each.arrival for each in requests(WHICH["bursts"], 3000.0) if each.model == "a"]
    gaps = [after - before for before, after in pairwise(found)]
    mean = sum(gaps) / len(gaps)
    assert 1 / mean == pytest.approx(6.0, rel=0.15)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread / mean == pytest.approx(4.0, rel=0.2)


def test_groups_have_the_whole_load_in_turn() -> None:
    found = requests(WHICH["groups take turns"])
    assert len(found) / len(PLAIN) == pytest.approx(1.0, rel=0.05)
    phases = [{each.model for each in found if 25.0 * n <= each.arrival < 25.0 * (n + 1)} for n in range(12)]
    assert phases[:3] == phases[3:6] == phases[6:9] == phases[9:]
    assert sorted(name for group in phases[:3] for name in group) == list(NAMES)
    counts = [sum(25.0 * n <= each.arrival < 25.0 * (n + 1) for each in found) for n in range(12)]
    assert min(counts) > 0.75 * len(PLAIN) / 12


def test_a_short_trial_has_each_group_once() -> None:
    found = requests(WHICH["groups take turns"], 6.0)
    assert set(by_model(found)) == set(NAMES)
    assert all(by_model(found).values())


def test_a_model_alone_has_nobody_to_take_turns_with() -> None:
    (alone,) = [replace(demands()[0], name="alone")]
    loads = loads_of([alone], {"alone": 4096}, SECONDS, WHICH["groups take turns"])
    assert loads == loads_of([alone], {"alone": 4096}, SECONDS)
