"""Units that plans share are simulated once, and several at a time; nothing comes out otherwise for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace

import pytest

from muxserve.costs.measured import TURN_SECONDS, ProfileModel
from muxserve.costs.profile import Overheads, Profile
from muxserve.planning.place import simulations
from muxserve.planning.place.simulations import Asked, Simulations
from muxserve.simulator import Options, ReplicaRules, SimulationError, SimUnit, simulate
from muxserve.simulator.result import FleetResult
from muxserve.workload.trace import TraceRequest
from tests.scheduling.machine import profile
from tests.simulator.support import Analytic, unit

NAMES = ("m0", "m1", "m2", "m3")


def units(policy: str = "adbs") -> list[SimUnit]:
    return [
        replace(unit([profile(name)], 800, policy), name=f"unit{number}", devices=(number,))
        for number, name in enumerate(NAMES)
    ]


def workload(count: int = 600) -> list[TraceRequest]:
    return [TraceRequest(0.01 * n, (*NAMES, "nowhere")[n % 5], 20 + n % 50, 5 + n % 30) for n in range(count)]


def expected(of: list[SimUnit], load: list[TraceRequest]) -> FleetResult:
    return simulate(of, load, Analytic(), Options(Overheads(turn=TURN_SECONDS)))


def test_what_a_profile_says_of_the_control_path_counts() -> None:
    known = Overheads(turn=0.004, between=0.001, request=0.5)
    of, load = replace(units()[0], device="CPU"), [each for each in workload() if each.model == NAMES[0]]
    measured = ProfileModel(Profile(overheads={of.device: known}), beyond=Analytic())
    made = Simulations(measured, processes=1).records([of], load, {})
    assert made == simulate([of], load, Analytic(), Options(known)).records
    plain = Simulations(Analytic(), processes=1).records([of], load, {})
    late = [a.ttft - b.ttft for a, b in zip(made, plain, strict=True) if a.ttft is not None and b.ttft is not None]
    assert min(late) > 0.4


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_several_processes_find_what_one_simulation_of_all_finds(processes: int) -> None:
    made = Simulations(Analytic(), processes).records(units(), workload(), {})
    assert made == expected(units(), workload()).records


def test_a_unit_that_another_plan_has_as_well_is_not_simulated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[str] = []

    def counted(of: list[SimUnit], *args: object, **options: object) -> FleetResult:
        simulated.extend(each.name for each in of)
        return simulate(of, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(simulations, "simulate", counted)
    known = Simulations(Analytic(), processes=1)
    known.records(units(), workload(), {})
    assert sorted(simulated) == ["unit0", "unit1", "unit2", "unit3"]
    simulated.clear()
    # Other names and devices, and one unit that is another.
    other = [replace(each, name=f"again{number}", devices=(number + 7,)) for number, each in enumerate(units())]
    other[2] = replace(other[2], policy="fcfs")
    assert known.records(other, workload(), {}) == expected(other, workload()).records
    assert simulated == ["again2"]
    simulated.clear()
    # Other requests for one model.
    load = [*workload(), TraceRequest(100.0, "m1", 40, 40)]
    assert known.records(units(), load, {}) == expected(units(), load).records
    assert simulated == ["unit1"]


@pytest.mark.parametrize("processes", [1, 3])
def test_what_several_simulations_have_in_common_is_simulated_once(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided: list[int] = []

    def counted(groups: Sequence[object], count: int) -> list[list[int]]:
        divided.append(len(groups))
        return divide(groups, count)  # type: ignore[arg-type]

    divide = simulations._divide
    monkeypatch.setattr(simulations, "_divide", counted)
    other = [replace(each, policy="fcfs" if number == 2 else each.policy) for number, each in enumerate(units())]
    longer = [*workload(), TraceRequest(100.0, "m1", 40, 40)]
    asked = [Asked(units(), workload(), {}), Asked(other, workload(), {}), Asked(units(), longer, {})]
    made = Simulations(Analytic(), processes).records_of(asked)
    assert made == [expected(list(of), list(load)).records for of, load, _, _ in asked]
    assert divided == [6]  # four units, the one under another policy, and the one with another request


def test_replicas_of_a_model_are_simulated_together_and_once_for_the_same_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated: list[tuple[str, ...]] = []

    def counted(of: list[SimUnit], *args: object, **options: object) -> FleetResult:
        simulated.append(tuple(each.name for each in of))
        return simulate(of, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(simulations, "simulate", counted)
    of = [replace(each, models=units()[0].models) for each in units()[:2]]
    load = [TraceRequest(0.01 * n, "m0", 30, 30) for n in range(400)]
    known = Simulations(Analytic(), processes=1)
    rules = {"m0": ReplicaRules()}
    for _ in range(2):
        assert known.records(of, load, {}) == expected(of, load).records
    by_rules = known.records(of, load, rules)
    assert by_rules == simulate(of, load, Analytic(), Options(Overheads(turn=TURN_SECONDS)), rules).records
    assert known.records(of, load, rules) == by_rules
    assert simulated == [("unit0", "unit1")] * 2


def test_units_are_simulated_until_the_time_of_their_models() -> None:
    of, load = units()[:2], [TraceRequest(0.01 * n, f"m{n % 2}", 40, 60) for n in range(600)]
    made = Simulations(Analytic(), processes=1).records(of, load, {}, until={"m0": 0.5})
    last = {name: max(r.finish or 0.0 for r in made if r.model == name) for name in ("m0", "m1")}
    assert last["m0"] <= 0.5 < last["m1"]


def test_a_child_that_dies_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()

    def dying(*args: object, **options: object) -> FleetResult:
        if os.getpid() != own:
            os._exit(7)
        return simulate(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(simulations, "simulate", dying)
    made = Simulations(Analytic(), processes=3).records(units(), workload(), {})
    assert made == expected(units(), workload()).records


def test_a_child_that_hangs_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()

    def hanging(*args: object, **options: object) -> FleetResult:
        if os.getpid() != own:
            signal.pause()
        return simulate(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(simulations, "simulate", hanging)
    monkeypatch.setattr(simulations, "_PATIENCE", 0.01)
    made = Simulations(Analytic(), processes=3).records(units(), workload(), {})
    assert made == expected(units(), workload()).records


def test_what_cannot_be_simulated_is_an_error_here_wherever_it_was_tried() -> None:
    load = sorted(workload(), key=lambda each: (each.model != "m3", -each.arrival))
    with pytest.raises(SimulationError, match="fall"):
        Simulations(Analytic(), processes=3).records(units(), load, {})


@pytest.mark.parametrize("processes", [1, 3])
def test_progress_counts_all_requests(processes: int) -> None:
    told: list[tuple[int, int]] = []
    Simulations(Analytic(), processes).records(units(), workload(), {}, lambda *each: told.append(each))
    assert told == sorted(told)
    assert told[-1] == (480, 480)
