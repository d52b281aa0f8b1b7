"""Models of one engine in plans: devices of their own, plan files, what the command prints."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.config import Fleet, load_fleet
from muxserve.planning.candidates.dedicated_units import (
    FreeDevices,
    OpenLayout,
    divide_gpus,
    open_units,
    part_of,
    rearranged,
)
from muxserve.planning.candidates.device_pool import Surroundings
from muxserve.planning.candidates.layouts import ReplicaLayout
from muxserve.planning.candidates.ways import MIXED, WAYS, as_way, ways_of
from muxserve.planning.place.prediction import Trial, predict, simulated_of
from muxserve.planning.specs.plan_file import load_plan
from placement.cluster import Cluster, Node
from placement.demand import Demand
from placement.memory import MemoryRules
from placement.planner import ClusterPlan, PlanOptions, plan_cluster
from tests.planning.phases_support import COSTS, L20, WIDE, wanted

AROUND = Surroundings(MemoryRules.served(0.92))
runner = CliRunner()
ROOT = Path(__file__).resolve().parents[2]

FLEET = """\
cluster: {{ gpus: 4, gpu_type: l20 }}
models:
  - name: open
    architecture: wide
    {engines}
    rate: 8
    workload: {{ prompt_tokens: 200, output_tokens: 40 }}
    slo: {{ ttft_ms: 2000, tpot_ms: 100 }}
{more}"""
AUTO, SPLIT = "engines: auto", "engines: split"
ROLLING, STAGES = "engines: one\n    dispatch: rolling", "engines: one\n    stages: 2"
OTHER = """\
  - name: other
    architecture: wide
    rate: 2
    workload: { prompt_tokens: 200, output_tokens: 40 }
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    (tmp_path / "wide").mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": WIDE.layers,
        "num_attention_heads": WIDE.heads,
        "num_key_value_heads": WIDE.kv_heads,
        "hidden_size": WIDE.hidden,
        "intermediate_size": WIDE.intermediate,
        "vocab_size": WIDE.vocab,
        "max_position_embeddings": WIDE.max_len,
        "dtype": "bfloat16",
        "head_dim": WIDE.head_dim,
    }
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    return tmp_path / "fleet.yaml"


