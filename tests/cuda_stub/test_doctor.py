"""`muxserve doctor --gpu` over the stand-ins: all probes, what each finds where a driver refuses or lies, and what
`deploy` does then.

    make cuda-stub

Kernels compute nothing: the stand-ins say what comparisons on the device come to.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import yaml

from muxserve.gpu import mps
from muxserve.gpu.findings import GRAPHS, Findings, ProbeFinding
from muxserve.gpu.nvml import Gpu
from muxserve.probes.lab import PROBES, Lab, run
from tests.cuda_stub.conftest import Start
from tests.cuda_stub.share import UUIDS
from tests.cuda_stub.stand_ins import ROOT, WHEELS, Environment
from tests.cuda_stub.test_fleet import TOKENS, WHOLE, engine_trace, length, model, said, stream, through
from tests.e2e.fleet import Fleet
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.skipif(not (WHEELS / ".installed").exists(), reason="needs vLLM's CUDA build: make cuda-stub")

WEIGHTS, POOL = "weights of another process", "pool of another process"
RANKS, KILLED, GREEN = "communicators side by side", "a client killed in a kernel", "green contexts"
# What is compared on the device is the same, and numbers that come from there are small.
TRUTH = {"CUDA_STUB_TRUE": "1", "CUDA_STUB_FLOAT": "0.001"}
NO_IMPORT = {"FAKE_CUDA_FAIL": "cuMemImportFromShareableHandle=801"}


def doctor(environment: Environment, lies: Mapping[str, str]) -> tuple[int, str]:
    """What `muxserve doctor --gpu` ends with, and says."""
    line = [sys.executable, "-m", "muxserve.cli.app", "doctor", "--gpu"]
    done = subprocess.run(
        line, cwd=ROOT, env={**environment, **TRUTH, **lies}, capture_output=True, text=True, timeout=40 * PATIENCE
    )
    return done.returncode, done.stdout + done.stderr


def remembered(environment: Environment) -> dict[str, ProbeFinding]:
    """What it has written down, by probe."""
    file = Path(environment["XDG_CACHE_HOME"]) / "muxserve" / "gpu.json"
    return {each.probe: each for each in msgspec.json.decode(file.read_bytes(), type=Findings).findings}


def test_a_machine_on_which_everything_works(with_mps: Environment) -> None:
    status, words = doctor(with_mps, {})
    assert status == 0, words
    found = remembered(with_mps)
    assert {each.verdict for each in found.values()} == {"ok"}
    assert list(found) == ["driver", *(probe.name for probe in PROBES)]
    assert "a client with 50% sees 66 of 132 SMs" in found["SM shares under MPS"].detail
    assert "for reading only" in found[WEIGHTS].detail
    assert "64 of 132 SMs" in found[GREEN].detail


def test_a_driver_that_is_too_old_ends_it(with_mps: Environment) -> None:
    old = {"CUDA_STUB_DRIVER": "12080"}
    status, words = doctor(with_mps, old)
    assert status == 1
    assert "knows CUDA 12.8" in " ".join(words.split())
    assert [(name, each.fallbacks) for name, each in remembered(with_mps).items()] == [("driver", ("refuse",))]


@pytest.mark.parametrize("command", ["deploy", "validate", "doctor"])
def test_every_command_says_that_a_driver_is_too_old(with_mps: Environment, tmp_path: Path, command: str) -> None:
    """An old driver would fail in the first engine, long after models were read and MPS was started."""
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump({"cluster": {"gpus": 1}, "models": [model("atlas")]}))
    line = [sys.executable, "-m", "muxserve.cli.app", command, *([] if command == "doctor" else [str(file)])]
    done = subprocess.run(
        line, cwd=ROOT, env={**with_mps, "CUDA_STUB_DRIVER": "12080"}, capture_output=True, text=True, timeout=PATIENCE
    )
    words = " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in words
    assert "knows CUDA 12.8" in words
    assert "install a newer driver (580 or later)" in words
    assert done.returncode == 1 if command == "doctor" else done.returncode != 0, words
    assert not (Path(with_mps["FAKE_MPS"]) / "journal").exists(), "an MPS server was started"


@pytest.mark.parametrize(
    ("probe", "lies", "words", "fallback"),
    [
        ("CUDA", {"FAKE_CUDA_DEVICES": "0"}, "compute", "refuse"),
        ("SM shares under MPS", {"CUDA_STUB_WHOLE": "1"}, "sees 132 of 132 SMs", "mps_off"),
        (WEIGHTS, NO_IMPORT, "so: a client maps memory", "ipc_legacy"),
        (POOL, NO_IMPORT, "share a pool (legacy)", "ipc_legacy"),
        (POOL, {"FAKE_CUDA_NO_VMM": "1"}, "share a pool (legacy)", "ipc_legacy"),
        ("attention on one-head pages", {"CUDA_STUB_FLOAT": "3.5"}, "plain attention 3.5", "refuse"),
        (GRAPHS, {"CUDA_STUB_GRAPH_FLOAT": "3.5"}, "plain attention 3.5", "piecewise"),
        (RANKS, {"CUDA_STUB_NO_MULTICAST": "1"}, "so: two communicators", "nvls_off"),
        (RANKS, {"CUDA_STUB_TRUE": ""}, "a sum over two GPUs is wrong", "fcfs"),
        (GREEN, {"CUDA_STUB_REFUSES": "cuGreenCtxCreate"}, "cuGreenCtxCreate failed", "no_green_contexts"),
        (GREEN, {"CUDA_STUB_REFUSES": "cuDevSmResourceSplitByCount"}, "SplitByCount failed", "no_green_contexts"),
        (GREEN, {"CUDA_STUB_ASTRAY": "1"}, "ran on 100 SMs of others", "no_green_contexts"),
        (GREEN, {"CUDA_STUB_LOSES": "/"}, "is not current any more", "no_green_contexts"),
    ],
)
def test_what_a_driver_refuses_or_lies_about_has_a_way_out(
    with_mps: Environment,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    probe: str,
    lies: Mapping[str, str],
    words: str,
    fallback: str,
) -> None:
    for name, value in {**with_mps, **TRUTH, **lies}.items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    gpus = [Gpu(rank, uuid, "NVIDIA H200") for rank, uuid in enumerate(UUIDS)]
    lab = Lab(gpus, tmp_path_factory.mktemp("m"), mps.binary(), limit=10 * PATIENCE)
    (found,) = run(lab, [each for each in PROBES if each.name == probe])
    assert (found.verdict, found.fallbacks) == ("failed", (fallback,)), found.detail
    assert words in found.detail


def test_deploy_does_what_is_remembered(with_mps: Environment, deploy: Start) -> None:
    fault = Path(with_mps["FAKE_MPS"]) / "fault"
    fault.touch()
    refused = {**NO_IMPORT, "CUDA_STUB_REFUSES": "cuGreenCtxCreate", "CUDA_STUB_NO_MULTICAST": "1"}
    status, words = doctor(with_mps, {**refused, "CUDA_STUB_GRAPH_FLOAT": "3.5"})
    fault.unlink()
    assert status == 0, words
    chosen = {each for finding in remembered(with_mps).values() for each in finding.fallbacks}
    assert chosen == {"ipc_legacy", "piecewise", "nvls_off", "restart_mps", "no_green_contexts"}
    of_two_ranks = model("atlas", engine_args=WHOLE)
    with deploy(of_two_ranks, gpus=2, mps="on", sm_sharing="green_contexts", lies=refused) as fleet:
        (unit,) = (Path(line).parent for line in _unit_specs(fleet))
        gpu = json.loads((unit / "unit.json").read_text())["gpu"]
        assert (gpu["sm_sharing"], gpu["ipc"], gpu["nvls"]) == ("mps", "legacy", False)
        assert length(stream(fleet, "atlas")) == TOKENS
        assert fleet.part("weights atlas") is not None
        assert engine_trace(fleet, "atlas/decode").captured == {}
        # The server is started again with an engine that was killed.
        assert through(fleet, "atlas", lambda: fleet.kill("engine atlas/decode")) == TOKENS
        fleet.wait_healthy()
        assert said(fleet, "ended with the MPS server") > 0


def _unit_specs(fleet: Fleet) -> set[str]:
    lines = [line for _, line in fleet.commands() if "--unit-spec" in line]
    return {line[line.index("--unit-spec") + 1] for line in lines}
