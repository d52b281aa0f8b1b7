"""The probes of a GPU machine over stand-ins for their children and for MPS: verdicts, fallbacks, time limits."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from muxserve.gpu import mps
from muxserve.gpu.findings import GREEN, PERCENTAGES, ProbeFinding
from muxserve.gpu.nvml import Gpu
from muxserve.gpu.sm import PERCENTAGE
from muxserve.probes import lab
from muxserve.probes.lab import PROBES, Lab, run
from muxserve.probes.shape import AttentionShape
from tests.cluster.conftest import alive

HERE = Path(__file__).parent
GOOD = {
    "compute": '{"name": "NVIDIA H200", "capability": [9, 0], "sms": 132, "torch": "2.13.0", "cuda": "13.0"}',
    "export": "{}",
    "map-exported": '{"same": true, "read_only": true}',
    "keep": 'stay {"handle": "0:1:ab"}',
    "map": '{"same": true}',
    "manage": 'stay {"socket": "/x"}',
    "write-page": "{}",
    "read-page": '{"same": true}',
    "attention": '{"most": 0.01, "mean": 0.0005, "cases": 12}',
    "graph": '{"most": 0.01, "mean": 0.0005, "cases": 6}',
    "reduce": '{"same": true}',
    "spin": "stay {}",
    "green": '{"sms": 64, "total": 132, "switch_us": 9.5, "slowdown": 1.02}',
    "beside": '{"sms": 92, "rate": 500.0, "alone": 600.0, "steps": 1500, "different": 0}',
    "shapes": '{"sms": 92, "errors": [[0.01, 0.004], [0.02, 0.005]]}',
}


DIFFERENT = GOOD["beside"].replace('"different": 0', '"different": 7')


class Machine:
    """What children say, and the lab that hears it."""

    def __init__(self, directory: Path, gpus: int = 2) -> None:
        self.directory = directory
        control = directory / mps.CONTROL
        script = HERE.parent / "gpu_control" / "fake_mps_control.py"
        control.write_text(f'#!/bin/sh\nexec {sys.executable} -S {shlex.quote(str(script))} "$@"\n')
        control.chmod(0o755)
        found = [Gpu(n, f"GPU-{n}", "NVIDIA H200") for n in range(gpus)]
        command = (sys.executable, "-S", str(HERE / "roles.py"))
        self.lab = Lab(found, directory, str(control), command)
        for role in GOOD:
            self.say(role, GOOD[role])
        half, whole = GOOD["compute"].replace("132", "66"), GOOD["compute"]
        self.say("compute", whole, half, whole)

    def say(self, role: str, *lines: str) -> None:
        (self.directory / role).write_text("\n".join(lines))

    def findings(self) -> dict[str, ProbeFinding]:
        return {each.probe: each for each in run(self.lab, PROBES)}

    def journal(self, role: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.directory / "journal").read_text().splitlines() if line[0] == "{"]
        return [line for line in lines if line["role"] == role]


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Machine:
    directory = tmp_path_factory.mktemp("m")
    monkeypatch.setenv("ROLES", str(directory))
    monkeypatch.setenv("FAKE_MPS", str(directory))
    monkeypatch.setattr(mps, "binary", lambda: str(directory / mps.CONTROL))
    return Machine(directory)


def test_a_machine_on_which_everything_works(machine: Machine) -> None:
    found = machine.findings()
    assert {each.verdict for each in found.values()} == {"ok"}
    assert not any(each.fallbacks for each in found.values())
    assert "a client with 50% sees 66 of 132 SMs" in found["SM shares under MPS"].detail
    assert "that has ended, for reading only" in found["weights of another process"].detail
    (kept,), (mapped,) = machine.journal("export"), machine.journal("map-exported")
    assert "6000 steps beside others are those alone, 1.20 times as slow" in found[PERCENTAGES].detail
    assert "side by side they take 1.02 times as long" in found[GREEN].detail
    green, percent = machine.journal("beside")[:3], machine.journal("beside")[3:]
    for processes, shares in (
        (green, {("prefill", ""), ("decode", "")}),
        (percent, {("prefill", "70"), ("decode", "10")}),
    ):
        assert {(each["arguments"][2], each.get(PERCENTAGE, "")) for each in processes} == shares
        pages = sorted(int(each["arguments"][1]) for each in processes)
        assert pages == [4096 * place for place in range(len(processes))], "each has pages of its own"
    # Weights are loaded outside MPS, and mapped by a client.
    assert kept["CUDA_MPS_PIPE_DIRECTORY"] != mapped["CUDA_MPS_PIPE_DIRECTORY"] == str(machine.directory / "mps/pipe")
    assert mapped["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert [each["CUDA_VISIBLE_DEVICES"] for each in machine.journal("reduce")] == ["GPU-0,GPU-1"] * 4
    journal = (machine.directory / "journal").read_text()
    for role in GOOD.keys() - {"shapes"}:
        assert not any(alive(each["pid"]) for each in machine.journal(role))
    assert "quit -t" in journal


@pytest.mark.parametrize(
    ("probe", "role", "said", "detail", "fallbacks"),
    [
        ("CUDA", "compute", ['{"error": "RuntimeError: no kernel image"}'], "no kernel image", ("refuse",)),
        ("CUDA", "compute", [GOOD["compute"].replace("[9, 0]", "[7, 5]")], "needs 8.0 or later", ("refuse",)),
        ("SM shares under MPS", "compute", [GOOD["compute"]], "sees 132 of 132 SMs", ("mps_off",)),
        ("weights of another process", "map-exported", ["die"], "Segmentation fault", ("ipc_legacy",)),
        ("weights of another process", "export", ['{"error": "x"}', "{}"], "x; so: a client", ("ipc_legacy",)),
        ("pool of another process", "read-page", ['{"same": false}', '{"same": true}'], "vmm", ("ipc_legacy",)),
        ("attention on one-head pages", "attention", ['{"most": 3.5, "mean": 0.4, "cases": 12}'], "3.5", ("refuse",)),
        ("attention on one-head pages", "attention", ['{"most": NaN, "mean": 0, "cases": 2}'], "nan", ("refuse",)),
        ("attention in a CUDA graph", "graph", ["die"], "ended with status 139", ("piecewise",)),
        ("communicators side by side", "reduce", ["unless NCCL_NVLS_ENABLE"], "status 139", ("nvls_off",)),
        ("communicators side by side", "reduce", ["die"], "status 139", ("fcfs",)),
        (GREEN, "green", ['{"error": "GreenContextError: not current"}'], "not current", ("no_green_contexts",)),
        (GREEN, "beside", [DIFFERENT], "7 of 1500 prefill steps on 92 SMs came out otherwise", ("no_green_contexts",)),
        (PERCENTAGES, "beside", [GOOD["beside"], DIFFERENT], "steps on 92 SMs came out otherwise", ("no_percentages",)),
        (PERCENTAGES, "beside", ['{"error": "ValueError: a step is wrong"}'], "step is wrong", ("no_percentages",)),
        (PERCENTAGES, "beside", ["die"], "status 139", ("no_percentages",)),
    ],
)
def test_what_does_not_work_has_a_way_out(
    machine: Machine, probe: str, role: str, said: list[str], detail: str, fallbacks: tuple[str, ...]
) -> None:
    machine.say(role, *said)
    (chosen,) = [each for each in PROBES if each.name == probe]
    (found,) = run(machine.lab, [chosen])
    assert (found.verdict, found.fallbacks) == ("failed", fallbacks)
    assert detail in found.detail


@pytest.mark.parametrize(
    ("exported", "mapped", "fallbacks"),
    [
        (["die"], ["die", '{"same": true}'], ("keepers_in_mps",)),
        (["die", '{"same": true, "read_only": false}'], ["die"], ("mps_off",)),
        (["die"], ["die", "die", '{"same": true}'], ("mps_off", "ipc_legacy")),
        (['{"same": false, "read_only": true}'], ['{"same": false}'], ("refuse",)),
    ],
)
def test_weights_are_shared_in_the_first_way_that_works(
    machine: Machine, exported: list[str], mapped: list[str], fallbacks: tuple[str, ...]
) -> None:
    machine.say("map-exported", *exported)
    machine.say("map", *mapped)
    (chosen,) = [each for each in PROBES if each.name == "weights of another process"]
    (found,) = run(machine.lab, [chosen])
    assert (found.verdict, found.fallbacks) == ("failed", fallbacks)


def test_what_hangs_is_ended_with_all_that_it_started(machine: Machine) -> None:
    machine.lab.limit = 1.0
    machine.say("attention", "hang")
    (chosen,) = [each for each in PROBES if each.name == "attention on one-head pages"]
    (found,) = run(machine.lab, [chosen])
    assert (found.fallbacks, found.detail) == (("refuse",), "attention did not end in time")
    assert not alive(machine.journal("attention")[0]["pid"])


def test_the_way_out_of_one_probe_holds_for_the_next(machine: Machine) -> None:
    machine.say("compute", GOOD["compute"])  # shares are not seen
    found = machine.findings()
    assert found["SM shares under MPS"].fallbacks == ("mps_off",)
    assert found["a client killed in a kernel"].verdict == found["green contexts"].verdict == "not tried"
    assert all("CUDA_MPS_PIPE_DIRECTORY" not in each for each in machine.journal("attention"))


def test_a_server_in_fault_after_a_kill_is_started_again_each_time(machine: Machine) -> None:
    (machine.directory / "fault").touch()
    (chosen,) = [each for each in PROBES if each.name == "a client killed in a kernel"]
    (found,) = run(machine.lab, [chosen])
    assert found.fallbacks == ("restart_mps",)
    assert "FAULT" in found.detail


def test_a_client_is_taken_off_the_gpu_before_it_is_killed(machine: Machine) -> None:
    (chosen,) = [each for each in PROBES if each.name == "a client killed in a kernel"]
    assert run(machine.lab, [chosen])[0].verdict == "ok"
    (spinning,) = machine.journal("spin")
    assert f" {spinning['pid']}\n" in (machine.directory / "journal").read_text().partition("terminate_client")[2]


def test_without_mps_engines_take_turns(machine: Machine) -> None:
    machine.lab.control = None
    found = machine.findings()
    assert found["SM shares under MPS"].fallbacks == ("mps_off",)
    assert "is not installed" in found["SM shares under MPS"].detail
    assert found["weights of another process"].verdict == "ok"


def test_with_one_gpu_there_are_no_communicators(machine: Machine) -> None:
    machine.lab.gpus = machine.lab.gpus[:1]
    assert machine.findings()["communicators side by side"].verdict == "not tried"


def test_after_a_refusal_nothing_else_is_tried(machine: Machine) -> None:
    machine.say("compute", "die")
    assert list(machine.findings()) == ["CUDA"]


SHAPES = [AttentionShape(4, 4, 64, 128, 384, 448), AttentionShape(6, 2, 64, 192, 448, 1024)]


def test_shapes_are_computed_with_each_percentage(machine: Machine) -> None:
    (found,) = run(machine.lab, [lab.shapes_probe({70: SHAPES, 10: SHAPES})])
    assert (found.verdict, found.detail) == ("ok", "2 shapes are right with 10 %, 70 % of the SMs")
    first, second = machine.journal("shapes")
    assert (first[PERCENTAGE], second[PERCENTAGE]) == ("70", "10")
    assert json.loads(first["arguments"][0])[1] == {
        "heads": 6, "kv_heads": 2, "dim": 64, "hidden": 192, "wide": 448, "vocabulary": 1024,
    }  # fmt: skip


@pytest.mark.parametrize("errors", ["[0.01, 0.9]", "[NaN, 0.004]"])
def test_a_shape_that_comes_out_wrong_forbids_percentages(machine: Machine, errors: str) -> None:
    machine.say("shapes", GOOD["shapes"].replace("[0.02, 0.005]", errors))
    (found,) = run(machine.lab, [lab.shapes_probe({70: SHAPES})])
    assert found.fallbacks == ("no_percentages",)
    assert "a model with 6 and 2 heads of 64, 192 and 448 columns comes out wrong with 70 % (92 SMs)" in found.detail


def test_what_has_no_time_left_is_not_tried_and_refuses_nothing(machine: Machine) -> None:
    machine.say("compute", "hang")
    found = run(machine.lab, PROBES, seconds=1.0)
    assert {each.verdict for each in found} == {"not tried"}
    assert found[0].detail == "1 s were too short for it"
    assert not machine.lab.fallbacks


def test_the_quick_probes_are_all_there() -> None:
    assert lab.QUICK[0].name == "CUDA"
    assert len(lab.QUICK) == 6
