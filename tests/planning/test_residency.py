"""Fleets in which memory decides who is awake, as they are declared and planned."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from muxserve.config import Fleet, FleetError, parse_fleet
from muxserve.planning.specs.fleet_planner import FleetPlanner
from muxserve.planning.specs.residency import (
    FLEET_BYTES,
    MODEL_BYTES,
    NoMemoryError,
    as_declared,
    residency_of,
    with_model,
    without_model,
)
from muxserve.scheduling.turns import TurnRules
from muxserve.spec import ResidencySpec
from placement import Machine
from tests.support.tiny_checkpoint import tiny_checkpoint

GIB = 1 << 30
MACHINE = Machine(cores=2, memory_bytes=8 * GIB, shared_memory_bytes=4 * GIB)


def declared(memory: str, *models: str) -> Fleet:
    path = tiny_checkpoint(seed=0)
    lines = [f"  - {{name: m{n}, path: {path}, max_len: 256{more}}}" for n, more in enumerate(models)]
    return parse_fleet("\n".join([f"memory: {memory}", "kv_pool: {size: 64MiB}", "models:", *lines]), "f.yaml", Path())


def planned(fleet: Fleet, machine: Machine = MACHINE) -> tuple[FleetPlanner, ResidencySpec | None]:
    planner = FleetPlanner(fleet, machine, lambda: pytest.fail("no GPUs are asked for"))
    plans = planner.at_start()
    assert len(plans) == 1
    return planner, residency_of(planner.fleet, plans, planner.machine).get(plans[0].name)


def test_models_sleep_at_first_but_those_that_are_kept() -> None:
    planner, spec = planned(declared("{limit: 3GiB}", "", ", keep: always", ", slo: {ttft_ms: 700}"))
    assert [model.replicas.min for model in planner.fleet.models] == [0, 1, 0]
    (plan,) = planner.at_start()
    assert plan.served == ("m1",)
    assert spec is not None
    assert sorted(spec.models) == ["m0", "m2"]
    assert spec.models["m2"].ttft == 0.7
    assert spec.models["m0"].bytes > MODEL_BYTES
    assert 0.9 * 3 * GIB < spec.rules.limit < 3 * GIB


def test_auto_is_most_of_what_the_machine_has() -> None:
    _, spec = planned(declared("auto", ""))
    assert spec is not None
    assert 0.8 * 8 * GIB < spec.rules.limit < 0.9 * 8 * GIB


def test_weights_of_all_models_need_not_fit() -> None:
    limit = FLEET_BYTES + (800 << 20)
    _, spec = planned(declared(f"{{limit: {limit}}}", *[""] * 40))
    assert spec is not None
    assert sum(each.bytes for each in spec.models.values()) > limit


@pytest.mark.parametrize(
    ("memory", "models", "expected"),
    [
        ("{limit: 9GiB}", [""], "memory.limit: 9 GiB are more than there is (8 GiB)"),
        ("{limit: 1GiB}", [""], "memory.limit: 1024MiB are not enough: processes, the least of the KV pool"),
        ("{limit: 2GiB}", ["", *[", keep: always"] * 9], "waking m0 "),
    ],
)
def test_limits_without_room(memory: str, models: list[str], expected: str) -> None:
    with pytest.raises(FleetError) as error:
        planned(declared(memory, *models))
    assert expected in str(error.value)


def test_a_limit_that_is_too_small_is_refused_with_a_sum_that_adds_up_and_what_is_enough() -> None:
    with pytest.raises(FleetError) as error:
        planned(declared("{limit: 1GiB}", "", ""))
    found = re.search(r"take about (\d+)MiB, and waking m\d (\d+)MiB; 5% .* at least (\d+)MiB", str(error.value))
    assert found is not None, str(error.value)
    fixed, wake, enough = map(int, found.groups())
    assert 0.95 * (enough - 3) < fixed + wake <= 0.95 * (enough + 3)
    planned(declared(f"{{limit: {enough}MiB}}", "", ""))
    with pytest.raises(FleetError):
        planned(declared(f"{{limit: {enough - 5}MiB}}", "", ""))


def test_a_plan_file_and_memory_exclude_each_other() -> None:
    planner = FleetPlanner(declared("auto", ""), MACHINE, lambda: pytest.fail("no GPUs are asked for"))
    with pytest.raises(FleetError, match="decides at run time"):
        planner.at_start("plan.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memory: much", "memory: must be auto, or a mapping such as \"{limit: 6GiB}\", not 'much'"),
        (
            "memory: auto\ncluster: {nodes: [{gpu: A100, count: 1}]}",
            "cluster.nodes: `memory` decides over models of one",
        ),
        ("memory: {host_copies: much}", 'memory.host_copies: must be auto, off or a size such as "64GiB", not'),
        ("memory: {turns: seldom}", "memory.turns: must be true, false or auto, not 'seldom'"),
        ("memory: auto\ncluster: {launcher: ray}", "cluster.launcher: `memory` decides"),
        ("memory: auto\ncluster: {ranks: 2}", "cluster.ranks: `memory` decides"),
    ],
)
def test_what_memory_does_not_decide_over(text: str, expected: str) -> None:
    path = tiny_checkpoint(seed=0)
    with pytest.raises(FleetError) as error:
        parse_fleet(f"{text}\nmodels: [{{name: a, path: {path}}}]", "f.yaml", Path())
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("model", "memory", "expected"),
    [
        ("replicas: 2", "memory: auto", "models[0].replicas: with `memory` a model has one replica at most, not 2"),
        ("replicas: {min: 0, max: 3}", "memory: auto", "one replica at most, not 3"),
        ("engines: one, stages: 2", "memory: auto", "models[0].stages: such a model has a unit to itself"),
        ("keep: always", "", "models[0].keep: is for fleets with `memory`"),
    ],
)
def test_models_that_memory_does_not_decide_over(model: str, memory: str, expected: str) -> None:
    path = tiny_checkpoint(seed=0)
    with pytest.raises(FleetError) as error:
        parse_fleet(f"{memory}\nmodels: [{{name: a, path: {path}, {model}}}]", "f.yaml", Path())
    assert expected in str(error.value)


def test_without_memory_nothing_is_different() -> None:
    fleet = parse_fleet(f"models: [{{name: a, path: {tiny_checkpoint(seed=0)}}}]", "f.yaml", Path())
    planner, spec = planned(fleet, replace(MACHINE, memory_bytes=4 * GIB))
    assert spec is None
    assert planner.machine.memory_bytes == 4 * GIB
    assert planner.fleet.models[0].replicas.min == 1


class TestWhileItServes:
    """A fleet of three models with room for one or two, which changes."""

    def spec(self, memory: str = "{limit: 2GiB}") -> ResidencySpec:
        _, spec = planned(declared(memory, *[""] * 3))
        assert spec is not None
        return spec

    def test_a_model_comes_and_goes(self) -> None:
        spec = self.spec()
        new = declared("{limit: 2GiB}", *[""] * 4).models[3]
        costs = next(iter(spec.models.values()))
        more = with_model(spec, new, costs)
        assert more.models == {**spec.models, "m3": costs}
        assert more.rules.fixed > spec.rules.fixed
        assert without_model(more, "m3") == spec
        assert without_model(spec, "m3") == spec

    def test_one_without_room_does_not_come(self) -> None:
        spec = self.spec()
        new, always = declared("{limit: 2GiB}", *[""] * 3, "", ", keep: always").models[3:]
        costs = next(iter(spec.models.values()))
        with pytest.raises(
            NoMemoryError, match=r"waking m3 takes about 4 GiB, and .* are left for it; raise memory\.limit"
        ):
            with_model(spec, new, replace(costs, bytes=4 * GIB, load_bytes=0))
        with pytest.raises(NoMemoryError, match="keep: always"):
            with_model(spec, always, costs)

    def test_rules_follow_the_file(self) -> None:
        spec = self.spec()
        wanted = declared("{limit: 3GiB, min_residence: 1s, turns: true}", *[", slo: {ttft_ms: 700}"] * 3)
        changed, (_, anew) = as_declared(spec, wanted, 3 * GIB), planned(wanted)
        assert anew is not None
        assert changed.rules == replace(spec.rules, limit=anew.rules.limit, min_residence=1.0)
        assert {each.ttft for each in changed.models.values()} == {0.7}
        assert (spec.turns, changed.turns) == (None, TurnRules(cores=spec.rules.wakes.cores))
        with pytest.raises(NoMemoryError, match=r"raise memory\.limit"):
            as_declared(spec, wanted, spec.rules.fixed)
        # On GPUs the limit sized the pools, and it stays.
        gpus = msgspec.structs.replace(spec, on_gpus=True, resting=2)
        assert as_declared(gpus, wanted, GIB).rules.limit == spec.rules.limit
        assert as_declared(gpus, declared("auto", *[""] * 3), GIB).turns == TurnRules()
