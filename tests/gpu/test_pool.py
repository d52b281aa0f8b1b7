"""The page pool in the memory of a real GPU: shared by processes, alone and under MPS, and kept over a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from muxserve.memory import server
from muxserve.spec import GpuSpec, UnitSpec, save
from tests.memory.support import unit_spec

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["without MPS", "under MPS"])
def environment(request: pytest.FixtureRequest, gpu: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What processes that use the GPU find in their environment."""
    from muxserve.gpu import mps

    if request.param == "without MPS":
        yield {"CUDA_VISIBLE_DEVICES": gpu}
        return
    control = mps.binary()
    if control is None:
        pytest.skip("MPS is not installed")
    directory = tmp_path / "mps"
    directory.mkdir()
    running = mps.MpsServer(directory, [gpu], control)
    try:
        running.start()
        pipes = {"CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(directory / "log")}
        yield {"CUDA_VISIBLE_DEVICES": gpu, **pipes}
    finally:
        running.stop()


@pytest.fixture(params=["vmm", "legacy"])
def of(request: pytest.FixtureRequest, gpu: str, tmp_path: Path) -> UnitSpec:
    made = msgspec.structs.replace(unit_spec(tmp_path), gpu=GpuSpec([gpu], ipc=request.param))
    save(made, tmp_path / "unit.json")
    return made


def in_process(of: UnitSpec, environment: dict[str, str], code: str) -> Any:
    """Run `code` in a process that has mapped the pool of the first model as the tensor `pool`; what it prints."""
    program = (
        "import json, sys, torch\n"
        "from muxserve.memory.client import MemoryClient\n"
        "torch.zeros(1, device='cuda')\n"
        "client = MemoryClient(sys.argv[1], 'test')\n"
        "pool = torch.as_tensor(client.map(sys.argv[2]).device_pool, device='cuda')\n"
    )
    command = [sys.executable, "-c", program + code, of.memory_socket, of.models[0].name]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout or "null")


def test_processes_share_pages(of: UnitSpec, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    manager = server.start(of)
    try:
        write = "pool[3].copy_(torch.full(pool.shape[1:], 7, dtype=torch.uint8))\ntorch.cuda.synchronize()\n"
        shape = in_process(of, environment, write + "print(json.dumps(pool.shape))")
        assert shape == [of.pools[0].num_pages, of.pools[0].page_bytes]
        assert in_process(of, environment, "print(json.dumps(pool[2:5].cpu().float().mean(1).tolist()))")[1] == 7.0
    finally:
        manager.terminate()
        manager.wait()


def test_shares_of_sms_are_seen(gpu: str, tmp_path: Path) -> None:
    from muxserve.gpu import mps

    control = mps.binary()
    if control is None:
        pytest.skip("MPS is not installed")
    directory = tmp_path / "mps"
    directory.mkdir()
    running = mps.MpsServer(directory, [gpu], control)
    counts = {}
    try:
        running.start()
        for percent in (25, 50, 100):
            environment = {
                "CUDA_VISIBLE_DEVICES": gpu,
                "CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"),
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent),
            }
            program = "import torch; print(torch.cuda.get_device_properties(0).multi_processor_count)"
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environment}
            )
            assert done.returncode == 0, done.stderr[-2000:]
            counts[percent] = int(done.stdout)
    finally:
        running.stop()
    print(counts)
    assert counts[25] < counts[50] < counts[100]
    assert counts[25] == pytest.approx(counts[100] / 4, rel=0.15)
