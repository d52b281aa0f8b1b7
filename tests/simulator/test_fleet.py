"""Fleets: placements, modes, replicas, references, the timeline file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muxserve.simulator import (
    MODES,
    AloneSimulation,
    Mode,
    Options,
    SimulationError,
    mode_of,
    simulate,
    units_of,
    write_timeline,
)
from muxserve.workload.trace import TraceRequest
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand
from tests.costs.models import llama
from tests.simulator.support import Analytic, Linear

MIB = 1 << 20


SMALL = llama(layers=4, heads=8, kv_heads=8, head_dim=64, hidden=512, intermediate=2048, max_len=1024)
MODELS = {name: Demand(name, SMALL, "float16", 32, 512) for name in ("a", "b", "c")}


def placed(*names: str, share: float = 0.5) -> tuple[PlacedModel, ...]:
    return tuple(PlacedModel(name, 1.0, share, share) for name in names)


def placement(*units: tuple[str, ...], devices: int = 1, kv: int = 64 * MIB) -> Placement:
    made = [
        PlacedUnit(f"unit{i}", "A100-80GB", tuple(range(i * devices, (i + 1) * devices)), placed(*names), kv)
        for i, names in enumerate(units)
    ]
    return Placement(Cluster((Node("A100-80GB", devices * len(units)),)), tuple(made))


def load(count: int, names: str = "abc", gap: float = 0.02) -> list[TraceRequest]:
    return [TraceRequest(gap * i, names[i % len(names)], 60 + i % 7, 30 + i % 11) for i in range(count)]


@pytest.mark.parametrize("name", MODES)
def test_every_mode_answers_everything(name: str) -> None:
    mode = mode_of(name)
    units = units_of(placement(("a",), ("b", "c")), MODELS, mode)
    result = simulate(units, load(90), Analytic())
    assert all(record.ok for record in result.records)
    assert [r.arrival for r in result.records] == [r.arrival for r in load(90)]
    assert result.busy_gpu_seconds <= result.gpu_seconds
    assert result.jobs == sum(engine.jobs for unit in result.units for engine in unit.engines)


def test_modes_differ_as_they_say() -> None:
    where = placement(("b", "c"))
    units = {name: units_of(where, MODELS, mode)[0] for name, mode in MODES.items()}
    assert (units["muxserve"].policy, units["adbs"].policy) == ("slack", "adbs")
    assert units["temporal"].policy == units["fcfs"].policy == "fcfs"
    assert all(model.profile.engines.both for model in units["spatial"].models)
    assert not units["spatial"].adapt_quotas
    (unmanaged,) = units_of(where, MODELS, Mode("unmanaged", "every job on all of the compute", managed=False))
    assert [model.cost_share for model in unmanaged.models] == [1.0, 1.0]
    assert sum(m.profile.engines.prefill_share + m.profile.engines.decode_share for m in unmanaged.models) <= 2.0 + 1e-9


def test_engines_change_their_share_where_the_fleet_can_or_the_mode_says_so() -> None:
    where = placement(("b", "c"))

    def elastic(steps: int | None, mode: str) -> set[bool]:
        return {model.profile.engines.elastic for model in units_of(where, MODELS, mode_of(mode), steps)[0].models}

    assert elastic(None, "muxserve") == elastic(10, "muxserve") == elastic(0, "slack") == {True}
    assert elastic(0, "muxserve") == {False}


def test_a_unit_of_several_devices_has_a_part_of_the_heads_on_each() -> None:
    one = units_of(placement(("a",)), MODELS, mode_of("muxserve"))[0]
    two = units_of(placement(("a",), devices=2), MODELS, mode_of("muxserve"))[0]
    many = units_of(placement(("a",), devices=16), MODELS, mode_of("muxserve"))[0]
    assert [u.models[0].profile.kv.kv_heads for u in (one, two, many)] == [8, 4, 1]
    assert one.pools[0].pages == two.pools[0].pages


def test_requests_go_to_the_freest_replica() -> None:
    where = placement(("a",), ("a", "b"))
    units = units_of(where, MODELS, mode_of("muxserve"))
    result = simulate(units, sorted(load(300, "a") + load(300, "b"), key=lambda r: r.arrival), Analytic())
    counts = [sum(record.model == "a" for record in unit.records) for unit in result.units]
    assert sum(counts) == 300
    # The second unit has another model to serve beside it.
    assert counts[0] > 1.2 * counts[1] > 0
    assert simulate(units, load(300, "a"), Analytic()).records == simulate(units, load(300, "a"), Analytic()).records


def test_a_model_that_nobody_serves_fails() -> None:
    result = simulate(units_of(placement(("a",)), MODELS, mode_of("muxserve")), load(4, "ab"), Analytic())
    assert [r.error for r in result.records] == ["", "no unit serves b", "", "no unit serves b"]


def test_mistakes_are_named() -> None:
    with pytest.raises(SimulationError, match="there is no mode 'magic'; there are muxserve"):
        mode_of("magic")
    with pytest.raises(SimulationError, match="unit unit0 serves z"):
        units_of(placement(("z",)), MODELS, mode_of("muxserve"))
    with pytest.raises(SimulationError, match="too few for a"):
        units_of(placement(("a",), kv=1000), MODELS, mode_of("muxserve"))


def test_a_lone_request_takes_its_reference() -> None:
    costs = Linear(0.01, 0.0001, 0.005, 0.0, 0.00001, bend=80.0)
    where = Placement(
        Cluster((Node("A100-80GB", 1),)), (PlacedUnit("unit0", "test", (0,), placed("a", share=1.0), 64 * MIB),)
    )
    units = units_of(where, MODELS, mode_of("muxserve"))
    alone = AloneSimulation(units, Analytic(costs))
    for prompt, output in ((60, 40), (700, 1), (5, 2)):
        (record,) = simulate(units, [TraceRequest(0.0, "a", prompt, output)], Analytic(costs)).records
        reference = alone(record)
        assert record.latency == pytest.approx(reference.latency)
        assert record.ttft == pytest.approx(reference.ttft)
        if output > 1:
            assert record.tpot == pytest.approx(reference.tpot)


def test_the_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    units = units_of(placement(("a", "b"), devices=2), MODELS, mode_of("muxserve"))
    result = simulate(units, load(20, "ab"), Analytic(), Options(timeline=True))
    file = tmp_path / "trace.json"
    count = write_timeline(file, result.timelines)
    events = json.loads(file.read_text())["traceEvents"]
    assert len(events) == count
    jobs = [event for event in events if event["ph"] == "X"]
    assert len(jobs) == 2 * result.jobs
    assert {event["pid"] for event in jobs} == {0, 1}
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"a prefill", "a decode", "b prefill", "b decode"}
    assert all(event["dur"] > 0 for event in jobs)


def test_progress_reaches_the_end() -> None:
    told: list[tuple[int, int]] = []
    units = units_of(placement(("a",), ("b", "c")), MODELS, mode_of("muxserve"))
    simulate(units, load(300), Analytic(), progress=lambda done, all_: told.append((done, all_)))
    assert told[0] == (0, 300)
    assert told[-1] == (300, 300)
    assert told == sorted(told)
