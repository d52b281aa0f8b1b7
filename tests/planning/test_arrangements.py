"""Units of rolling and pipelined models: on CPU and GPUs, at the start and later, with and without a plan file."""

# ruff: noqa: E501 -- one case, one line

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.config import Fleet, FleetError, load_fleet, parse_fleet
from muxserve.control.changes import NoRoomError
from muxserve.costs.architecture import read_architecture
from muxserve.costs.latency import EngineShape
from muxserve.costs.roofline import Roofline
from muxserve.gpu.nvml import Gpu, GpuMachine
from muxserve.gpu.sm import has_share
from muxserve.planning.demand.known_models import BUILT_IN
from muxserve.planning.specs.fleet_planner import FleetPlanner, ScaleOut, notes_of
from muxserve.planning.specs.plan_file import load_plan, save_plan
from muxserve.planning.specs.unit_models import possible_units, units_at_start
from muxserve.planning.specs.unit_plan import ResolvedUnit, resolve_unit
from muxserve.planning.specs.unit_specs import fleet_spec_of, planned_unit, prefill_seconds
from muxserve.spec import FleetSpec, UnitSpec
from placement import Machine, ModelDemand, PlanError, plan_unit
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand
from placement.memory import weight_bytes

ROOT = Path(__file__).resolve().parent.parent.parent
MACHINE = Machine(8, 16 << 30, 4 << 30)
NONE = GpuMachine(why_none="the NVIDIA driver is not installed")
H200 = GpuMachine(tuple(Gpu(i, f"GPU-{i}", "NVIDIA H200", 143771 << 20, (500 + i) << 20) for i in range(8)))
SLO = "slo: {ttft_ms: 1000, tpot_ms: 100}"
# Configurations of the checkpoints: head sizes 64, 64 and 128; 4, 3 and 2 layers; 4, 2 and 2 KV heads.
ROLLING = f"engines: one, dispatch: rolling, {SLO}"


def fleet(arithmetic: str = "", atlas: str = "", frontdesk: str = "", head: str = "kv_pool: {size: 64MiB}") -> Fleet:
    text = f"{head}\nmodels:\n" + "".join(
        f"  - {{name: {name}, path: models/{name}, rate: 6{', ' * bool(keys)}{keys}}}\n"
        for name, keys in (("arithmetic", arithmetic), ("atlas", atlas), ("frontdesk", frontdesk))
    )
    return parse_fleet(text, "fleet.yaml", ROOT / "configs", {})


def only(keys: str, name: str = "arithmetic", head: str = "kv_pool: {size: 64MiB}") -> Fleet:
    text = f"{head}\nmodels:\n  - {{name: {name}, path: models/{name}, rate: 6, {keys}}}\n"
    return parse_fleet(text, "fleet.yaml", ROOT / "configs", {})


def plan(declared: Fleet, file: Path | None = None, gpus: GpuMachine = NONE) -> list[ResolvedUnit]:
    return FleetPlanner(declared, MACHINE, lambda: gpus).at_start(file)


def deployed(declared: Fleet, plans: list[ResolvedUnit]) -> FleetSpec:
    return fleet_spec_of(declared, [planned_unit(each, "/run") for each in plans], "/run")


def unit_of(plans: list[ResolvedUnit], number: int = 0) -> UnitSpec:
    return planned_unit(plans[number], "/run").unit_spec


def refused(declared: Fleet, *arguments: object) -> str:
    with pytest.raises(FleetError) as caught:
        plan(declared, *arguments)  # type: ignore[arg-type]
    return str(caught.value)


