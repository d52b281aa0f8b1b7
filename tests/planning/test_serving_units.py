"""Several units: of replicas in the fleet file, of a plan with several, and one more later."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.config import AUTO, Fleet, FleetError, Replicas, parse_fleet
from muxserve.control.changes import NoRoomError
from muxserve.costs.roofline import Roofline
from muxserve.gpu.nvml import Gpu, GpuMachine
from muxserve.gpu.unit import GpuUnit
from muxserve.planning.demand.demands import demands_of
from muxserve.planning.specs.fleet_planner import FleetPlanner, ScaleOut, notes_of
from muxserve.planning.specs.gpus import pretended_gpus
from muxserve.planning.specs.plan_file import save_plan
from muxserve.planning.specs.unit_models import possible_units, units_at_start
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.planning.specs.unit_specs import fleet_spec_of, planned_unit
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.scaling import ScalingRules
from muxserve.scheduling.quotas import demand_weight
from muxserve.spec import FleetSpec, GpuSpec, SimulatedSpec, UnitSpec
from muxserve.spec.unit import SHARE_STEPS
from muxserve.unit.state import model_profile
from placement import Machine
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.memory import MemoryRules
from placement.planner import PlanOptions, plan_cluster
from tests.support.checkpoint_files import write_files

ROOT = Path(__file__).resolve().parent.parent.parent
MACHINE = Machine(4, 16 << 30, 4 << 30)
NONE = GpuMachine(why_none="the NVIDIA driver is not installed")
H200 = GpuMachine(tuple(Gpu(i, f"GPU-{i}", "NVIDIA H200", 143771 << 20, (500 + i) << 20) for i in range(4)))


def fleet(arithmetic: str = "1", atlas: str = "1", frontdesk: str = "1", head: str = "kv_pool: {size: 64MiB}") -> Fleet:
    text = f"{head}\nmodels:\n" + "".join(
        f"  - {{name: {name}, path: models/{name}, rate: 4, replicas: {replicas}}}\n"
        for name, replicas in (("arithmetic", arithmetic), ("atlas", atlas), ("frontdesk", frontdesk))
    )
    return parse_fleet(text, "fleet.yaml", ROOT / "configs", {})


def plan(
    declared: Fleet, file: Path | None = None, machine: Machine = MACHINE, gpus: GpuMachine = NONE
) -> list[ResolvedUnit]:
    return FleetPlanner(declared, machine, lambda: gpus).at_start(file)


def deployed(declared: Fleet, plans: list[ResolvedUnit]) -> FleetSpec:
    return fleet_spec_of(declared, [planned_unit(each, "/run") for each in plans], "/run")


def names(plans: list[ResolvedUnit]) -> dict[str, list[str]]:
    return {each.name: [model.name for model in each.fleet.models] for each in plans}


def refused(declared: Fleet, *arguments: object) -> str:
    with pytest.raises(FleetError) as caught:
        plan(declared, *arguments)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_unit_for_each_replica_that_is_there_at_the_start() -> None:
    declared = fleet("3", "{min: 1, max: 4, start: 2}", "{min: 0, max: 2, start: 0}")
    assert (units_at_start(declared), possible_units(declared)) == (3, 6)
    plans = plan(declared)
    assert names(plans) == {
        "u0": ["arithmetic", "atlas", "frontdesk"],
        "u1": ["arithmetic", "atlas"],
        "u2": ["arithmetic"],
    }
    assert [each.served for each in plans] == [("arithmetic", "atlas"), ("arithmetic", "atlas"), ("arithmetic",)]
    assert {model.rate for model in plans[0].fleet.models} == {4 / 3, 2.0, 4.0}
    assert [each.unit.pool_bytes for each in plans] == [64 << 20] * 3
    assert notes_of(plans)[-1] == "3 units share the 4 cores; each has a pool of its own"


def test_lengths_of_requests_reach_the_quotas_of_a_unit() -> None:
    workload = "workload: {prompt_tokens: %d, output_tokens: 100}"
    models = "".join(
        f"  - {{name: {name}, path: models/atlas, rate: 4, {workload % tokens}}}\n"
        for name, tokens in (("short", 100), ("long", 300))
    )
    declared = parse_fleet(f"kv_pool: {{size: 64MiB}}\nmodels:\n{models}", "fleet.yaml", ROOT / "configs", {})
    (unit,) = deployed(declared, plan(declared)).units
    short, long = unit.unit_spec.models
    assert (short.request_tokens, long.request_tokens) == (200, 400)
    assert long.quota_pages == pytest.approx(2 * short.quota_pages, abs=3)
    weights = [demand_weight(model_profile(model)) for model in (short, long)]
    assert weights[1] == pytest.approx(2 * weights[0])


def test_replicas_can_exchange_what_they_hold() -> None:
    """Alone, arithmetic (head size 64) would have blocks of 32 tokens; beside frontdesk (128) it has 64."""
    alone = plan(fleet().with_models([fleet().model("arithmetic")]))
    assert alone[0].unit.models[0].table.block_tokens == 32
    units = deployed(fleet("3"), plan(fleet("3"))).units
    assert [unit.unit_spec.model("arithmetic").block_tokens for unit in units] == [64, 64, 64]
    assert len({unit.unit_spec.layout("arithmetic") for unit in units}) == 1


BOUNDS = st.one_of(
    st.integers(1, 4).map(str),
    st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 3)).map(
        lambda drawn: f"{{min: {min(drawn)}, max: {max(drawn)}, start: {sorted(drawn)[1]}}}"
    ),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(BOUNDS, BOUNDS, BOUNDS)
def test_every_replica_has_its_unit_and_all_of_them_one_layout(one: str, two: str, three: str) -> None:
    declared = fleet(one, two, three)
    planner = FleetPlanner(declared, MACHINE, lambda: NONE)
    plans = planner.at_start()
    told = deployed(declared, plans)
    assert [each.name for each in plans] == [f"u{number}" for number in range(len(plans))]
    assert 1 <= len(plans) <= possible_units(declared)
    assert [model.name for model in told.models] == [model.name for model in declared.models]
    for model in declared.models:
        assert len(told.replicas(model.name)) == model.replicas.at_start
        units = [u.unit_spec for u in told.units if model.name in [m.name for m in u.unit_spec.models]]
        more = planned_unit(planner.unit("late", [model.name], told), "/run").unit_spec
        assert len({unit.layout(model.name) for unit in (*units, more)}) == 1
        offered = next(each for each in told.models if each.name == model.name)
        assert offered.max_len == min(unit.model(model.name).max_len for unit in (*units, more))
        assert (model.name in told.scaling) == model.replicas.scales


def test_the_fleet_that_the_processes_are_told() -> None:
    head = """\
