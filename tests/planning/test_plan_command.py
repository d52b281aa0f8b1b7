"""`muxserve plan`, plan files, sweeps and what they say about mistakes."""

import html
import json
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.config import FleetError, load_fleet
from muxserve.planning import planner
from muxserve.planning.demand.demands import ClusterError, cluster_of, demands_of, equal_nodes
from muxserve.planning.demand.known_models import BUILT_IN, planned_architecture
from muxserve.planning.planner import UsageError
from muxserve.planning.report.document import parse_sweep
from muxserve.planning.report.sureness import gpus_are
from muxserve.planning.specs.plan_file import load_plan, plan_text, save_plan
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement

runner = CliRunner()
ROOT = Path(__file__).resolve().parents[2]

FLEET = """\
cluster: { gpus: 4, gpu_type: a100 }
models:
  - name: small
    architecture: llama-7b
    rate: 4
    dtype: float16
    workload: { prompt_tokens: 161, output_tokens: 338 }
    slo: { ttft_ms: 500, tpot_ms: 60 }
  - name: large
    architecture: config.json
    rate: 0.5
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    config = {"architectures": ["LlamaForCausalLM"], **BUILT_IN["llama-2-13b"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    return file


def run(*arguments: object) -> tuple[int, str, str]:
    result = runner.invoke(app, ["plan", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


class TestCommand:
    @pytest.mark.slow
    def test_a_table_says_who_is_where_what_it_delivers_and_why(self, fleet: Path) -> None:
        code, out, err = run(fleet)
        assert code == 0, err
        assert "A100-80GB" in out
        for words in ("small", "large", "headroom", "4.50 of 4.50 requests/s served", "simulated", "objective slo"):
            assert words in out, words

    @pytest.mark.slow
    def test_where_memory_decides_it_says_what_sleeping_costs(self, tmp_path: Path) -> None:
        models = [f"  - {{name: m{n}, path: {ROOT / 'configs/models/atlas'}, dtype: float32}}" for n in range(6)]
        file = tmp_path / "fleet.yaml"
        file.write_text("\n".join(["memory: {limit: 1600MiB}", "kv_pool: {size: 64MiB}", "models:", *models]))
        code, out, err = run(file, "--simulate", 2)
        assert code == 0, err
        assert "all awake" in out
        assert "with memory:" in out
        told = json.loads(run(file, "--simulate", 10, "--json")[1])["residency"]
        awake, resident = told["all_awake"], told["with_residency"]
        assert awake["bytes"] > 1600 << 20 > resident["bytes"]
        assert awake["requests"] == resident["requests"] > 100
        assert resident["wakes"] >= resident["sleeps"] > 0
        assert resident["waited"] >= resident["wakes"]
        # Without a limit there is nothing to say.
        file.write_text("\n".join(["kv_pool: {size: 64MiB}", "models:", *models]))
        assert "residency" not in json.loads(run(file, "--simulate", 2, "--json")[1])

    def test_json_is_complete_and_agrees_with_itself(self, fleet: Path) -> None:
        code, out, _ = run(fleet, "--json")
        assert code == 0
        data = json.loads(out)
        assert data["muxserve_plan"] == 3
        assert data["totals"]["meets"] is True
        assert data["totals"]["devices_used"] == sum(len(unit["devices"]) for unit in data["units"])
        served = sum(model["throughput"] for unit in data["units"] for model in unit["models"])
        assert served == pytest.approx(data["totals"]["throughput"])
        small = next(m for unit in data["units"] for m in unit["models"] if m["model"] == "small")
        assert small["slo"] == {"ttft": 0.5, "tpot": 0.06}
        assert small["simulated"]["throughput"] == pytest.approx(4.0, rel=0.2)
        assert data["simulated"]["requests"] > 100
        assert {m["bottleneck"] for unit in data["units"] for m in unit["models"]} == {"memory bandwidth"}

    def test_a_sweep_answers_how_many_gpus(self, fleet: Path) -> None:
        code, out, _ = run(fleet, "--sweep", "gpus=1..4", "--simulate", 0, "--json")
        assert code == 0
        data = json.loads(out)
        assert [p["gpus"] for p in data["sweep"]] == [1, 2, 3, 4]
        meets = [p["gpus"] for p in data["sweep"] if p["meets"]]
        assert data["gpus_needed"] == min(meets)
        assert sum(node["gpus"] for node in data["cluster"]) == min(meets)
        _, table, _ = run(fleet, "--sweep", "gpus=1..4", "--simulate", 0)
        assert f"{gpus_are(min(meets))} enough" in table

    @pytest.mark.slow
    def test_a_size_is_enough_only_if_its_simulation_says_so(self, tmp_path: Path) -> None:
        model = "workload: { prompt_tokens: 200, output_tokens: 150 }, slo: { ttft_ms: 300, tpot_ms: 30 }"
        file, page = tmp_path / "close.yaml", tmp_path / "close.html"
        file.write_text(
            "cluster: { gpus: 3, gpu_type: a100 }\nmodels:\n"
            f"  - {{ name: a, architecture: llama-7b, rate: 0.43, {model} }}\n"
            f"  - {{ name: b, architecture: llama-13b, rate: 0.21, {model} }}\n"
        )
        sweep = ("--sweep", "gpus=1..3", "--simulate", 60, "--seconds", 60)
        code, out, _ = run(file, *sweep, "--json", "--html", page)
        assert code == 0
        data = json.loads(out)
        one, two, three = data["sweep"]
        assert one["meets"], "the estimate is to be too hopeful here"
        assert one["falls_short"]
        assert (two["falls_short"], three["simulated_attainment"]) == ([], None)
        assert data["gpus_needed"] == 2
        assert len(data["warnings"]) == 1
        assert data["warnings"][0].startswith("1 GPU would be enough by the estimate, but in its simulation")
        assert data["warnings"][0] in html.unescape(page.read_text())
        _, table, _ = run(file, *sweep)
        assert "2 GPUs are enough" in table
        assert "1 GPU would be enough by the estimate" in table

    def test_what_was_not_simulated_is_called_an_estimate(self, fleet: Path) -> None:
        _, out, _ = run(fleet, "--simulate", 0, "--json")
        (warning,) = json.loads(out)["warnings"]
        assert "which was not simulated" in warning
        _, table, _ = run(fleet, "--sweep", "gpus=1..4", "--simulate", 0)
        assert "enough by the estimate" in table

    def test_gpus_of_the_command_line_replace_those_of_the_file(self, fleet: Path) -> None:
        _, out, _ = run(fleet, "--nodes", "1x2:h100,2x1:L40S", "--json", "--simulate", 0)
        assert json.loads(out)["cluster"] == [
            {"device": "H100-80GB", "gpus": 2},
            {"device": "L40S-48GB", "gpus": 1},
            {"device": "L40S-48GB", "gpus": 1},
        ]

    def test_the_page_is_self_contained(self, fleet: Path, tmp_path: Path) -> None:
        page = tmp_path / "out.html"
        code, _, err = run(fleet, "--html", page, "--simulate", 20, "--sweep", "gpus=2..4:2")
        assert code == 0
        assert "page written" in err
        text = page.read_text()
        assert "<script src" not in text
        for words in (
            "How many GPUs?",
            "memory per device",
            "Throughput per model",
            "unit0",
            "sim. TTFT p99",
            "sim. SLO",
            "waits for",
            "memory bandwidth",
            "no GPU of yours was measured",
        ):
            assert words in text
        # What came of it comes before everything else.
        assert text.index("GPUs are enough: ") < text.index("<h2>")
        assert "<footer><code>muxserve " in text

    def test_the_page_says_what_is_not_met(self, fleet: Path, tmp_path: Path) -> None:
        fleet.write_text(FLEET.replace("llama-7b", "llama-65b"))
        page = tmp_path / "out.html"
        assert run(fleet, "--gpus", 1, "--simulate", 0, "--html", page)[0] == 1
        text = page.read_text()
        assert 'class="verdict bad">Rates or objectives are not met' in text
        assert 'class="verdict bad">small is placed nowhere: needs' in text

    def test_a_model_without_a_place_is_exit_code_1_with_the_reason(self, fleet: Path) -> None:
        fleet.write_text(FLEET.replace("llama-7b", "llama-65b"))
        code, out, _ = run(fleet, "--gpus", 1, "--simulate", 0)
        assert code == 1
        assert "small is placed nowhere: needs" in out

    @pytest.mark.parametrize(
        ("keys", "why"),
        [
            ("", "may be used; a model is served by one machine"),
            (
                ", engines: one, stages: 4",
                "machines (a replica is on one) cannot be divided into 4 or more stages",
            ),
        ],
    )
    def test_no_unit_is_larger_than_a_machine(self, fleet: Path, keys: str, why: str) -> None:
        """LLaMA 65B on machines of one GPU each: `deploy` would refuse such a plan."""
        models = f"models: [{{name: m, architecture: llama-65b, rate: 0.01{keys}}}]"
        fleet.write_text(f"cluster: {{ gpus: 4, gpu_type: a100, gpus_per_node: 1 }}\n{models}")
        code, out, _ = run(fleet, "--simulate", 0, "--json")
        assert code == 1
        assert json.loads(out)["missing"]["m"].endswith(why)

    def test_the_costs_of_each_model_are_named(self, fleet: Path) -> None:
        code, out, _ = run(fleet, "--simulate", 0, "--gpu-type", "l20", "--json")
        data = json.loads(out)
        why = "there are no kernel tables of L20-48GB"
        assert code == 0
        assert data["costs"] == f"roofline, since {why}"
        placed = {"device": "L20-48GB", "kind": "roofline", "why": why}
        assert {each["model"] for each in data["cost_sources"]} == {"small", "large"}
        assert all(placed.items() <= each.items() for each in data["cost_sources"])

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["--objective", "fastest"], "--objective: must be auto, throughput, slo, gpus, not 'fastest'"),
            (["--scale", "inf"], "Invalid value for '--scale': Input should be less than or equal to 1000000"),
            (["--simulate", "inf"], "Invalid value for '--simulate': Input should be less than or equal to 1000000"),
            (["--mode", "none"], "--mode: must be one of muxserve, spatial, temporal, not"),
            (["--gpu-type", "b100x"], "--gpu-type: unknown device 'b100x'"),
            (["--nodes", "4by8"], "--nodes: '4by8' is not COUNTxGPUS:TYPE such as 4x8:A100-80GB"),
            (["--nodes", "1x2:a100", "--gpus", "2"], "--gpus and --nodes exclude each other"),
            (["--sweep", "gpus=8"], "is not a sweep such as gpus=8..64"),
            (["--sweep", "gpus=8..4"], "upwards, not from 8 to 4"),
            (["--costs", "nowhere.json"], "nowhere.json"),
            (["--html", "/nowhere/at/all.html"], "/nowhere/at/all.html: cannot be written"),
            (
                ["-o", "/nowhere/at/all.yaml"],
                "/nowhere/at/all.yaml: cannot be written: there is no directory /nowhere/at",
            ),
        ],
    )
    def test_mistakes_are_told_in_a_sentence(self, fleet: Path, arguments: list[str], expected: str) -> None:
        code, out, err = run(fleet, "--simulate", 0, *arguments)
        assert code == 2
        assert expected in err
        # Nothing was planned before.
        assert not out

    @pytest.mark.parametrize(("file", "bytes_per_second"), [("", 1.25e9), ("25Gb/s", 3.125e9), ("3GB/s", 3e9)])
    def test_the_network_is_the_one_of_the_file(
        self, file: str, bytes_per_second: float, fleet: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        networks: list[float] = []

        def divided(*given: object) -> NoReturn:
            networks.append(given[3].network)  # type: ignore[attr-defined]
            raise UsageError("seen")

        monkeypatch.setattr(planner, "divide_gpus", divided)
        network = f", network: {file}" if file else ""
        fleet.write_text(
            FLEET.replace("gpus: 4", f"gpus: 4{network}").replace("rate: 4", "rate: 4\n    engines: one\n    stages: 4")
        )
        code, _, err = run(fleet, "--seconds", 0)
        assert (code, networks) == (2, [bytes_per_second]), err

    def test_a_fleet_without_gpus_is_planned_for_this_machine(self) -> None:
        root = Path(__file__).resolve().parents[2]
        code, out, err = run(root / "configs/quickstart.yaml", "--json", "--simulate", 5)
        assert code == 0, err
        data = json.loads(out)
        assert data["cluster"] == [{"device": "CPU", "gpus": 1}]
        assert {m["model"] for m in data["units"][0]["models"]} == {"arithmetic", "atlas", "frontdesk"}
        assert data["units"][0]["memory"]["pool"] == 256 << 20


class TestFleets:
    @pytest.mark.parametrize(
        ("old", "new", "expected"),
        [
            ("architecture: llama-7b", "architecture: lama-7b", 'a known model; did you mean "llama-7b"?'),
            ("gpu_type: a100", "gpu_type: a1000000", ":1: cluster.gpu_type: unknown device 'a1000000'"),
            ("prompt_tokens: 161", "prompt_tokens: 0", ":7: models[0].workload.prompt_tokens: must be at least 1"),
            ("gpus: 4", "gpu: 4", 'cluster.gpu: unknown key; did you mean "gpus"?'),
            (", gpu_type: a100", "", ":1: cluster.gpus: needs `gpu_type`"),
            ("gpus: 4, gpu_type: a100", "gpu_ids: [0, 1]", ":1: cluster.gpu_ids: needs `gpu_type`"),
            ("gpus: 4", "nodes: [{gpus: 1, gpu_type: a100}], gpus: 4", "either `gpus` (equal machines) or `nodes`"),
        ],
    )
    def test_mistakes_have_file_line_and_key(self, fleet: Path, old: str, new: str, expected: str) -> None:
        fleet.write_text(FLEET.replace(old, new))
        code, _, err = run(fleet, "--simulate", 0)
        assert code == 2
        assert expected in err
        assert str(fleet) in err

    def test_an_architecture_is_enough_to_plan_but_not_to_serve(self, fleet: Path) -> None:
        assert len(load_fleet(fleet, serving=False).models) == 2
        with pytest.raises(FleetError, match=r"models\[0\].architecture: is enough to plan, not to serve"):
            load_fleet(fleet)

    def test_demands_take_everything_from_the_file(self, fleet: Path) -> None:
        small, large = demands_of(load_fleet(fleet, serving=False), fleet.parent, gpus=[("A100", 80 << 30)])
        assert (small.rate, small.prompt_tokens, small.output_tokens, small.dtype) == (4, 161, 338, "float16")
        assert (small.slo_ttft, small.slo_tpot, small.max_num_seqs) == (0.5, 0.06, 256)
        assert not small.own_batch
        assert (large.architecture.layers, large.prompt_tokens, large.slo_ttft) == (40, 512, None)

    def test_machines_of_the_file(self, fleet: Path) -> None:
        nodes = "nodes: [{gpus: 2, gpu_type: h100, count: 2}, {gpus: 1, gpu_type: l20}]"
        fleet.write_text(FLEET.replace("gpus: 4, gpu_type: a100", nodes))
        cluster = cluster_of(load_fleet(fleet, serving=False))
        assert cluster == Cluster((Node("H100-80GB", 2), Node("H100-80GB", 2), Node("L20-48GB", 1)))

    def test_gpus_by_their_numbers_are_gpus(self, fleet: Path) -> None:
        fleet.write_text(FLEET.replace("gpus: 4", "gpu_ids: [2, 5]"))
        declared = load_fleet(fleet, serving=False)
        assert cluster_of(declared) == Cluster((Node("A100-80GB", 2),))
        assert cluster_of(declared, gpus=3) == Cluster((Node("A100-80GB", 3),))

    def test_the_type_may_stand_on_the_command_line_alone(self, fleet: Path) -> None:
        fleet.write_text(FLEET.replace(", gpu_type: a100", ""))
        declared = load_fleet(fleet, serving=False)
        assert cluster_of(declared, gpu_type="h100") == Cluster((Node("H100-80GB", 4),))

    def test_the_last_machine_has_what_is_left(self) -> None:
        assert [node.count for node in equal_nodes(19, "X", 8).nodes] == [8, 8, 3]

    def test_gpus_need_a_type(self, fleet: Path) -> None:
        fleet.write_text(FLEET.replace("cluster: { gpus: 4, gpu_type: a100 }\n", ""))
        plain = load_fleet(fleet, serving=False)
        assert cluster_of(plain) is None
        with pytest.raises(ClusterError, match="give --gpu-type"):
            cluster_of(plain, gpus=4)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"gpus": 10**9}, "--gpus: a plan has at most 16,384 GPUs, not 1,000,000,000"),
            (
                {"nodes": "999999999x8:A100-80GB"},
                "a plan has at most 16,384 GPUs, and '999999999x8:A100-80GB' has more",
            ),
            ({"nodes": "9" * 5000 + "x8:A100-80GB"}, "is not COUNTxGPUS:TYPE"),
        ],
    )
    def test_more_gpus_than_a_plan_has(self, fleet: Path, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ClusterError, match=re.escape(words)):
            cluster_of(load_fleet(fleet, serving=False), **options)

    def test_more_machines_than_a_plan_has(self, fleet: Path) -> None:
        fleet.write_text(FLEET.replace("gpus: 4, gpu_type: a100", "nodes: [{gpus: 8, gpu_type: h100, count: 10000}]"))
        with pytest.raises(FleetError, match="have 80,000 GPUs together, and a plan has at most 16,384"):
            cluster_of(load_fleet(fleet, serving=False))

    @pytest.mark.parametrize("name", sorted(BUILT_IN))
    def test_built_in_models_are_as_large_as_their_names_say(self, name: str) -> None:
        billions = float(name.rsplit("-", 1)[1].removesuffix("b"))
        assert planned_architecture(name, Path(".")).parameters / 1e9 == pytest.approx(billions, rel=0.12)


PLACEMENT = Placement(
    Cluster((Node("A100-80GB", 2), Node("L20-48GB", 1))),
    (
        PlacedUnit("unit0", "A100-80GB", (0, 1), (PlacedModel("small", 2.5, 1.0, 0.3),), 1 << 30),
        PlacedUnit("unit1", "L20-48GB", (2,), (PlacedModel("large", 0.5, 0.6, 0.4),), 5 << 30),
    ),
    ("unit0: meets its rates", "a note: with a colon"),
)


class TestPlanFiles:
    def test_round_trip(self, tmp_path: Path, fleet: Path) -> None:
        file = tmp_path / "plan.yaml"
        save_plan(PLACEMENT, file, "about it")
        assert load_plan(file) == PLACEMENT
        assert load_plan(file, load_fleet(fleet, serving=False)) == PLACEMENT

    def test_what_the_command_writes_is_a_plan_of_the_fleet(self, fleet: Path, tmp_path: Path) -> None:
        file = tmp_path / "plan.yaml"
        assert run(fleet, "-o", file, "--simulate", 0)[0] == 0
        placement = load_plan(file, load_fleet(fleet, serving=False))
        assert sum(m.rate for unit in placement.units for m in unit.models) == pytest.approx(4.5)

    @pytest.mark.parametrize(
        ("old", "new", "expected"),
        [
            ("plan_version: 1", "plan_version: 9", ":1: plan_version: 9 is not a version"),
            ("plan_version: 1", "", "has no plan_version"),
            ("devices: [0, 1]", "devices: [0, 7]", "units[0].devices: there is no device 7; the nodes have 3"),
            ("devices: [2]", "devices: [1]", "units[1].devices: device 1 is a A100-80GB, not a L20-48GB"),
            ("devices: [0, 1]", "devices: [0, 0]", "device 0 belongs to unit0 already"),
            ("name: unit1", "name: unit0", "units[1].name: 'unit0' is already the name of another unit"),
            ("decode_share: 0.3", "decode_share: 3", "units[0].models[0].decode_share: must be at most 1, not 3"),
            (
                "kv_bytes: 1073741824",
                "kv_bytes: 1073741824\n  phases: pipelined",
                "units[0].phases: is no longer a key; make the plan anew",
            ),
            ("kv_bytes: 1073741824", "kv_byte: 1073741824", 'units[0].kv_byte: unknown key; did you mean "kv_bytes"?'),
            ("model: small", "model: smal", "units[0].models[0].model: the fleet has no model 'smal'"),
            ("model: small", "model: large", "the plan has no place for small"),
        ],
    )
    def test_mistakes_have_file_line_and_key(
        self, tmp_path: Path, fleet: Path, old: str, new: str, expected: str
    ) -> None:
        file = tmp_path / "plan.yaml"
        text = plan_text(PLACEMENT)
        assert old in text
        file.write_text(text.replace(old, new, 1))
        with pytest.raises(FleetError) as caught:
            load_plan(file, load_fleet(fleet, serving=False))
        assert expected in str(caught.value)
        assert str(file) in str(caught.value)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(FleetError, match="there is no such file"):
            load_plan(tmp_path / "none.yaml")


class TestSweeps:
    def test_steps(self) -> None:
        assert parse_sweep("gpus=8..64:8") == [8, 16, 24, 32, 40, 48, 56, 64]
        assert parse_sweep("gpus=1..5") == [1, 2, 3, 4, 5]
        assert parse_sweep("gpus=8..30:16") == [8, 24, 30]
        assert len(parse_sweep("gpus=8..1024")) <= 16

    @pytest.mark.parametrize("text", ["", "8..64", "gpus=a..b", "gpus=0..4", "gpus=1..4:0", "gpus=1..1000:1"])
    def test_nonsense(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"sweep|step|too many"):
            parse_sweep(text)