class TestUnits:
    def test_shared_ones_come_first_then_one_for_each_replica(self) -> None:
        declared = fleet(f"{ROLLING}, replicas: 3", "engines: split, replicas: 2", "engines: one, stages: 2")
        assert (units_at_start(declared), possible_units(declared)) == (6, 6)
        plans = plan(declared)
        told = deployed(declared, plans)
        assert [(unit.name, unit.serves, unit.unit_spec.policy) for unit in told.units] == [
            ("u0", ["atlas"], "slack"),
            ("u1", ["atlas"], "slack"),
            ("u2", ["arithmetic"], "rolling"),
            ("u3", ["arithmetic"], "rolling"),
            ("u4", ["arithmetic"], "rolling"),
            ("u5", ["frontdesk"], "free"),
        ]
        assert [unit.unit_spec.models[0].engines for unit in told.units[1:3]] == [("prefill", "decode"), ("both",)]
        assert [plan.fleet.models[0].rate for plan in plans] == [3.0, 3.0, 2.0, 2.0, 2.0, 6.0]
        assert [model.name for model in told.models] == ["arithmetic", "atlas", "frontdesk"]

    def test_models_that_share_keep_what_they_have_without_the_others(self) -> None:
        """The head size of frontdesk (128) has no say in the blocks of the others when it has a unit to itself."""
        declared = fleet("replicas: 2", "", ROLLING)
        blocks = {model.name: model.table.block_tokens for each in plan(declared) for model in each.unit.models}
        assert blocks == dict.fromkeys(blocks, 32)
        assert {model.table.block_tokens for model in plan(fleet("replicas: 2"))[1].unit.models} == {64}

    def test_a_model_that_sleeps_has_a_unit_that_serves_nothing(self) -> None:
        declared = fleet(f"{ROLLING}, replicas: {{min: 0, max: 2, start: 0}}")
        plans = plan(declared)
        assert [(each.name, each.served) for each in plans] == [("u0", ("atlas", "frontdesk")), ("u1", ())]
        assert possible_units(declared) == 3
        told = deployed(declared, plans)
        assert "arithmetic" in told.rolling
        assert [model.name for model in told.models] == ["arithmetic", "atlas", "frontdesk"]

    def test_the_only_engine_of_a_unit_has_the_cores_that_other_units_leave(self) -> None:
        threads = {
            keys: plan(only(keys))[0].unit.models[0].threads
            for keys in (
                f"{ROLLING}, replicas: 3",
                ROLLING,
                "engines: one, stages: 2",
                "engines: one, stages: 4",
                f"{ROLLING}, replicas: {{min: 1, max: 20}}",
                f"{ROLLING}, replicas: 2, threads: 3",
            )
        }
        assert list(threads.values()) == [2, 8, 4, 2, 1, 3]

    @pytest.mark.parametrize("keys", [ROLLING, "engines: one, stages: 2"])
    def test_units_of_rolling_replicas_and_of_stages_have_no_other_model(self, keys: str) -> None:
        with pytest.raises(ValueError, match="units to themselves"):
            resolve_unit(fleet(keys), MACHINE)
        assert len(resolve_unit(fleet(keys).as_split(), MACHINE).unit.models) == 3

    @pytest.mark.parametrize(("shapes", "threads"), [(("one", "split", "one"), 2), (("one", "one", "one"), 2)])
    def test_a_unit_takes_any_mix(self, shapes: tuple[str, ...], threads: int) -> None:
        declared = fleet(*(f"engines: {shape}" for shape in shapes))
        (unit,) = deployed(declared, plan(declared)).units
        spec = unit.unit_spec
        assert (spec.policy, spec.stages, [model.shape for model in spec.models]) == ("slack", 1, [*shapes])
        assert [len(model.engines) for model in spec.models] == [2 if shape == "split" else 1 for shape in shapes]
        assert {model.threads for model in spec.models} == {threads}
        # Prefill is a job of its own where a model has an engine for it.
        assert plan(fleet(*["engines: one"] * 3, head="cluster: {cores: 3}"))[0].unit.models[0].threads == 1
        assert plan(fleet(*["engines: one"] * 3, head="cluster: {cores: 6}"))[0].unit.models[0].threads == 2
        assert plan(fleet(*["engines: split"] * 3, head="cluster: {cores: 6}"))[0].unit.models[0].threads == 1

    def test_a_plan_file_may_mix_them(self, tmp_path: Path) -> None:
        models = (PlacedModel("arithmetic", 2.0, 0.5, 0.5, "one"), PlacedModel("atlas", 2.0, 0.5, 0.5))
        placed = PlacedUnit("unit0", "CPU", (0,), (*models, replace(models[0], model="frontdesk")), 64 << 20)
        save_plan(Placement(Cluster((Node("CPU", 1),)), (placed,)), tmp_path / "plan.yaml")
        assert load_plan(tmp_path / "plan.yaml").units == (placed,)
        spec = unit_of(plan(fleet("engines: auto", "engines: split"), tmp_path / "plan.yaml"))
        assert [model.shape for model in spec.models] == ["one", "split", "one"]


