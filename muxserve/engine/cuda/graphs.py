"""CUDA graphs of an engine, which may have several sets of SMs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.distributed import parallel_state
from vllm.v1.worker import workspace

from muxserve.gpu.green import ContextSet

if TYPE_CHECKING:
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin as Base
else:
    Base = object

# What vLLM keeps captured graphs in, and under which name.
_KEPT = ((CUDAGraphWrapper, "concrete_cudagraph_entries"), (BreakableCUDAGraphWrapper, "entries"))
# An object that keeps graphs, and its attribute.
GraphHolder = tuple[Any, str]


def graph_wrappers() -> list[GraphHolder]:
    """vLLM's wrappers of models and of their pieces."""
    return [(wrapper, name) for kind, name in _KEPT for wrapper in list(kind._all_instances)]


class ContextGraphs:
    """The graphs that were captured in each context of an engine, of which vLLM sees those of the current one.

    A kernel of a graph runs in the context of the stream from which it was captured, wherever the graph is replayed. So
    each context has graphs of its own, over the same buffers: only one of them runs at a time.

    Args:
        holders: what keeps graphs now, asked anew at each change.
    """

    def __init__(
        self,
        contexts: ContextSet,
        device: torch.device,
        holders: Callable[[], Iterable[GraphHolder]] = graph_wrappers,
    ) -> None:
        self.contexts = contexts
        self._device = device
        self._holders = holders
        self._graphs: list[dict[Any, dict[Any, Any]]] = [{} for _ in contexts.contexts]

    def use(self, index: int) -> None:
        """Compute in that context from now on; nothing is to be in flight that was not launched in this thread.

        Raises:
            muxserve.gpu.green.GreenContextError: the driver refuses, or the present context is not current any more.
        """
        before = self.contexts.current
        if index == before:
            return
        self.contexts.use(index)
        for holder, name in self._holders():
            self._graphs[before][holder] = getattr(holder, name)
            setattr(holder, name, self._graphs[index].get(holder, {}))

    def capture(self, capture: Callable[[], int]) -> int:
        """Capture the graphs of every context by `capture`, which returns their bytes; those of before are dropped.

        Returns:
            The bytes of all of them.

        Raises:
            muxserve.gpu.green.GreenContextError: the driver refuses.
        """
        before = self.contexts.current
        for graphs in self._graphs:
            graphs.clear()
        captured = 0
        for index in range(len(self.contexts.contexts)):
            self.contexts.enter_again()
            self.use(index)
            captured += self._capture(capture)
        self.contexts.enter_again()
        self.use(before)
        return captured

    def _capture(self, capture: Callable[[], int]) -> int:
        stream = torch.cuda.ExternalStream(self.contexts.stream(), device=self._device)
        # torch makes its streams once, in the context that is current then.
        kind: Any = parallel_state.GraphCaptureContext
        with replaced(parallel_state, "GraphCaptureContext", lambda _: kind(stream)):
            return capture()


class CapturingRunner(Base):
    """Mixed in before a runner of vLLM, which then captures graphs in each context that the engine has."""

    # None: the engine has all SMs.
    graphs: ContextGraphs | None = None
    # Bytes on the GPU of what the runner has of requests: made behind the weights, and with the layers' caches. What it
    # makes before the weights is counted with these.
    request_bytes = table_bytes = 0

    def compute_in(self, contexts: ContextSet) -> None:
        """Have graphs for each of these contexts."""
        self.graphs = ContextGraphs(contexts, self.device, self.graph_holders)

    def graph_holders(self) -> list[GraphHolder]:
        """What vLLM keeps graphs in."""
        return graph_wrappers()

    def capture_model(self, **options: Any) -> int:
        capture = functools.partial(self._capture, **options)
        return capture() if self.graphs is None else self.graphs.capture(capture)

    def _capture(self, **options: Any) -> int:
        # vLLM locks its workspaces when it has captured once. Marlin's kernels want something there for each stream,
        # and every capture is from another one.
        if workspace.is_workspace_manager_initialized():
            workspace.unlock_workspace()
        captured: int = super().capture_model(**options)
        return captured

    def drop_graphs(self) -> None:
        """Forget those that were captured, in the present context."""
        CUDAGraphWrapper.clear_all_graphs()

    def warming_up(self) -> AbstractContextManager[None]:
        """Around steps that vLLM makes itself."""
        return nullcontext()


@contextmanager
def without_collecting() -> Iterator[None]:
    """Nothing is collected while graphs are captured, which could invalidate them.

    In place of vLLM's own, which thaws what this process was forked with, so that it and whoever collects next look
    through all of vLLM's modules: a second of an engine's start.
    """
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def replaced(module: Any, name: str, other: object) -> Iterator[None]:
    """`other` in the place of a function or class of one of vLLM's modules, where no method can be replaced."""
    own = getattr(module, name)
    setattr(module, name, other)
    try:
        yield
    finally:
        setattr(module, name, own)
