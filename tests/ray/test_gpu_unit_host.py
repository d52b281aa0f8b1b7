"""The host of a unit on GPUs as a process of its own, without Ray: what becomes of it while it tries MPS."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from muxserve.cluster.events import HOST, Failed
from muxserve.cluster.units import write_unit_spec
from muxserve.planning.specs.unit_specs import planned_unit
from muxserve.spec import load
from tests.cluster.conftest import ROOT, alive
from tests.cluster.host_client import HostClient
from tests.cluster.test_gpu_plan import plan
from tests.ray.gpus import Node
from tests.support.patience import PATIENCE, eventually


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    return Node(tmp_path_factory.mktemp("n"), "here", "H200", 140)


@pytest.fixture
def host(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """It has been started, and is trying an MPS server that does not come."""
    node.tell("refuse-start")
    process = start(node, tmp_path_factory.mktemp("r"))
    eventually(lambda: any(line.startswith("start_server") for line in node.journal()), "MPS is tried")
    yield process
    process.kill()
    process.communicate()


def start(node: Node, run_dir: Path, **gpu_plan: object) -> subprocess.Popen[str]:
    unit = planned_unit(plan(run_dir, "{gpus: 2, launcher: ray, sm_sharing: mps}"), str(run_dir))
    assert unit.gpu is not None
    file, planned = write_unit_spec(unit.unit_spec), run_dir / "gpu_plan.json"
    planned.write_bytes(replace(unit.gpu, **gpu_plan).to_json())  # type: ignore[arg-type]
    command = [sys.executable, "-m", "tests.ray.gpu_unit_host", "--unit-spec", str(file), "--gpu-plan", str(planned)]
    environment = {
        **os.environ,
        "FAKE_GPUS": json.dumps(node.gpus),
        "FAKE_MPS": str(node.directory),
        "PATH": f"{node.directory}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "ray" / "fake_pynvml"), str(ROOT)]),
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, "--ends-with-input"], stdin=pipe, env=environment, text=True, cwd=ROOT)


def test_it_can_be_stopped_and_leaves_no_daemon(host: subprocess.Popen[str], node: Node) -> None:
    host.send_signal(signal.SIGTERM)
    assert host.wait(PATIENCE) == 0
    assert node.journal()[-1] == "quit -t 5"
    assert not any(alive(pid) for pid in node.pids("pid"))


def test_it_ends_with_who_holds_its_input(host: subprocess.Popen[str], node: Node) -> None:
    assert host.stdin is not None
    host.stdin.close()
    host.stdin = None
    assert host.wait(PATIENCE) == 0
    assert not any(alive(pid) for pid in node.pids("pid"))


async def test_what_it_cannot_do_is_said_before_it_ends(node: Node, tmp_path_factory: pytest.TempPathFactory) -> None:
    node.tell("broken")
    run_dir = tmp_path_factory.mktemp("r")
    host = start(node, run_dir, mps="on")
    (file,) = run_dir.rglob("unit.json")
    client = HostClient(load(file))
    failed = await client.until(Failed)
    assert failed.part == HOST
    assert "cluster.mps is on, but MPS does not work here" in failed.message
    assert "no GPU is fit for MPS" in failed.message
    assert await asyncio.to_thread(host.wait, PATIENCE) == 3
    client.close()