def run(*arguments: object, simulate: int = 0) -> tuple[int, str, str]:
    result = runner.invoke(app, ["plan", *map(str, arguments), "--simulate", str(simulate)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


class TestFreeDevices:
    def test_replicas_stay_within_machines_and_leave_large_holes(self) -> None:
        carving = FreeDevices(Cluster((Node("a", 4), Node("b", 8), Node("a", 2))))
        assert carving.take("a", ReplicaLayout(2, 1, 1, True)) == ((12,), (13,))
        assert carving.take("a", ReplicaLayout(1, 1, 4, True)) == ((0, 1, 2, 3),)
        assert carving.take("a", ReplicaLayout(1, 1, 1, True)) is None
        cluster, numbers = carving.rest()
        assert cluster == Cluster((Node("b", 8),))
        assert numbers == list(range(4, 12))

    def test_only_some_are_free_at_first(self) -> None:
        carving = FreeDevices(Cluster((Node("a", 4), Node("b", 8), Node("a", 2))), {1, 2, 6, 13})
        assert carving.on_machines("a") == (2, 1)
        assert carving.take("a", ReplicaLayout(2, 1, 1, True)) == ((13,), (1,))
        assert carving.take("a", ReplicaLayout(2, 1, 1, True)) is None
        assert carving.on_machines("a") == (1,)

    def test_a_replica_lies_within_a_machine(self) -> None:
        carving = FreeDevices(Cluster((Node("a", 3), Node("a", 4), Node("a", 2))))
        assert carving.take("a", ReplicaLayout(1, 3, 2)) is None
        assert carving.take("a", ReplicaLayout(1, 2, 2)) == ((3, 4, 5, 6),)

    def test_what_is_not_there_takes_nothing(self) -> None:
        carving = FreeDevices(Cluster((Node("a", 3),)))
        assert carving.take("a", ReplicaLayout(2, 1, 2, True)) is None
        assert carving.take("a", ReplicaLayout(3, 1, 1, True)) == ((0,), (1,), (2,))


class TestParts:
    @staticmethod
    def plan(rates: list[float], nodes: tuple[Node, ...]):  # type: ignore[no-untyped-def]
        demands = [
            Demand(f"m{n}", WIDE, rate=rate, prompt_tokens=200, output_tokens=40) for n, rate in enumerate(rates)
        ]
        options = PlanOptions(rules=MemoryRules.served(0.92))
        memory = {L20.name: L20.memory_bytes}
        return plan_cluster(demands, Cluster(nodes), COSTS, memory, options)

    def test_alone_a_model_has_all_devices(self) -> None:
        made = self.plan([1.0], (Node(L20.name, 4), Node(L20.name, 2)))
        assert part_of(made, "m0") == (L20.name, (4, 2))

    def test_of_what_it_shares_it_has_its_part(self) -> None:
        made = self.plan([30.0, 10.0], (Node(L20.name, 4),))
        kind, nodes = part_of(made, "m0")
        held = sum(len(u.devices) for u in made.placement.units if any(m.model == "m0" for m in u.models))
        assert kind == L20.name
        assert 1 <= sum(nodes) <= held
        assert sum(nodes) >= sum(part_of(made, "m1")[1])


class TestCommand:
    @pytest.mark.slow
    def test_a_model_that_leaves_it_open_is_planned_as_the_best_way_has_it(self, fleet: Path) -> None:
        fleet.write_text(FLEET.format(engines=AUTO, more="").replace("gpus: 4", "gpus: 2"))
        plan = fleet.with_name("plan.yaml")
        code, out, err = run(fleet, "--json", "-o", plan, simulate=20)
        assert code == 0, err
        data = json.loads(out)
        assert err == "plan written to " + str(plan) + "\n"
        (first, *_) = data["candidates"]
        shapes = {(unit["models"][0]["engines"], unit["stages"]) for unit in data["units"]}
        expected = {"stages": ("one", 2), "rolling": ("one", 1), "one engine": ("one", 1)}
        assert shapes == {expected.get(first["way"], ("split", 1))}
        placement = load_plan(plan, load_fleet(fleet, serving=False))
        assert {(unit.models[0].shape, unit.stages) for unit in placement.units} == shapes

    def test_nothing_is_chosen_where_nothing_is_simulated(self, fleet: Path) -> None:
        fleet.write_text(FLEET.format(engines=AUTO, more=""))
        code, out, err = run(fleet)
        assert code == 0, err
        assert "open has two engines: `engines: auto` is decided by simulation" in " ".join(err.split())
        assert "chosen" not in out

    @pytest.mark.slow
    @pytest.mark.parametrize(("engines", "words"), [(ROLLING, "rolling"), (STAGES, "2 stages")])
    def test_a_model_that_says_so_has_devices_to_itself(self, fleet: Path, engines: str, words: str) -> None:
        fleet.write_text(FLEET.format(engines=engines, more=OTHER))
        plan = fleet.with_name("plan.yaml")
        code, out, err = run(fleet, "-o", plan)
        assert code == 0, err
        assert words in " ".join(out.split())
        assert "chosen" not in out
        data = yaml.safe_load(plan.read_text())
        own = [unit for unit in data["units"] if unit["models"][0].get("engines") == "one"]
        assert [[m["model"] for m in unit["models"]] for unit in own] == [["open"]] * len(own)
        assert sum(m["rate"] for unit in own for m in unit["models"]) == pytest.approx(8.0)
        devices = [number for unit in data["units"] for number in unit["devices"]]
        assert len(devices) == len(set(devices))
        assert set(devices) <= set(range(4))
        shared = [m["model"] for unit in data["units"] if unit not in own for m in unit["models"]]
        assert set(shared) == {"other"}
        load_plan(plan, load_fleet(fleet, serving=False))

    def test_what_cannot_be_arranged_so_is_missing(self, fleet: Path) -> None:
        fleet.write_text(FLEET.format(engines=ROLLING, more="").replace("gpus: 4", "gpus: 1"))
        code, out, _ = run(fleet)
        assert code == 1
        assert "open is placed nowhere: prefill rolls over replicas, and there is one GPU" in out

    @pytest.mark.slow
    def test_what_the_file_says_gets_the_devices_that_it_takes(self, fleet: Path) -> None:
        # By its load the model would have one GPU of the two, which nothing can roll over.
        other = OTHER.replace("rate: 2", "rate: 30")
        text = FLEET.format(engines=ROLLING, more=other).replace("rate: 8", "rate: 1")
        fleet.write_text(text.replace("gpus: 4", "gpus: 3"))
        code, out, err = run(fleet, "--json")
        assert code == 0, err
        units = {
            unit["name"]: (unit["models"][0]["engines"], len(unit["devices"])) for unit in json.loads(out)["units"]
        }
        assert sorted(units.values()) == [("one", 1), ("one", 1), ("split", 1)]
        fleet.write_text(text.replace("gpus: 4", "gpus: 2"))
        code, out, _ = run(fleet)
        assert code == 1
        assert "other is placed nowhere: models that have devices to themselves leave none" in out
        assert "of 31.00 requests/s served" in out

    def test_sweeps_and_baselines_say_that_they_know_no_other_engines(self, fleet: Path) -> None:
        fleet.write_text(FLEET.format(engines=AUTO, more=""))
        code, out, err = run(fleet, "--mode", "temporal")
        assert code == 0
        assert "--mode temporal plans two engines where `engines: auto` leaves a choice" in err
        assert "chosen" not in out
        assert "a sweep plans two engines where `engines: auto`" in run(fleet, "--sweep", "gpus=1..2")[2]
        fleet.write_text(FLEET.format(engines=ROLLING, more=""))
        _, _, err = run(fleet, "--mode", "temporal", "--simulate", 0)
        assert "--mode temporal plans no stages and no rolling prefill, whatever the file says" in err

    @pytest.mark.parametrize("sweep", ["gpus=1..4", "scale=1..2"])
    def test_sweeps_keep_to_the_layout_of_the_file(self, fleet: Path, sweep: str) -> None:
        """Two stages need two GPUs of their own, so that one or two are not enough, and the plan can be deployed."""
        text = FLEET.format(engines=STAGES, more=OTHER.replace("rate: 2", "rate: 1")).replace("rate: 8", "rate: 1")
        fleet.write_text(text.replace("gpus: 4", "gpus: 3"))
        plan = fleet.with_name("plan.yaml")
        code, out, err = run(fleet, "--sweep", sweep, "--simulate", 20, "--json", "-o", plan)
        assert code == 0, err
        assert json.loads(out).get("gpus_needed") in ((3,) if sweep.startswith("gpus") else (None,))
        units = load_plan(plan, load_fleet(fleet, serving=False)).units
        assert [unit.stages for unit in units if len(unit.models) == 1 and len(unit.devices) == 2] == [2]

    @pytest.mark.slow
    def test_replicas_on_cpu_are_units_of_a_plan_file(self, tmp_path: Path) -> None:
        fleet = tmp_path / "fleet.yaml"
        path = ROOT / "configs/models/arithmetic"
        fleet.write_text(
            "cluster: { cores: 1 }\nkv_pool: { size: 64MiB }\nmodels:\n"
            f"  - {{ name: a, path: {path}, dtype: float32, engines: one, dispatch: rolling, replicas: 2, rate: 5,\n"
            "      workload: { prompt_tokens: 40, output_tokens: 20 }, slo: { ttft_ms: 1000, tpot_ms: 100 } }\n"
            f"  - {{ name: b, path: {path}, dtype: float32, engines: split }}\n"
        )
        plan = tmp_path / "plan.yaml"
        code, out, err = run(fleet, "-o", plan)
        assert code == 0, err
        units = load_plan(plan, load_fleet(fleet)).units
        assert [(unit.models[0].shape, unit.devices, [m.model for m in unit.models]) for unit in units] == [
            ("split", (0,), ["b"]),
            ("one", (1,), ["a"]),
            ("one", (2,), ["a"]),
        ]
        assert "rolling" in out

    def test_what_is_open_on_a_cpu_has_the_engines_of_that(self, tmp_path: Path) -> None:
        fleet = tmp_path / "fleet.yaml"
        path = ROOT / "configs/models/arithmetic"
        fleet.write_text(
            "cluster: { cores: 1 }\nkv_pool: { size: 64MiB }\nmodels:\n"
            f"  - {{ name: a, path: {path}, dtype: float32, engines: auto }}\n"
        )
        code, out, err = run(fleet, "--json")
        assert code == 0, err
        assert [unit["models"][0]["engines"] for unit in json.loads(out)["units"]] == ["one"]
        assert "`engines: auto` of a is one on a CPU" in err


class TestOpenModels:
    """Layouts of models that leave their engines open, in a plan in which every replica has GPUs of its own."""

    @pytest.fixture
    def declared(self, fleet: Path) -> Fleet:
        fleet.write_text(FLEET.format(engines=AUTO, more=OTHER))
        return load_fleet(fleet, serving=False)

    @staticmethod
    def alone(objectives: bool = True) -> ClusterPlan:
        first, other = (
            replace(wanted(rate).demand, name=name, slo_ttft=2.0 if objectives else None)
            for name, rate in (("open", 8.0), ("other", 2.0))
        )
        options = PlanOptions(rules=MemoryRules.served(0.92), mode="alone")
        memory = {L20.name: L20.memory_bytes}
        return plan_cluster([first, other], Cluster((Node(L20.name, 4),)), COSTS, memory, options)

    def test_what_cannot_be_deployed_so_stays_as_it_is(self, declared: Fleet) -> None:
        before = self.alone()
        private = declared.with_models([model.model_copy(update={"kv": "private"}) for model in declared.models])
        for how in (OpenLayout(), OpenLayout(rolling=True), OpenLayout(whole=True, split=True)):
            assert rearranged(before, how, private, AROUND, COSTS) == before
        demands = [replace(each, architecture=replace(each.architecture, sees_images=True)) for each in before.demands]
        seeing = replace(before, demands=type(before.demands)(demands))
        assert rearranged(seeing, OpenLayout(), declared, AROUND, COSTS) == seeing

    @pytest.mark.parametrize(("way", "policy", "stages"), [("rolling", "rolling", 1), ("stages", "free", 2)])
    def test_they_have_the_gpus_that_they_had(self, declared: Fleet, way: str, policy: str, stages: int) -> None:
        before = self.alone()
        made = as_way(way, before, declared, AROUND, COSTS)

        def devices(plan: ClusterPlan, name: str) -> set[int]:
            return {n for unit in plan.placement.units if unit.models[0].model == name for n in unit.devices}

        own = [unit for unit in made.placement.units if unit.models[0].model == "open"]
        assert len(devices(before, "open")) >= 2
        assert {(unit.policy, unit.stages) for unit in own} == {(policy, stages)}
        for name in ("open", "other"):
            assert devices(made, name) == devices(before, name)
        assert sum(unit.models[0].rate for unit in own) == pytest.approx(8.0)
        # The file leaves that open, too.
        others = [unit for unit in made.placement.units if unit.models[0].model == "other"]
        assert {(other.models[0].shape, other.policy) for other in others} == {
            ("one", "rolling" if way == "rolling" else "free")
        }
        assert [unit.name for unit in made.placement.units] == [f"unit{n}" for n in range(len(made.placement.units))]
        for unit, estimate in zip(made.placement.units, made.estimates, strict=True):
            assert [made.demands[m.member.model].name for m in estimate.models] == [m.model for m in unit.models]
        assert predict(
            made, COSTS, Trial(20.0), simulated_of(made.placement, declared, made.demands, AROUND)
        ).summary.overall.completed
        assert open_units(made, declared)["open"].policy == policy

    def test_where_it_is_not_possible_they_stay_as_they_are(self, declared: Fleet) -> None:
        before = self.alone(objectives=False)
        assert rearranged(before, OpenLayout(rolling=True), declared, AROUND, COSTS) == before
        assert as_way("rolling", before, declared, AROUND, COSTS).placement.units == (
            as_way("one engine", before, declared, AROUND, COSTS).placement.units
        )


class TestReplicas:
    """Layouts of models by what their engines serve, for fleets that fall short otherwise."""

    TIGHT = """\
cluster: { gpus: 8, gpu_type: l20, sm_sharing: mps }
models:
  - name: m
    architecture: ARCHITECTURE
    rate: RATE
    workload: { prompt_tokens: PROMPT, output_tokens: OUTPUT }
    slo: { ttft_ms: 15000, tpot_ms: 100 }
"""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("values", "way"),
        [
            ({"ARCHITECTURE": "llama-30b", "RATE": "7", "PROMPT": "280", "OUTPUT": "210"}, "replicas"),
            ({"ARCHITECTURE": "qwen2.5-32b", "RATE": "1.5", "PROMPT": "2600", "OUTPUT": "76"}, "split replicas"),
        ],
    )
    def test_a_plan_that_falls_short_is_laid_out_anew(self, tmp_path: Path, values: dict[str, str], way: str) -> None:
        file, text = tmp_path / "fleet.yaml", self.TIGHT
        for key, value in values.items():
            text = text.replace(key, value)
        file.write_text(text)
        code, out, err = run(file, "--json", "--no-robust", simulate=200)
        assert code == 0, err
        (first, *others) = json.loads(out)["candidates"]
        assert first["way"] == way
        assert first["score"] > 0.95 * float(values["RATE"])
        # The placement planner's own layouts serve a small part of that.
        assert all(each["score"] < 0.9 * first["score"] for each in others if each["way"] in ("one engine", "shared"))

    def test_only_fleets_that_fall_short_or_are_small_and_leave_it_open_have_these_ways(self, fleet: Path) -> None:
        more, split = (
            {"replicas", "split replicas", "stages", "rolling"},
            OTHER.replace("    rate: 2\n", f"    rate: 2\n    {SPLIT}\n"),
        )
        many = "".join(OTHER.replace("other", f"other{i}") for i in range(8))
        for engines, others, short, compete in (
            (SPLIT, split, False, False),
            (SPLIT, split, True, True),
            (AUTO, split, False, True),
            (SPLIT, OTHER, False, True),
            (AUTO, many, False, False),
            (AUTO, many, True, True),
        ):
            fleet.write_text(FLEET.format(engines=engines, more=others))
            ways = set(ways_of(load_fleet(fleet, serving=False), short, elastic=False))
            assert (ways >= more) == compete, (engines, short)
            assert ways - more == set(WAYS) - more - {"shares per lease", "shared", MIXED}

    def test_engines_of_each_phase_have_the_planner_s_shares(self, fleet: Path) -> None:
        fleet.write_text(FLEET.format(engines=AUTO, more=OTHER))
        declared, before = load_fleet(fleet, serving=False), TestOpenModels.alone()
        made = as_way("split replicas", before, declared, AROUND, COSTS)
        one = as_way("replicas", before, declared, AROUND, COSTS)
        assert all(unit.split for unit in made.placement.units)
        assert not any(unit.split for unit in one.placement.units)
        assert [unit.devices for unit in made.placement.units] == [unit.devices for unit in one.placement.units]
        for unit, estimate in zip(made.placement.units, made.estimates, strict=True):
            (placed,), (model,) = unit.models, estimate.models
            assert (placed.prefill_share, placed.decode_share) == (estimate.prefill_share, model.decode_share)
            assert unit.kv_bytes == estimate.pool_bytes
        assert predict(made, COSTS, Trial(20.0)).summary.overall.completed


class TestDivided:
    def test_models_that_find_no_devices_are_missing_and_asked_for(self, fleet: Path) -> None:
        fleet.write_text(FLEET.format(engines=ROLLING, more=OTHER))
        made = TestParts.plan([8.0, 2.0], (Node(L20.name, 2),))
        demands = [
            replace(demand, name=name, slo_ttft=2.0, slo_tpot=0.1)
            for demand, name in zip(made.demands, ("open", "other"), strict=True)
        ]
        divided = divide_gpus(load_fleet(fleet, serving=False), demands, made, AROUND, COSTS)
        whole = divided.joined(None, made.objective)
        assert whole.missing == {"other": "models that have devices to themselves leave none"}
        assert [unit.policy for unit in whole.placement.units] == ["rolling", "rolling"]
        assert whole.asked == pytest.approx(10.0)