REPLICAS = st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 3)).map(
    lambda drawn: f"replicas: {{min: {min(drawn)}, max: {max(drawn)}, start: {sorted(drawn)[1]}}}"
)
KINDS = st.sampled_from(["engines: split", ROLLING, "engines: one, stages: 2"])
KEYS = st.tuples(REPLICAS, KINDS).map(", ".join)


@settings(max_examples=15, deadline=None)
@given(KEYS, KEYS, KEYS)
def test_every_replica_has_its_unit_and_all_of_them_one_layout(one: str, two: str, three: str) -> None:
    declared = fleet(one, two, three)
    planner = FleetPlanner(declared, MACHINE, lambda: NONE)
    plans = planner.at_start()
    told = deployed(declared, plans)
    assert [each.name for each in plans] == [f"u{number}" for number in range(len(plans))]
    assert len(plans) == units_at_start(declared) <= possible_units(declared)
    for model in declared.models:
        assert len(told.replicas(model.name)) == model.replicas.at_start
        units = [u.unit_spec for u in told.units if model.name in [m.name for m in u.unit_spec.models]]
        more = planned_unit(planner.unit("late", [model.name], told), "/run").unit_spec
        assert len({unit.layout(model.name) for unit in (*units, more)}) == 1
        assert {unit.model(model.name).shape for unit in (*units, more)} == {model.shape}
        assert (model.name in told.rolling) == model.rolls
        if model.has_own_unit:
            assert {len(unit.models) for unit in units} == {1}
            assert {unit.policy for unit in (*units, more)} == {"rolling" if model.rolls else "free"}


