"""Shares per lease in an engine: contexts over a stand-in of the driver, and graphs that follow them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.compilation import cuda_graph
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from muxserve.engine.cuda.graphs import ContextGraphs
from muxserve.engine.cuda.runner import PooledGPUModelRunner
from muxserve.engine.cuda.worker import PooledGPUWorker
from muxserve.gpu.driver import Driver
from muxserve.gpu.green import ContextSet, GreenContext
from tests.gpu_control.fake_driver import FakeDriver


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def graphs(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> ContextGraphs:
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: ("stream", stream))
    driver = Driver(fake)
    contexts = [GreenContext(driver, handle, 8 * handle) for handle in (11, 12, 13)]
    return ContextGraphs(ContextSet(driver, contexts), torch.device("cpu"))


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of vLLM's, as it keeps a piece of a model."""
    config = SimpleNamespace(compilation_config=None)
    monkeypatch.setattr(cuda_graph, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
    made = CUDAGraphWrapper(lambda: None, config, CUDAGraphMode.PIECEWISE)  # type: ignore[arg-type]
    monkeypatch.setattr(CUDAGraphWrapper, "_all_instances", [made])
    return made


def capturing(fake: FakeDriver, wrapper: Any, round_: str = "graph") -> Any:
    """Captures as vLLM does: on the stream of `GraphCaptureContext`, into the wrapper's entries."""

    def capture(self: Any = None) -> int:
        stream = parallel_state.GraphCaptureContext("a stream of torch's pool")  # type: ignore[arg-type]
        number = stream.stream[1]  # type: ignore[index]
        assert not wrapper.concrete_cudagraph_entries
        wrapper.concrete_cudagraph_entries["batch"] = (round_, fake.streams[number])
        return 10

    return capture


def test_a_lease_s_share_brings_its_context_and_the_graphs_of_it(
    fake: FakeDriver, graphs: ContextGraphs, wrapper: Any
) -> None:
    assert graphs.capture(capturing(fake, wrapper)) == 30
    assert parallel_state.GraphCaptureContext("s").stream == "s"  # type: ignore[arg-type, comparison-overlap]
    assert fake.current == 13, "as before"
    worker: Any = PooledGPUWorker.__new__(PooledGPUWorker)
    worker.model_runner = SimpleNamespace(graphs=graphs)
    for region, handle in ((300_000, 11), (1_000_000, 13), (700_000, 12), (660_000, 12), (10_000, 11)):
        worker.compute_on(region)
        assert fake.current == handle
        assert wrapper.concrete_cudagraph_entries == {"batch": ("graph", handle)}


def test_a_pool_that_moved_has_the_graphs_of_all_contexts_captured_anew(
    fake: FakeDriver, graphs: ContextGraphs, wrapper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = PooledGPUModelRunner.__new__(PooledGPUModelRunner)
    runner.graphs = graphs
    runner.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL)
    runner.kv_caches = [torch.zeros(1)]
    runner._bind_pool = lambda: setattr(runner, "kv_caches", [torch.zeros(2)])
    monkeypatch.setattr(GPUModelRunner, "capture_model", capturing(fake, wrapper))
    assert runner.capture_model() == 30
    graphs.use(0)
    monkeypatch.setattr(GPUModelRunner, "capture_model", capturing(fake, wrapper, "anew"))
    before = runner.kv_caches[0]
    runner.rebind_pool()
    assert runner.kv_caches[0].data_ptr() != before.data_ptr()
    for index in (0, 1, 2):
        graphs.use(index)
        assert wrapper.concrete_cudagraph_entries == {"batch": ("anew", 11 + index)}


@pytest.mark.parametrize("contexts", [True, False])
def test_kernels_may_make_something_for_the_stream_of_every_capture(
    fake: FakeDriver, graphs: ContextGraphs, monkeypatch: pytest.MonkeyPatch, contexts: bool
) -> None:
    """vLLM locks its workspaces at the end of a capture: no later one, from another stream, could take place."""
    workspace.init_workspace_manager(torch.device("cpu"))
    streams = iter(range(100))

    def capture(self: object) -> int:
        manager = workspace.current_workspace_manager()
        manager.get_persistent(("marlin_locks", next(streams)), (1,), torch.int)
        workspace.lock_workspace()
        return 1

    monkeypatch.setattr(GPUModelRunner, "capture_model", capture)
    runner: Any = PooledGPUModelRunner.__new__(PooledGPUModelRunner)
    runner.graphs = graphs if contexts else None
    try:
        captured = [runner.capture_model() for _ in range(2)]
        assert captured == [3, 3] if contexts else [1, 1]
        assert workspace.current_workspace_manager().is_locked()
    finally:
        workspace.reset_workspace_manager()


def test_engines_with_all_sms_capture_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = PooledGPUModelRunner.__new__(PooledGPUModelRunner)
    monkeypatch.setattr(GPUModelRunner, "capture_model", lambda self: 5)
    assert runner.capture_model() == 5
    worker: Any = PooledGPUWorker.__new__(PooledGPUWorker)
    worker.model_runner = runner
    worker.compute_on(500_000)
