"""Plans for the CPU of this machine have the units that `muxserve deploy` begins with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.config import FleetError, load_fleet
from muxserve.planning.specs.fleet_planner import FleetPlanner
from muxserve.planning.specs.plan_file import load_plan
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.planning.specs.unit_specs import rolling_of
from muxserve.simulator import simulate
from muxserve.workload.trace import TraceRequest
from placement import Machine
from tests.scheduling.machine import profile
from tests.simulator.support import Analytic, Linear
from tests.simulator.support import unit as sim_unit

MODELS = Path(__file__).resolve().parents[2] / "configs/models"
LOAD = "workload: { prompt_tokens: 40, output_tokens: 20 }, dtype: float32"


def fleet_file(tmp_path: Path, *models: str, more: str = "kv_pool: { size: 64MiB }") -> Path:
    file = tmp_path / "fleet.yaml"
    parts = (model.split(" ", 2) for model in models)
    lines = [f"  - {{ name: {name}, path: {MODELS}/{path}, {LOAD}, {rest} }}" for name, path, rest in parts]
    file.write_text(f"{more}\nmodels:\n" + "\n".join(lines) + "\n")
    return file


def planned(file: Path, plan: Path, *more: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["plan", str(file), "-o", str(plan), "--json", "--simulate", "5", *more])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def served(file: Path, plan: Path | None) -> list[ResolvedUnit]:
    def none() -> object:
        raise AssertionError("no GPUs are asked for")

    return FleetPlanner(load_fleet(file), Machine(2, 16 << 30), none).at_start(plan)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("replicas", "units"), [("{ min: 2, max: 3 }", 2), ("3", 3), ("1", 1), ("{ min: 0, max: 2 }", 1)]
)
def test_as_many_units_as_the_fleet_wants(tmp_path: Path, replicas: str, units: int) -> None:
    file = fleet_file(tmp_path, f"a arithmetic replicas: {replicas}, rate: 6", "b atlas rate: 1")
    plan = tmp_path / "plan.yaml"
    data = planned(file, plan)
    placed = load_plan(plan, load_fleet(file)).units
    assert [[each.model for each in unit.models] for unit in placed] == [["a", "b"]] + [["a"]] * (units - 1)
    assert sum(each.rate for unit in placed for each in unit.models if each.model == "a") == pytest.approx(6.0)
    assert data["totals"]["rate"] == 7.0  # type: ignore[index]
    assert data["simulated"]["requests"] > 10  # type: ignore[index]
    # What is served with the plan is what would be served without.
    for with_plan, without in zip(served(file, plan), served(file, None), strict=True):
        assert [model.threads for model in with_plan.unit.models] == [model.threads for model in without.unit.models]
        assert with_plan.unit.pool_bytes == without.unit.pool_bytes
        assert with_plan.name == without.name


@pytest.mark.slow
def test_units_of_all_shapes_together(tmp_path: Path) -> None:
    slo = "slo: { ttft_ms: 1000, tpot_ms: 100 }"
    file = fleet_file(
        tmp_path,
        f"ring arithmetic engines: one, dispatch: rolling, replicas: 2, {slo}",
        "shared atlas engines: split, replicas: 2",
        "pipe arithmetic engines: one, stages: 2",
        more="kv_pool: { size: 32MiB }",
    )
    plan = tmp_path / "plan.yaml"
    data = planned(file, plan)
    placed = load_plan(plan, load_fleet(file)).units
    assert [(unit.models[0].shape, unit.models[0].model, unit.devices) for unit in placed] == [
        ("split", "shared", (0,)),
        ("split", "shared", (1,)),
        ("one", "ring", (2,)),
        ("one", "ring", (3,)),
        ("one", "pipe", (4,)),
    ]
    assert {unit.kv_bytes for unit in placed} == {32 << 20}
    assert len(served(file, plan)) == 5
    # The simulation is of all of them.
    models = [model for unit in data["units"] for model in unit["models"]]  # type: ignore[attr-defined]
    assert all(model["simulated"]["requests"] > 0 for model in models)


def test_what_does_not_fit_together_is_said(tmp_path: Path) -> None:
    file = fleet_file(tmp_path, "a arithmetic replicas: 60", more="kv_pool: { size: 1GiB }")
    result = CliRunner().invoke(app, ["plan", str(file), "--simulate", "0"])
    assert result.exit_code == 2
    assert "60 units" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("rest", "told", "words"),
    [
        ("engines: one, stages: 2", "1,3", "vLLM would split every model by, but its 4 layers are over 2"),
        ("engines: one, stages: 2", "2, 2", ""),
        ("engines: one, stages: 2", "", "over 2 stages as 2,2; unset it"),
        ("rate: 1", "2,2", "but it has one stage of 4; unset it"),
        ("rate: 1", "4", ""),
    ],
)
def test_layers_are_split_as_pools_are_sized_for(
    rest: str, told: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = fleet_file(tmp_path, f"a arithmetic {rest}")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", told)
    if not words:
        assert len(served(file, None)) == 1
        return
    with pytest.raises(FleetError) as error:
        served(file, None)
    assert words in str(error.value)
    assert "models[0].stages: the environment variable VLLM_PP_LAYER_PARTITION" in str(error.value)


def test_prefills_are_predicted_with_the_cores_that_a_replica_gets(tmp_path: Path) -> None:
    """On two cores two replicas have one each, four half of one."""
    found = []
    for replicas in (2, 4):
        file = fleet_file(
            tmp_path,
            f"a arithmetic dispatch: rolling, replicas: {replicas}, slo: {{ ttft_ms: 1000, tpot_ms: 100 }}",
        )
        rules = rolling_of(served(file, None)[0])
        assert rules is not None
        found.append(rules.prefill_seconds(1000))
    # With half of the cores everything but what a step takes anyway is twice as long.
    assert found[0] < found[1] <= 2.0 * found[0]


def test_units_of_a_cpu_contend_for_its_cores() -> None:
    """Two units that each keep all cores busy take twice as long side by side; one that is alone has all of them."""
    costs = Linear(0.001, 0.0, 0.01, 0.0, 0.0, bandwidth=0.99)
    units = [
        replace(sim_unit([profile(name)], 1000), name=f"u{name}", device="CPU", devices=(number,))
        for number, name in enumerate("ab")
    ]

    def tpot(models: str) -> float:
        load = [TraceRequest(0.0, name, 10, 100) for name in models]
        record = simulate(units, load, Analytic(costs)).records[0]
        assert record.tpot is not None
        return record.tpot

    assert tpot("ab") / tpot("a") == pytest.approx(2.0, rel=0.02)