class TestStages:
    def test_are_processes_with_a_part_of_the_layers(self) -> None:
        unit = unit_of(plan(only("engines: one, stages: 2, max_len: 256")))
        (model,) = unit.models
        assert (unit.ranks, unit.stages, model.layers, model.kv_heads) == (2, 2, 2, 4)
        # Pages are of one stage: a block of 32 tokens has 2 layers x 4 heads of them, a sequence of 256 tokens 8
        # blocks.
        assert (model.pages_per_block, model.floor_pages) == (8, 64)
        assert unit.layout("arithmetic").endswith(".2r.2s")

    def test_in_words(self) -> None:
        assert plan(only("engines: one, stages: 2"))[0].notes[0] == (
            "arithmetic has one engine of both phases, its layers over 2 processes"
        )
        assert plan(only(ROLLING))[0].notes[0] == (
            "arithmetic has one engine of both phases, and prefill rolls over its replicas"
        )
        assert plan(only("engines: split"))[0].notes[0] == "arithmetic has an engine for each phase"
        assert plan(only("engines: one"))[0].notes[0].startswith("pool0")

    @pytest.mark.parametrize(("stages", "layers"), [(1, 4), (2, 2), (3, 2), (4, 1)])
    def test_layers_are_those_of_the_longest(self, stages: int, layers: int) -> None:
        unit = unit_of(plan(only(f"engines: one, stages: {stages}")))
        assert (unit.ranks, unit.stages, unit.models[0].layers) == (stages, stages, layers)

    def test_one_is_no_more_than_one_engine_with_mixed_steps(self) -> None:
        unit = unit_of(plan(only("engines: one, stages: 1")))
        assert (unit.ranks, unit.policy, unit.stages) == (1, "free", 1)

    def test_more_than_layers_are_refused(self) -> None:
        said = refused(only("engines: one, stages: 5"))
        assert said == "fleet.yaml:3: models[0].stages: 5 stages are more than the model has layers (4)"

    def test_of_several_ranks_each_on_a_cpu(self) -> None:
        head = "kv_pool: {size: 64MiB}\ncluster: {ranks: 2}"
        unit = unit_of(plan(only("engines: one, stages: 2", head=head)))
        (model,) = unit.models
        assert (unit.ranks, unit.stages, model.layers, model.kv_heads, model.threads) == (4, 2, 2, 2, 2)
        assert unit_of(plan(only("engines: one, stages: 1", head=head))).ranks == 2
        assert unit_of(plan(only(ROLLING, head=head))).ranks == 2

    @given(st.integers(1, 80), st.integers(1, 16))
    def test_no_layer_is_lost(self, layers: int, stages: int) -> None:
        architecture = read_architecture({"architectures": ["x"], **BUILT_IN["llama-7b"], "num_hidden_layers": layers})
        demand = ModelDemand("x", architecture, ranks=2 * stages, stages=stages)
        if stages > layers:
            with pytest.raises(PlanError, match="stages are more"):
                plan_unit([demand], MACHINE)
        assert demand.tensor_parallel == 2
        assert demand.layers * stages >= layers > (demand.layers - 1) * stages
        assert demand.pages_per_block == demand.layers * architecture.kv_heads // 2
        assert demand.bytes_per_token == 2 * demand.pages_per_block * architecture.head_dim * 2

    @given(st.sampled_from(sorted(BUILT_IN)), st.integers(1, 16))
    def test_weights_of_the_largest_stage(self, name: str, stages: int) -> None:
        architecture = read_architecture({"architectures": [name], **BUILT_IN[name]})
        demand = Demand(name, architecture, rate=1.0)
        whole, held = architecture.weight_bytes("bfloat16"), weight_bytes(demand, 1, stages)
        assert whole / stages <= held <= whole
        assert weight_bytes(demand, 2, stages) == held // 2


class TestRolling:
    def test_rules_are_those_of_the_file_with_predicted_prefills(self) -> None:
        declared = only(f"{ROLLING}, replicas: 3, max_len: 1024")
        rules = deployed(declared, plan(declared)).rolling["arithmetic"]
        assert (rules.ttft, rules.tpot, rules.spared, rules.lower, rules.upper) == (1.0, 0.1, 0.25, 4, 16)
        assert (rules.objectives.ttft, rules.bounds.upper) == (1.0, 16)
        assert [tokens for tokens, _ in rules.prefill] == [1, 16, 64, 256, 1024]
        seconds = [seconds for _, seconds in rules.prefill]
        assert seconds == sorted(seconds)
        assert 0 < rules.prefill_seconds(100) < rules.prefill_seconds(1000)

    def test_others_have_none(self) -> None:
        declared = fleet("engines: one, stages: 2")
        assert deployed(declared, plan(declared)).rolling == {}

    def test_long_prompts_run_in_chunks(self) -> None:
        """The pairs of attention are those of the whole prompt, however it is cut; each chunk costs a step."""
        architecture = read_architecture({"architectures": ["x"], **BUILT_IN["llama-7b"]})
        costs = Roofline().engine(architecture, EngineShape("A100-80GB", dtype="float16"))
        assert prefill_seconds(costs, 1000, 1000) == costs.prefill(1000, 500500, 1)
        assert prefill_seconds(costs, 1000, 999) == pytest.approx(
            costs.prefill(999, 999 * 500, 1) + costs.prefill(1, 1000, 1)
        )

    def test_a_gpu_that_nobody_knows_does_not_stand_in_the_way(self) -> None:
        unknown = GpuMachine((Gpu(0, "GPU-0", "NVIDIA Quux 9000", 80 << 30, 0),))
        declared = only(f"{ROLLING}, max_len: 1024", head="cluster: {gpus: 1}")
        assert deployed(declared, plan(declared, gpus=unknown)).rolling["arithmetic"].prefill[-1][1] > 0