kv_pool: {size: 64MiB}
gateway: {port: 9000, count: 2, api_keys: [{key: a, priority: gold}, b]}
priorities: {gold: {rank: 5, target_load: 500}, normal: {rank: 0}}
migration: {bandwidth: 1MiB}"""
    declared = fleet("2", "{max: 3, idle: 2m, wake: 3m}", head=head)
    plans = plan(declared)
    told = fleet_spec_of(declared, [planned_unit(each, "/run") for each in plans], "/run", port=9001)
    assert (told.gateway.port, told.gateway.count, told.gateway.api_keys) == (9001, 2, ["a", "b"])
    assert told.key_levels == {"a": "gold"}
    assert told.scaling == {"atlas": ScalingRules(1, 3, idle_seconds=120.0, wake_limit=180.0)}
    assert told.migration == MigrationRules()
    assert [(level.name, level.rank, level.target_load) for level in told.levels] == [
        ("gold", 5, 500),
        ("normal", 0, None),
    ]
    # Automatic target loads are each model's own.
    loads = {model.name: model.target_load for model in told.models}
    assert len(set(loads.values())) == len(loads) == 3
    assert all(told.priority_levels(name).auto == load for name, load in loads.items())
    assert all(unit.unit_spec.priority_levels("atlas").auto == loads["atlas"] for unit in told.units[:1])
    assert [(unit.name, unit.serves, unit.unit_spec.run_dir) for unit in told.units] == [
        ("u0", ["arithmetic", "atlas", "frontdesk"], "/run/u0"),
        ("u1", ["arithmetic"], "/run/u1"),
    ]
    for unit in told.units:
        assert (unit.unit_spec.migration, unit.unit_spec.migration_bandwidth) == (told.migration, float(1 << 20))
        assert unit.unit_spec.levels == told.levels
    # u1 has room for longer sequences; what is offered fits everywhere.
    lengths = [unit.unit_spec.model("arithmetic").max_len for unit in told.units]
    assert next(model for model in told.models if model.name == "arithmetic").max_len == min(lengths)
    assert [model.name for model in told.models] == ["arithmetic", "atlas", "frontdesk"]
    assert msgspec.json.decode(msgspec.json.encode(told), type=FleetSpec) == told


def test_migration_can_be_switched_off() -> None:
    declared = fleet("2", head="kv_pool: {size: 64MiB}\nmigration: off")
    assert deployed(declared, plan(declared)).migration is None


def test_an_automatic_pool_leaves_room_for_the_units_that_may_come() -> None:
    small = Machine(4, 2 << 30, 1 << 30)
    one = plan(fleet(head="policy: adbs"), None, small)
    four = plan(fleet("{min: 1, max: 4}", head="policy: adbs"), None, small)
    assert len(one) == len(four) == 1
    assert four[0].unit.pool_bytes == pytest.approx(one[0].unit.pool_bytes / 4, rel=0.05)


def test_units_that_do_not_fit_together() -> None:
    said = refused(fleet("2", head="kv_pool: {size: 3GiB}"))
    assert said.startswith(
        "fleet.yaml:1: kv_pool.size: the pools of 2 units take 6 GiB together, but only 4 GiB of shared"
    )
    said = refused(fleet("4", "4", "4", head="kv_pool: {size: 200MiB}"), None, Machine(4, 801 << 20, None))
    assert "4 units need" in said
    assert "(every unit loads its own)" in said


# ------------------------------------------------------------ later


def test_a_unit_more_is_like_those_that_run() -> None:
    declared = fleet("{max: 3}", "2")
    planner = FleetPlanner(declared, MACHINE, lambda: NONE)
    told = deployed(declared, planner.at_start())
    more = planner.unit("u2", ["arithmetic"], told)
    assert (more.name, more.served, more.unit.pool_bytes) == ("u2", ("arithmetic",), 64 << 20)
    late = planned_unit(more, "/run").unit_spec
    assert late.run_dir == "/run/u2"
    assert late.layout("arithmetic") == told.units[0].unit_spec.layout("arithmetic")
    assert late.model("arithmetic").max_len == told.models[0].max_len


def test_a_unit_more_needs_room() -> None:
    declared = fleet("{max: 9}", head="kv_pool: {size: 1500MiB}")
    planner = FleetPlanner(declared, MACHINE, lambda: NONE)
    plans = planner.at_start()
    second = planner.unit("u1", ["arithmetic"], deployed(declared, plans))
    with pytest.raises(NoRoomError, match=r"no room for a unit with arithmetic more: .*shared memory"):
        planner.unit("u2", ["arithmetic"], deployed(declared, [*plans, second]))


def test_a_model_that_is_added_has_a_unit_of_its_own_kind() -> None:
    declared = fleet("2")
    declared = declared.with_models([declared.model("arithmetic"), declared.model("frontdesk")])
    planner = FleetPlanner(declared, MACHINE, lambda: NONE)
    told = deployed(declared, planner.at_start())
    planner.declare(fleet().with_models([fleet().model("atlas")]))
    assert [model.name for model in planner.fleet.models] == ["arithmetic", "frontdesk", "atlas"]
    first = planner.unit("u2", ["atlas"], told)
    assert first.unit.models[0].table.block_tokens == 32
    entry = deployed(planner.fleet, [first]).units[0]
    both = msgspec.structs.replace(told, units=[*told.units, entry])
    second = planned_unit(planner.unit("u3", ["atlas"], both), "/run").unit_spec
    assert second.layout("atlas") == entry.unit_spec.layout("atlas")
    planner.forget("atlas")
    assert "atlas" not in [model.name for model in planner.fleet.models]


# ------------------------------------------------------------ by a plan


def saved(path: Path, units: list[tuple[str, tuple[int, ...], list[str]]], nodes: tuple[Node, ...]) -> Path:
    placed = [
        PlacedUnit(f"unit{i}", device, devices, tuple(PlacedModel(n, 2.0, 0.25, 0.5) for n in models), (64 + i) << 20)
        for i, (device, devices, models) in enumerate(units)
    ]
    save_plan(Placement(Cluster(nodes), tuple(placed)), path)
    return path


def test_units_as_a_plan_has_them(tmp_path: Path) -> None:
    units = [("CPU", (0,), ["frontdesk", "arithmetic"]), ("CPU", (1,), ["arithmetic", "atlas"])]
    plans = plan(fleet(), saved(tmp_path / "p.yaml", units, (Node("CPU", 2),)))
    assert names(plans) == {"u0": ["frontdesk", "arithmetic"], "u1": ["arithmetic", "atlas"]}
    assert [each.unit.pool_bytes >> 20 for each in plans] == [64, 65]
    assert {model.rate for each in plans for model in each.fleet.models} == {2.0}
    assert {model.threads for each in plans for model in each.unit.models} == {2}
    assert len({unit.unit_spec.layout("arithmetic") for unit in deployed(fleet(), plans).units}) == 1


def test_a_plan_and_a_file_that_contradict_each_other(tmp_path: Path) -> None:
    units = [("CPU", (0,), ["frontdesk", "arithmetic", "atlas"]), ("CPU", (1,), ["arithmetic"])]
    file = saved(tmp_path / "p.yaml", units, (Node("CPU", 2),))
    assert len(plan(fleet("2"), file)) == 2
    assert len(plan(fleet("{min: 1, max: 2}"), file)) == 2
    assert (
        "the plan has 2 replicas of arithmetic, the fleet file 3; change `replicas`, or deploy without the plan"
        in refused(fleet("3"), file)
    )
    assert "the plan has 1 replica of atlas, the fleet file 2 to 4" in refused(fleet("2", "{min: 2, max: 4}"), file)


# ------------------------------------------------------------ on GPUs


def halves(arithmetic: str, cluster: str) -> Fleet:
    declared = fleet(arithmetic, head=f"cluster: {cluster}")
    return declared.with_models([m.model_copy(update={"dtype": "bfloat16"}) for m in declared.models])


def gpus_of(plans: list[ResolvedUnit]) -> list[list[int]]:
    return [[gpu.index for gpu in each.gpu.gpus] for each in plans if each.gpu is not None]


def test_units_have_gpus_of_their_own() -> None:
    assert gpus_of(plan(halves("2", "{gpus: 2}"), None, MACHINE, H200)) == [[0], [1]]
    assert gpus_of(plan(halves("2", "{gpus: 4}"), None, MACHINE, H200)) == [[0, 1], [2, 3]]
    assert gpus_of(plan(halves("2", "{gpu_ids: [3, 1]}"), None, MACHINE, H200)) == [[3], [1]]


def test_gpus_wait_for_units_that_may_come() -> None:
    declared = halves("{max: 3}", "{gpu_ids: [3, 0, 2]}")
    planner = FleetPlanner(declared, MACHINE, lambda: H200)
    plans = planner.at_start()
    assert gpus_of(plans) == [[3]]
    told = deployed(declared, plans)
    more = planner.unit("u1", ["arithmetic"], told)
    assert gpus_of([more]) == [[0]]
    last = planner.unit("u2", ["arithmetic"], deployed(declared, [*plans, more]))
    assert gpus_of([last]) == [[2]]
    with pytest.raises(NoRoomError, match=r"needs 1 GPUs of its own, and of the fleet's 3 0 are free"):
        planner.unit("u3", ["arithmetic"], deployed(declared, [*plans, more, last]))


def test_a_planned_fleet_without_a_unit_left_still_serves_on_gpus(tmp_path: Path) -> None:
    declared = halves("{min: 0, max: 1}", "auto")
    declared = declared.with_models([declared.model("arithmetic")])
    file = saved(tmp_path / "p.yaml", [("H200-141GB", (0,), ["arithmetic"])], (Node("H200-141GB", 1),))
    planner = FleetPlanner(declared, MACHINE, lambda: H200)
    told = deployed(declared, planner.at_start(file))
    woken = planner.unit("u1", ["arithmetic"], msgspec.structs.replace(told, units=[]))
    assert gpus_of([woken]) == [[0]]


def test_gpus_that_do_not_suffice() -> None:
    said = refused(halves("3", "{gpus: 2}"), None, MACHINE, H200)
    assert "fleet.yaml:1: cluster.gpus: 2 are too few for 3 units, one for each replica (arithmetic: 3)" in said
    said = refused(halves("{max: 2}", "{gpus: 3}"), None, MACHINE, H200)
    assert "3 cannot be divided evenly among 2 units (arithmetic: up to 2); give a multiple of 2" in said


def test_the_devices_of_a_plan_are_gpus_of_this_machine(tmp_path: Path) -> None:
    kind, both, alone = "H200-141GB", ["frontdesk", "atlas"], ["arithmetic"]
    units = [(kind, (0, 2), both), (kind, (1,), alone)]
    file = saved(tmp_path / "p.yaml", units, (Node("H200-141GB", 3),))
    assert gpus_of(plan(halves("1", "auto"), file, MACHINE, H200)) == [[0, 2], [1]]
    assert gpus_of(plan(halves("1", "{gpu_ids: [3, 2, 1]}"), file, MACHINE, H200)) == [[3, 1], [2]]
    assert "the plan's units have 3 GPUs, the fleet file 2" in refused(halves("1", "{gpus: 2}"), file, MACHINE, H200)
    two = saved(
        tmp_path / "q.yaml", [(kind, (0, 1), both), (kind, (2,), alone)], (Node("H200-141GB", 2), Node("H200-141GB", 1))
    )
    assert "the plan is for 2 machines with GPUs" in refused(halves("1", "auto"), two, MACHINE, H200)
    assert [each.gpu.ranks for each in plan(halves("1", "{launcher: ray}"), two, MACHINE, H200) if each.gpu] == [2, 1]
    over = saved(tmp_path / "r.yaml", units, (Node("H200-141GB", 1),) * 3)
    said = refused(halves("1", "{launcher: ray}"), over, MACHINE, H200)
    assert "units[0].devices: are on 2 machines; a unit is served by one" in said


def test_what_is_planned_for_gpus_has_the_replicas_that_are_served(tmp_path: Path) -> None:
    declared = halves("3", "{gpus: 4}").with_models(
        [
            model.model_copy(update={"replicas": Replicas(min=1, max=2)}) if model.name == "atlas" else model
            for model in halves("3", "{gpus: 4}").models
        ]
    )
    demands = demands_of(declared, ROOT / "configs")
    assert [(demand.name, demand.least, demand.most) for demand in demands] == [
        ("arithmetic", 3, 3),
        ("atlas", 1, 2),
        ("frontdesk", 1, None),
    ]
    made = plan_cluster(
        demands,
        Cluster((Node("H200-141GB", 4),)),
        Roofline(),
        {"H200-141GB": 143771 << 20},
        PlanOptions(rules=MemoryRules.served(), improved=False),
    )
    save_plan(made.placement, tmp_path / "p.yaml")
    told = deployed(declared, plan(declared, tmp_path / "p.yaml", MACHINE, H200))
    assert len(told.replicas("arithmetic")) == 3
    assert len(told.replicas("atlas")) in (1, 2)


def test_ray_serves_on_cpu() -> None:
    spread = fleet("2", head="cluster: {launcher: ray}\nkv_pool: {size: 3GiB}")
    assert len(plan(spread)) == 2  # other machines have memory of their own


def test_ray_chooses_the_gpus() -> None:
    said = refused(halves("1", "{gpu_ids: [0], launcher: ray}"), None, MACHINE, H200)
    assert "fleet.yaml:1: cluster.gpu_ids: with `launcher: ray` it is Ray that chooses GPUs" in said
    declared = fleet("1", head="cluster: {gpus: 2, launcher: ray}")
    (made,) = plan(declared, None, MACHINE, H200)
    assert made.gpu is not None
    assert (made.gpu.elsewhere, made.gpu.deployed) == (True, GpuSpec([]))
    assert "2 GPUs (NVIDIA H200, 140.4 GiB) of whichever machine has them free" in made.notes[0]
    assert "if MPS works there" in made.notes[0]
    off = fleet("1", head="cluster: {gpus: 1, launcher: ray, mps: off}")
    assert "engines alternate on the GPU (no MPS)" in plan(off, None, MACHINE, H200)[0].notes[0]


def test_green_contexts_are_for_one_rank_and_with_slack_for_each_lease() -> None:
    def planned(gpus: int, policy: str = "adbs") -> GpuUnit:
        head = f"policy: {policy}\ncluster: {{gpus: {gpus}, launcher: ray, sm_sharing: green_contexts}}"
        (made,) = plan(fleet("1", head=head), None, MACHINE, H200)
        assert made.gpu is not None
        return made.gpu

    # NCCL calls cudaSetDevice before each collective operation, which would be computed outside the context.
    several = planned(2, "slack")
    assert (several.sharing, several.rules.graph_sets) == ("mps", 1)
    assert any("percentages of MPS: NCCL" in line for line in several.describe())
    fixed, leased = planned(1), planned(1, "slack")
    assert (fixed.sharing, fixed.rules.graph_sets) == ("green_contexts", 1)
    assert (leased.sharing, leased.rules.graph_sets) == ("green_contexts", SHARE_STEPS)
    assert "which each lease chooses anew" in leased.describe()[0]
    assert "which each lease chooses anew" not in fixed.describe()[0]
    # Graphs are captured for each size of share.
    need = leased.needs[0]
    more = (SHARE_STEPS - 1) * leased.rules.engines * need.graph_bytes
    assert need.engines(leased.rules) - need.engines(fixed.rules) == more


def test_later_units_on_ray_are_counted() -> None:
    declared = fleet("{min: 1, max: 2}", head="cluster: {gpus: 2, launcher: ray}")
    planner = FleetPlanner(declared, MACHINE, lambda: H200)
    plans = planner.at_start()
    running = deployed(declared, plans)
    # Ray gave it one that nobody had thought of.
    unit = msgspec.structs.replace(running.units[0].unit_spec, gpu=GpuSpec(["GPU-of-a-node"], "off"))
    running = msgspec.structs.replace(running, units=[msgspec.structs.replace(running.units[0], unit_spec=unit)])
    name = declared.models[0].name
    more = planner.unit("u1", [name], running)
    assert more.gpu is not None
    assert (more.gpu.ranks, more.gpu.sharing) == (1, "mps")
    two = msgspec.structs.replace(running, units=[*running.units, *running.units])
    with pytest.raises(NoRoomError, match="of the fleet's 2 0 are free"):
        planner.unit("u2", [name], two)


# ---------------------------------------------------------------- a model joins a unit that runs


def joining(declared: Fleet, model: str, **changes: object) -> tuple[UnitSpec, UnitSpec]:
    """Unit u0 of a fleet that has not got `model` yet, as it is and with it."""
    planner = FleetPlanner(
        declared.with_models([each for each in declared.models if each.name != model]), MACHINE, lambda: NONE
    )
    plans = planner.at_start()
    running = deployed(planner.fleet, plans)
    planner.declare(declared.with_models([declared.model(model).model_copy(update=changes)]))
    joined = planner.joined(planned_unit(plans[0], "/run"), model, running)
    assert joined.planned.unit_spec == joined.unit_spec
    return running.unit("u0").unit_spec, joined.unit_spec


def test_a_model_that_joins_gets_its_part_of_the_pool() -> None:
    before, after = joining(fleet(), "atlas")
    assert after.pools == before.pools
    assert [model.name for model in after.models] == ["arithmetic", "frontdesk", "atlas"]
    (pool,) = after.pools
    assert sum(model.quota_pages for model in after.models) == pool.num_pages - 1
    assert all(model.quota_pages >= model.floor_pages > 0 for model in after.models)
    at_once = planned_unit(plan(fleet())[0], "/run").unit_spec
    for one in at_once.models:
        assert (one.quota_pages, one.threads) == (after.model(one.name).quota_pages, after.model(one.name).threads)
    for old, new in zip(before.models, after.models, strict=False):
        assert (old.max_len, old.block_tokens, old.num_blocks) == (new.max_len, new.block_tokens, new.num_blocks)
        assert old.quota_pages > new.quota_pages


def test_a_model_whose_kv_has_other_pages_cannot_join() -> None:
    # The two others have heads of the same size, and pages that are as small as they can be for that.
    with pytest.raises(NoRoomError, match="frontdesk cannot join u0: its KV does not divide into pages of 8 KiB"):
        joining(fleet(), "frontdesk")
    # Nor do types mix in a pool.
    with pytest.raises(NoRoomError, match="atlas cannot join u0: its KV does not divide"):
        joining(fleet(), "atlas", dtype="float16")


@pytest.mark.parametrize(
    ("head", "instead"),
    [("", "Without --unit it gets a unit of its own"), ("memory: auto", "must be in the fleet file when the fleet")],
)
def test_a_model_with_a_cache_of_its_own_cannot_join(head: str, instead: str) -> None:
    with pytest.raises(NoRoomError, match=f"atlas cannot join u0: it has a KV cache of its own.*{instead}"):
        joining(fleet(head=head), "atlas", kv="private")


def test_a_model_with_states_of_another_type_cannot_join(tmp_path: Path) -> None:
    """Pages of those that run are not zeroed when they take them."""
    config = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_files(tmp_path)
    model = fleet().models[0].model_copy(update={"name": "states", "path": str(tmp_path)})
    declared = fleet().with_models([*fleet().models, model.model_copy(update={"dtype": "bfloat16"})])
    with pytest.raises(NoRoomError, match="states cannot join u0: engines there do not zero their pages"):
        joining(declared, "states")


def test_a_pool_may_have_no_room_for_one_more() -> None:
    with pytest.raises(NoRoomError, match="atlas cannot join u0: "):
        joining(fleet(head="kv_pool: {size: 4MiB}"), "atlas", max_len=100_000)


def test_what_has_left_a_unit_takes_nothing_of_it() -> None:
    planner = FleetPlanner(fleet(), MACHINE, lambda: NONE)
    plans = planner.at_start()
    running = deployed(planner.fleet, plans)
    model = planner.fleet.model("atlas").model_copy(update={"name": "new"})
    planner.forget("atlas")
    planner.declare(planner.fleet.with_models([model]))
    joined = planner.joined(planned_unit(plans[0], "/run"), "new", running)
    quotas = {each.name: each.quota_pages for each in joined.unit_spec.models}
    assert quotas["atlas"] == 0
    assert sum(quotas.values()) == joined.unit_spec.pools[0].num_pages - 1
    # Started again, the unit is without it.
    assert set(quotas) - {each.name for each in joined.planned.unit_spec.models} == {"atlas"}


def test_another_version_of_a_model_joins_beside_the_one_that_serves() -> None:
    """Under a name of its own, and for sequences as long, where the file leaves their length open."""
    planner = FleetPlanner(fleet(), MACHINE, lambda: NONE)
    plans = planner.at_start()
    running, unit, scale_out = deployed(planner.fleet, plans), planned_unit(plans[0], "/run"), ScaleOut(planner)
    model = planner.fleet.model("atlas")
    joined = scale_out.joined(fleet().with_models([model]).with_name("atlas@2"), unit, running, print)
    before, after = (joined.unit_spec.model(name) for name in ("atlas", "atlas@2"))
    assert joined.model == after
    assert model.max_len == AUTO
    assert after.max_len == before.max_len
    assert min(before.quota_pages, after.quota_pages) > 0
    # No engine is started again with other threads.
    assert {each.name: each.threads for each in running.unit("u0").unit_spec.models} == {
        each.name: each.threads for each in joined.unit_spec.models if each.name != "atlas@2"
    }
    assert after.threads == before.threads
    with scale_out.trying(without="atlas"):
        assert [each.name for each in planner.fleet.models] == ["arithmetic", "frontdesk", "atlas@2"]
    assert [each.name for each in planner.fleet.models] == ["arithmetic", "atlas", "frontdesk", "atlas@2"]


def test_a_unit_keeps_the_page_table_of_a_model_and_its_name() -> None:
    """What comes back as another model is another version, and what comes back as it was finds its table again."""
    planner = FleetPlanner(fleet(), MACHINE, lambda: NONE)
    plans = planner.at_start()
    running, unit, scale_out = deployed(planner.fleet, plans), planned_unit(plans[0], "/run"), ScaleOut(planner)
    same, other = (planner.fleet.model(name).model_copy(update={"name": "atlas"}) for name in ("atlas", "arithmetic"))
    for model, version in ((same, "atlas"), (other, "atlas@2")):
        planner.forget("atlas")
        assert scale_out.joined(fleet().with_models([model]), unit, running, print).model.name == version
        assert version in [each.name for each in planner.fleet.models]


# ---------------------------------------------------------------- GPUs that are pretended


def pretending(cluster: str, replicas: str = "2") -> tuple[FleetPlanner, list[ResolvedUnit]]:
    declared = fleet(replicas, replicas, "1", head=f"cluster: {cluster}")
    simulated = SimulatedSpec("CPU")
    planner = FleetPlanner(declared, MACHINE, lambda: pretended_gpus(declared), simulated=simulated)
    return planner, planner.at_start()


def test_units_of_pretended_gpus_have_their_costs_and_pages_and_no_memory() -> None:
    planner, plans = pretending("{gpus: 4, gpu_type: H100}")
    real = planned_unit(plans[0], "/run").unit_spec
    planned = planned_unit(plans[0], "/run", simulated=planner.simulated)
    spec = planned.unit_spec
    assert planned.gpu is None
    assert (real.device, real.ranks, spec.device, spec.ranks) == ("cuda", 2, "cpu", 1)
    assert spec.simulated == SimulatedSpec("H100-80GB", gpus=("simulated-0", "simulated-1"), ranks=2)
    assert [pool.num_pages for pool in spec.pools] == [pool.num_pages for pool in real.pools]
    assert sum(pool.num_pages * pool.page_bytes for pool in spec.pools) < 1 << 30
    for one, other in zip(real.models, spec.models, strict=True):
        assert (one.quota_pages, one.kv_heads, one.prefill_share) == (
            other.quota_pages,
            other.kv_heads,
            other.prefill_share,
        )
    assert spec.costs == real.costs


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_a_pretended_gpu_is_given_to_one_unit_only(launcher: str) -> None:
    """Those of Ray are not asked for."""
    cluster = f"{{gpus: 8, gpu_type: H100, launcher: {launcher}}}"
    planner, plans = pretending(cluster, "{min: 1, max: 3, start: 2}")
    units = [planned_unit(each, "/run", simulated=planner.simulated) for each in plans]
    running = fleet_spec_of(planner.fleet, units, "/run")
    taken = {name for unit in units for name in (unit.unit_spec.simulated or SimulatedSpec("")).gpus}
    more = planned_unit(planner.unit("u2", ["arithmetic"], running), "/run", simulated=planner.simulated)
    assert more.unit_spec.simulated is not None
    assert more.unit_spec.simulated.gpus
    assert not taken & set(more.unit_spec.simulated.gpus)


def test_what_is_pretended_must_be_known() -> None:
    with pytest.raises(FleetError, match=r"cluster\.gpu_type: say what the GPUs are"):
        pretending("{gpus: 4}")
    with pytest.raises(FleetError, match=r"cluster\.gpu_type: .*Abacus"):
        pretending("{gpus: 4, gpu_type: Abacus}")
    declared = fleet(head="cluster: {gpu_ids: [2, GPU-8f6d1234-0000-1111-2222-333344445555], gpu_type: H100}")
    assert [gpu.uuid for gpu in pretended_gpus(declared).gpus] == [
        "GPU-8f6d1234-0000-1111-2222-333344445555",
        "simulated-1",
        "simulated-2",
    ]
