"""Rolling and pipelined models in plans: devices of their own, plan files, what the command prints."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from muxserve.cli import plan_phases
from muxserve.cli.app import app
from muxserve.config import load_fleet
from muxserve.planning.arrangements.base import ReplicaLayout, Wanted
from muxserve.planning.comparison import ArrangementFigures, Compared, Comparison, Spread
from muxserve.planning.dedicated_units import ArrangedFleet, DedicatedModel, Divided, FreeDevices, part_of
from muxserve.planning.plan_file import load_plan
from placement.cluster import Cluster, Node
from placement.demand import Demand
from placement.memory import MemoryRules
from placement.planner import PlanOptions, plan_cluster
from tests.planning.phases_support import COSTS, L20, WIDE, gpus

runner = CliRunner()
ROOT = Path(__file__).resolve().parents[2]

FLEET = """\
cluster: {{ gpus: 4, gpu_type: l20 }}
models:
  - name: open
    architecture: wide
    phases: {phases}
    rate: 8
    workload: {{ prompt_tokens: 200, output_tokens: 40 }}
    slo: {{ ttft_ms: 2000, tpot_ms: 100 }}
{more}"""
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


def run(*arguments: object) -> tuple[int, str, str]:
    result = runner.invoke(app, ["plan", *map(str, arguments), "--simulate", "0"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


class TestFreeDevices:
    def test_replicas_stay_within_machines_and_leave_large_holes(self) -> None:
        carving = FreeDevices(Cluster((Node("a", 4), Node("b", 8), Node("a", 2))))
        assert carving.take("a", ReplicaLayout("rolling", 2, 1, 1)) == ((12,), (13,))
        assert carving.take("a", ReplicaLayout("rolling", 1, 1, 4)) == ((0, 1, 2, 3),)
        assert carving.take("a", ReplicaLayout("rolling", 1, 1, 1)) is None
        cluster, numbers = carving.rest()
        assert cluster == Cluster((Node("b", 8),))
        assert numbers == list(range(4, 12))

    def test_a_long_pipeline_goes_over_machines_but_no_stage_does(self) -> None:
        carving = FreeDevices(Cluster((Node("a", 3), Node("a", 3), Node("a", 2))))
        (devices,) = carving.take("a", ReplicaLayout("pipelined", 1, 3, 2)) or ()
        assert [tuple(devices[n : n + 2]) for n in (0, 2, 4)] == [(0, 1), (3, 4), (6, 7)]

    def test_what_is_not_there_takes_nothing(self) -> None:
        carving = FreeDevices(Cluster((Node("a", 3),)))
        assert carving.take("a", ReplicaLayout("rolling", 2, 1, 2)) is None
        assert carving.take("a", ReplicaLayout("rolling", 3, 1, 1)) == ((0,), (1,), (2,))


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
    def test_a_model_that_leaves_it_open_is_compared_and_planned_as_chosen(self, fleet: Path) -> None:
        fleet.write_text(FLEET.format(phases="auto", more="").replace("gpus: 4", "gpus: 2"))
        plan = fleet.with_name("plan.yaml")
        code, out, err = run(fleet, "--json", "-o", plan)
        assert code == 0, err
        data = json.loads(out)
        (comparison,) = data["phases"]
        assert comparison["model"] == "open"
        assert comparison["devices"] == "2 L20-48GB"
        assert [each["phases"] for each in comparison["arrangements"]] == ["multiplexed", "pipelined", "rolling"]
        chosen = next(e for e in comparison["arrangements"] if e["phases"] == comparison["recommended"])
        units = [unit for unit in data["units"] if any(m["model"] == "open" for m in unit["models"])]
        assert {unit["phases"] for unit in units} == {comparison["recommended"]}
        if comparison["recommended"] != "multiplexed":
            assert len(units) == chosen["replicas"]
            assert {unit["stages"] for unit in units} == {chosen["stages"]}
        placement = load_plan(plan, load_fleet(fleet, serving=False))
        assert {unit.phases for unit in placement.units} == {comparison["recommended"]}

    @pytest.mark.slow
    @pytest.mark.parametrize("phases", ["rolling", "pipelined"])
    def test_a_model_that_says_so_has_devices_to_itself(self, fleet: Path, phases: str) -> None:
        fleet.write_text(FLEET.format(phases=phases, more=OTHER))
        plan = fleet.with_name("plan.yaml")
        code, out, err = run(fleet, "-o", plan)
        assert code == 0, err
        assert phases in out
        assert "chosen" not in out
        data = yaml.safe_load(plan.read_text())
        own = [unit for unit in data["units"] if unit.get("phases") == phases]
        assert [[m["model"] for m in unit["models"]] for unit in own] == [["open"]] * len(own)
        assert sum(m["rate"] for unit in own for m in unit["models"]) == pytest.approx(8.0)
        devices = [number for unit in data["units"] for number in unit["devices"]]
        assert len(devices) == len(set(devices))
        assert set(devices) <= set(range(4))
        shared = [m["model"] for unit in data["units"] if "phases" not in unit for m in unit["models"]]
        assert set(shared) == {"other"}
        load_plan(plan, load_fleet(fleet, serving=False))

    @pytest.mark.slow
    def test_a_comparison_that_was_asked_for_changes_nothing(self, fleet: Path) -> None:
        fleet.write_text(FLEET.format(phases="multiplexed", more=OTHER))
        page = fleet.with_name("page.html")
        code, out, err = run(fleet, "--compare-phases", "open", "--html", page)
        assert code == 0, err
        assert "Arrangements of open, 8 requests/s on" in page.read_text()
        assert "recommended: " in out
        for words in ("goodput", "bubbles", "balance", "open: 8 requests/s on"):
            assert words in out, words
        assert "other: " not in out
        plain = run(fleet)[1]
        assert out.startswith(plain[: plain.index("served, ")])

    def test_what_cannot_be_arranged_so_is_missing(self, fleet: Path) -> None:
        fleet.write_text(FLEET.format(phases="rolling", more="").replace("gpus: 4", "gpus: 1"))
        code, out, _ = run(fleet)
        assert code == 1
        assert "open is placed nowhere: prefill rolls over replicas, and there is one GPU" in out

    @pytest.mark.slow
    def test_what_the_file_says_gets_the_devices_that_it_takes(self, fleet: Path) -> None:
        # By its load the model would have one GPU of the two, which nothing can roll over.
        other = OTHER.replace("rate: 2", "rate: 30")
        text = FLEET.format(phases="rolling", more=other).replace("rate: 8", "rate: 1")
        fleet.write_text(text.replace("gpus: 4", "gpus: 3"))
        code, out, err = run(fleet, "--json")
        assert code == 0, err
        units = {unit["name"]: (unit["phases"], len(unit["devices"])) for unit in json.loads(out)["units"]}
        assert sorted(units.values()) == [("multiplexed", 1), ("rolling", 1), ("rolling", 1)]
        fleet.write_text(text.replace("gpus: 4", "gpus: 2"))
        code, out, _ = run(fleet)
        assert code == 1
        assert "other is placed nowhere: models that have devices to themselves leave none" in out
        assert "of 31.00 requests/s served" in out

    def test_sweeps_and_baselines_say_that_they_know_no_arrangements(self, fleet: Path) -> None:
        fleet.write_text(FLEET.format(phases="auto", more=""))
        code, out, err = run(fleet, "--mode", "temporal")
        assert code == 0
        assert "--mode temporal plans all models as multiplexed" in err
        assert "chosen" not in out
        assert "a sweep plans all models as multiplexed" in run(fleet, "--sweep", "gpus=1..2")[2]

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--compare-phases", "opne"], "--compare-phases: the fleet has no model 'opne'; did you mean \"open\"?"),
            (["--compare-phases", "all", "--sweep", "gpus=1..2"], "goes neither with --sweep nor with --mode"),
        ],
    )
    def test_mistakes(self, fleet: Path, arguments: list[str], words: str) -> None:
        fleet.write_text(FLEET.format(phases="multiplexed", more=""))
        code, _, err = run(fleet, *arguments)
        assert code == 2
        assert words in err

    @pytest.mark.slow
    def test_replicas_on_cpu_are_units_of_a_plan_file(self, tmp_path: Path) -> None:
        fleet = tmp_path / "fleet.yaml"
        path = ROOT / "configs/models/arithmetic"
        fleet.write_text(
            "cluster: { cores: 1 }\nkv_pool: { size: 64MiB }\nmodels:\n"
            f"  - {{ name: a, path: {path}, dtype: float32, phases: rolling, replicas: 2, rate: 5,\n"
            "      workload: { prompt_tokens: 40, output_tokens: 20 }, slo: { ttft_ms: 1000, tpot_ms: 100 } }\n"
            f"  - {{ name: b, path: {path}, dtype: float32 }}\n"
        )
        plan = tmp_path / "plan.yaml"
        code, out, err = run(fleet, "-o", plan)
        assert code == 0, err
        units = load_plan(plan, load_fleet(fleet)).units
        assert [(unit.phases, unit.devices, [m.model for m in unit.models]) for unit in units] == [
            ("multiplexed", (0,), ["b"]),
            ("rolling", (1,), ["a"]),
            ("rolling", (2,), ["a"]),
        ]
        assert "rolling" in out


EVEN = Spread(0.1, 0.1, 0.1, 0.1)


def figures_of(
    layout: ReplicaLayout,
    attainment: float = 1.0,
    ttft: Spread = EVEN,
    tpot: Spread = EVEN,
    balance: float = 1.0,
) -> ArrangementFigures:
    return ArrangementFigures(
        layout,
        devices=8,
        goodput=6.0,
        goodput_smooth=6.0,
        attainment=attainment,
        attainment_smooth=attainment,
        ttft=ttft,
        ttft_with_wait=ttft,
        tpot=tpot,
        tpot_after_wait=tpot,
        served=5.0,
        running=20.0,
        preemptions=0,
        balance=balance,
        bubbles=(),
        link_bytes=2e6,
        network_bytes=0.0,
        device_hours=0.4,
        tokens_per_request=490,
    )


class TestTables:
    @staticmethod
    def shown(width: int, monkeypatch: pytest.MonkeyPatch) -> str:
        console = Console(file=io.StringIO(), width=width)
        monkeypatch.setattr(plan_phases, "console", console)
        layout = ReplicaLayout("multiplexed", 4, 1, 2)
        figures = figures_of(
            layout, attainment=0.5, tpot=Spread(0.1, 0.1, 0.2, 2.5), ttft=Spread(0.1, 0.1, 0.2, 2.5), balance=1.25
        )
        compared = (Compared("multiplexed", figures), Compared("rolling", None, "no objectives"))
        plan_phases.show(
            Comparison(
                "chat",
                devices="8 L20-48GB",
                rate=5.0,
                arrangements=compared,
                recommended="multiplexed",
                reason="it is",
                notes=("a note",),
            ),
            True,
        )
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    def test_a_wide_screen_has_a_row_for_each_arrangement(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lines = self.shown(240, monkeypatch).splitlines()
        assert lines[2].split()[:3] == ["arrangement", "layout", "goodput"]
        assert lines[3].startswith("multiplexed  4 replicas, tensor parallel over 2      6/s     50%  100 ms / 200 ms")
        assert lines[4].split() == ["rolling", "not", "possible"]
        assert lines[5:] == [
            "rolling is not possible: no objectives",
            "- a note",
            "chosen: multiplexed; it is",
        ]

    def test_a_narrow_one_has_a_column(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = self.shown(80, monkeypatch)
        assert "…" not in text
        rows = {line.split("  ")[0]: line.split()[-1] for line in text.splitlines()[2:]}
        assert rows["goodput"] == "6/s"
        assert rows["balance"] == "1.25"


class TestCrowding:
    @pytest.mark.parametrize(("phases", "crowds"), [("auto", True), ("rolling", False)])
    def test_only_those_that_chose_give_way(self, fleet: Path, phases: str, crowds: bool) -> None:
        fleet.write_text(FLEET.format(phases=phases, more=OTHER))
        declared = load_fleet(fleet, serving=False)
        made = TestParts.plan([8.0, 2.0], (Node(L20.name, 2),))
        first, other = (
            replace(demand, name=name) for demand, name in zip(made.demands, ("open", "other"), strict=True)
        )
        place = gpus(2).place(Wanted(first), ReplicaLayout("rolling", 2, 1, 1))
        figures = figures_of(place.layout)
        found = ArrangedFleet([DedicatedModel(first, place, figures, ((0,), (1,)))], [other])
        divided = Divided(made.placement.cluster, found, Cluster(()), [])
        assert divided.crowds_out(declared, made, None) == crowds
        whole = divided.joined(None, made.objective)
        assert whole.missing == {"other": "models that have devices to themselves leave none"}
        assert [unit.phases for unit in whole.placement.units] == ["rolling", "rolling"]
        assert whole.asked == pytest.approx(10.0)