class TestGpus:
    def test_each_replica_has_gpus_of_its_own(self) -> None:
        declared = fleet(f"{ROLLING}, replicas: 2", "replicas: {min: 1, max: 2}", head="cluster: {gpus: 8}")
        plans = plan(declared, gpus=H200)
        told = deployed(declared, plans)
        assert possible_units(declared) == 4
        uuids = [tuple(unit.unit_spec.gpu.uuids) for unit in told.units if unit.unit_spec.gpu]
        assert len({uuid for each in uuids for uuid in each}) == 6
        assert [len(each) for each in uuids] == [2, 2, 2]
        rolling = told.units[1].unit_spec
        assert (rolling.policy, rolling.ranks, rolling.stages) == ("rolling", 2, 1)
        assert (rolling.models[0].prefill_share, rolling.models[0].decode_share) == (1.0, 1.0)
        assert rolling.models[0].kv_heads == 2
        notes = notes_of(plans)
        assert any("one engine of both phases has all SMs" in note for note in notes)

    def test_all_gpus_of_a_unit_may_be_stages(self) -> None:
        plans = plan(only("engines: one, stages: 4", head="cluster: {gpus: 4}"), gpus=H200)
        unit = unit_of(plans)
        assert (unit.ranks, unit.stages, unit.models[0].layers, unit.models[0].kv_heads) == (4, 4, 1, 4)
        assert any("its layers in 4 stages of 1 GPU" in note for note in plans[0].notes)

    def test_or_some_of_them_split_the_tensors(self) -> None:
        unit = unit_of(plan(only("engines: one, stages: 2", head="cluster: {gpus: 4}"), gpus=H200))
        assert (unit.ranks, unit.stages, unit.models[0].layers, unit.models[0].kv_heads) == (4, 2, 2, 2)

    def test_stages_that_do_not_divide_them(self) -> None:
        said = refused(only("engines: one, stages: 3", head="cluster: {gpus: 4}"), None, H200)
        assert said.startswith("fleet.yaml:3: models[0].stages: 3 stages do not divide the 4 GPUs of a unit evenly")

    def test_one_engine_leaves_more_to_the_pool_than_two(self) -> None:
        one, two = (
            plan(only(keys, head="cluster: {gpus: 1}"), gpus=H200)[0].gpu for keys in (ROLLING, "engines: split")
        )
        assert one is not None
        assert two is not None
        assert (one.rules.engines, one.rules.processes) == (1, 1)
        assert (two.rules.engines, two.rules.processes) == (2, 2)

    def test_a_unit_of_a_mix_has_shares_and_memory_for_the_engines_that_there_are(self) -> None:
        head = "cluster: {gpus: 1, sm_sharing: mps}"
        keys = ("engines: one", "engines: split", "engines: one")
        (made,) = plan(fleet(*keys, head=head), gpus=H200)
        assert made.gpu is not None
        assert {each.model: each.engine_count for each in made.gpu.needs} == {
            "arithmetic": 1,
            "atlas": 2,
            "frontdesk": 1,
        }
        assert made.gpu._clients([model.name for model in made.fleet.models]) == 5, "four engines and the migrator"
        spec = unit_of([made])
        shares = {model.name: (model.prefill_share, model.decode_share) for model in spec.models}
        assert shares["arithmetic"][0] == shares["arithmetic"][1] <= 1.0
        assert has_share(spec, "arithmetic", "both")
        # Where no lease is withheld the hardware shares.
        free = unit_of(plan(fleet(*keys, head=f"{head}\npolicy: free"), gpus=H200))
        assert (free.policy, free.models[0].decode_share, has_share(free, "arithmetic", "both")) == ("free", 1.0, False)
        two = plan(fleet(*["engines: split"] * 3, head=head), gpus=H200)[0]
        assert two.gpu is not None
        ours, theirs = (each.budgets(made.demands)[0].pool_bytes for each in (made.gpu, two.gpu))
        assert ours > theirs
        assert any("SM shares of models with one engine: arithmetic" in note for note in made.notes)

    @pytest.mark.parametrize(("count", "shape", "least"), [(3, "one", 18), (3, "split", 9), (4, "one", 0)])
    def test_what_models_of_8b_leave_of_an_h100(self, tmp_path: Path, count: int, shape: str, least: int) -> None:
        """The memory of a model's engines is that of one or of two."""
        config = {"architectures": ["LlamaForCausalLM"], **BUILT_IN["llama-3.1-8b"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        text = "cluster: {gpus: 1, gpu_type: H100-80GB}\nmodels:\n" + "".join(
            f"  - {{name: m{n}, architecture: llama-3.1-8b, dtype: bfloat16, engines: {shape}}}\n" for n in range(count)
        )
        declared = parse_fleet(text, "fleet.yaml", tmp_path, {}, serving=False)
        models = [model.model_copy(update={"path": str(tmp_path)}) for model in declared.models]
        gpu = Gpu(0, "GPU-0", "NVIDIA H100 80GB HBM3", 81559 << 20, 600 << 20)
        (made,) = plan(declared.with_models(models), gpus=GpuMachine((gpu,)))
        assert least <= made.unit.pool_bytes / 2**30 < least + 1

    def test_too_few_for_all_units(self) -> None:
        said = refused(only(f"{ROLLING}, replicas: 3", head="cluster: {gpus: 2}"), None, H200)
        assert "2 are too few for 3 units, one for each replica (arithmetic: 3)" in said

    def test_one_more_later(self) -> None:
        declared = only(f"{ROLLING}, replicas: {{min: 1, max: 2}}", head="cluster: {gpus: 4}")
        planner = FleetPlanner(declared, MACHINE, lambda: H200)
        told = deployed(declared, planner.at_start())
        more = planner.unit("u1", ["arithmetic"], told)
        assert more.gpu is not None
        assert len(more.gpu.gpus) == 2
        assert {gpu.uuid for gpu in more.gpu.gpus}.isdisjoint(told.units[0].unit_spec.gpu.uuids)  # type: ignore[union-attr]
        full = deployed(declared, [*planner.at_start(), more])
        with pytest.raises(NoRoomError, match="0 are free"):
            planner.unit("u2", ["arithmetic"], full)


# A model, whether prefill rolls, and over how many stages it is: 0 where it has two engines.
Planned = tuple[str, bool, int]
ROLLED: Planned = ("arithmetic", True, 1)


def saved(path: Path, *units: Planned, device: str = "CPU", each: int = 1) -> Path:
    """A plan whose units have one model on `each` devices of their own."""
    placed = tuple(
        PlacedUnit(
            f"unit{i}", device=device, devices=tuple(range(i * each, (i + 1) * each)), models=(PlacedModel(name, 2.0, 1.0, 1.0, "one" if stages else "split"),),
            kv_bytes=64 << 20, stages=max(1, stages), policy="rolling" if rolling else "",
        )
        for i, (name, rolling, stages) in enumerate(units)
    )  # fmt: skip
    save_plan(Placement(Cluster((Node(device, len(units) * each),)), placed), path)
    return path


class TestPlanFiles:
    def test_say_which_engines_models_have(self, tmp_path: Path) -> None:
        file = saved(tmp_path / "plan.yaml", *[ROLLED] * 3)
        declared = only(f"engines: auto, {SLO}")
        planner = FleetPlanner(declared, MACHINE, lambda: NONE)
        plans = planner.at_start(file)
        told = deployed(planner.fleet, plans)
        assert [unit.unit_spec.policy for unit in told.units] == ["rolling"] * 3
        assert told.rolling.keys() == {"arithmetic"}
        assert {each.unit.models[0].threads for each in plans} == {2}
        more = planned_unit(planner.unit("u3", ["arithmetic"], told), "/run").unit_spec
        assert (more.policy, more.layout("arithmetic")) == ("rolling", told.units[0].unit_spec.layout("arithmetic"))

    def test_are_read_as_they_were_written(self, tmp_path: Path) -> None:
        file = saved(tmp_path / "plan.yaml", ("one", True, 1), ("two", False, 2), ("three", False, 0))
        assert [(unit.models[0].shape, unit.rolls, unit.stages) for unit in load_plan(file).units] == [
            ("one", True, 1),
            ("one", False, 2),
            ("split", False, 1),
        ]
        assert "split" not in file.read_text()
        assert file.read_text().count("stages: 2") == 1

    def test_with_pipelines_on_gpus(self, tmp_path: Path) -> None:
        file = saved(tmp_path / "plan.yaml", ("arithmetic", False, 2), device="H200-141GB", each=4)
        unit = unit_of(plan(only("engines: auto", head="cluster: {gpus: 4}"), file, H200))
        assert (unit.policy, unit.ranks, unit.stages, unit.models[0].kv_heads) == ("free", 4, 2, 2)

    def test_with_a_pipeline_on_a_cpu(self, tmp_path: Path) -> None:
        unit = unit_of(plan(only("max_len: 256"), saved(tmp_path / "plan.yaml", ("arithmetic", False, 4))))
        assert (unit.policy, unit.ranks, unit.stages, unit.models[0].threads) == ("free", 4, 4, 2)

    @pytest.mark.parametrize(
        ("keys", "planned", "expected"),
        [
            (f"{SLO}, dispatch: rolling", (False, 2), "prefill of arithmetic does not roll over its replicas in the plan, as the fleet file says; make it anew, or leave `dispatch` out"),
            ("engines: split", (False, 2), "the plan has arithmetic with `engines: one`, the fleet file `split`; make it anew, or change `engines` to auto"),
            ("engines: one, stages: 4", (False, 2), "the plan has arithmetic over 2 stages, the fleet file over 4"),
            ("engines: auto", (True, 1), "the plan has arithmetic rolling, which needs slo.ttft_ms and slo.tpot_ms in the fleet file"),
        ],
    )  # fmt: skip
    def test_must_agree_with_the_fleet_file(
        self, tmp_path: Path, keys: str, planned: tuple[bool, int], expected: str
    ) -> None:
        assert expected in refused(only(keys), saved(tmp_path / "plan.yaml", ("arithmetic", *planned)))

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (("policy: rolling", "policy: pipelined"), "units[0].policy: must be one of adbs, slack, free, fcfs, rolling, not"),
            (("engines: one", "engines: two"), "units[0].models[0].engines: must be one of split, one"),
            ((", engines: one", ""), "units[1].models: arithmetic has one engine, rolling here and two engines in unit0; replicas of a model must be alike"),
            (("policy: rolling", "stages: 3"), "units[0].stages: 3 stages do not divide the unit's 2 devices evenly"),
            (("policy: rolling", "stages: 2"), "units[1].models: arithmetic has one engine, rolling here and one engine over 2 stages in unit0; replicas of a model must be alike"),
            (("  - {model: ", "  - {model: atlas, rate: 1, prefill_share: 1, decode_share: 1}\n  - {model: "), "units[0].models: a model whose prefill rolls over its replicas has a unit to itself, but unit0 has 2 models"),
        ],
    )  # fmt: skip
    def test_mistakes(self, tmp_path: Path, change: tuple[str, str], expected: str) -> None:
        file = saved(tmp_path / "plan.yaml", *[ROLLED] * 2, device="L20-48GB", each=2)
        text = file.read_text()
        assert change[0] in text
        file.write_text(text.replace(*change, 1))
        with pytest.raises(FleetError) as caught:
            load_plan(file)
        assert expected in str(caught.value)


class TestAuto:
    """Models that leave their engines open have one where no plan has chosen others."""

    @pytest.mark.parametrize("open_model", ["engines: auto", ""])
    def test_on_a_cpu(self, open_model: str) -> None:
        planner = FleetPlanner(fleet(open_model, "engines: one, stages: 2"), MACHINE, lambda: NONE)
        told = deployed(planner.fleet, planner.at_start())
        assert [(u.unit_spec.policy, u.unit_spec.stages) for u in told.units] == [("slack", 1), ("free", 2)]
        # Who leaves it out does not hear of it.
        assert planner.reasons == ["`engines: auto` of arithmetic is one on a CPU"] * bool(open_model)
        assert told.units[0].unit_spec.model("arithmetic").shape == "one"

    def test_on_gpus_the_user_hears_what_chooses(self) -> None:
        planner = FleetPlanner(only("engines: auto", head="cluster: {gpus: 1}"), MACHINE, lambda: H200)
        assert planned_unit(planner.at_start()[0], "/run").unit_spec.policy == "free"
        (reason,) = planner.reasons
        assert reason.startswith("`engines: auto` of arithmetic is one without a plan; `muxserve plan -o`")

    def test_where_memory_decides_it_is_one(self) -> None:
        head = "cluster: {gpus: 1}\nmemory: auto"
        planner = FleetPlanner(only("engines: auto", head=head), MACHINE, lambda: H200)
        planner.at_start()
        assert planner.reasons == ["`engines: auto` of arithmetic is one where memory decides which models are awake"]

    def test_a_plan_says_it(self, tmp_path: Path) -> None:
        declared = only(f"engines: auto, {SLO}")
        planner = FleetPlanner(declared, MACHINE, lambda: NONE)
        (unit,) = planner.at_start(saved(tmp_path / "plan.yaml", ROLLED))
        assert planned_unit(unit, "/run").unit_spec.policy == "rolling"
        assert planner.reasons == []

    def test_a_model_that_is_added_later(self) -> None:
        planner = FleetPlanner(only("engines: split"), MACHINE, lambda: NONE)
        told = deployed(planner.fleet, planner.at_start())
        said: list[str] = []
        added = only("engines: auto", "atlas")
        addition = ScaleOut(planner).addition(added, iter(["u1"]).__next__, told, said.append)
        assert [unit.unit_spec.policy for unit in addition.units] == ["free"]
        assert said[0] == "`engines: auto` of atlas is one on a CPU"


def test_whatever_keeps_a_model_from_being_added_it_is_declared_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = FleetPlanner(only("engines: split"), MACHINE, lambda: NONE)
    told = deployed(planner.fleet, planner.at_start())

    def fails(*_: object) -> ResolvedUnit:
        assert [model.name for model in planner.fleet.models] == ["arithmetic", "atlas"]
        raise MemoryError

    monkeypatch.setattr(planner, "unit", fails)
    with pytest.raises(MemoryError):
        ScaleOut(planner).addition(only(ROLLING, "atlas"), lambda: "u1", told, lambda _: None)
    assert [model.name for model in planner.fleet.models] == ["arithmetic"]


@pytest.mark.parametrize(("name", "policy", "units"), [("rolling", "rolling", 3), ("pipeline", "free", 1)])
def test_the_examples_can_be_deployed(name: str, policy: str, units: int) -> None:
    declared = load_fleet(ROOT / f"configs/{name}.yaml")
    told = deployed(declared, plan(declared))
    assert [unit.unit_spec.policy for unit in told.units] == [policy] * units
    assert math.prod(unit.unit_spec.stages for unit in told.units) == (2 if name == "pipeline" else 1)
