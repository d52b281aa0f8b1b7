"""CUDA graphs of an engine that has several sets of SMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.distributed import parallel_state

from muxserve.gpu.green import ContextSet

# What vLLM keeps captured graphs in, and under which name.
_KEPT = ((CUDAGraphWrapper, "concrete_cudagraph_entries"), (BreakableCUDAGraphWrapper, "entries"))


class ContextGraphs:
    """The graphs that were captured in each context of an engine, of which vLLM sees those of the current one.

    A kernel of a graph runs in the context of the stream from which it was captured, wherever the graph is replayed. So
    each context has graphs of its own, over the same buffers: only one of them runs at a time.
    """

    def __init__(self, contexts: ContextSet, device: torch.device) -> None:
        self.contexts = contexts
        self._device = device
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
        for wrapper, name in _wrappers():
            self._graphs[before][wrapper] = getattr(wrapper, name)
            setattr(wrapper, name, self._graphs[index].get(wrapper, {}))

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
        parallel_state.GraphCaptureContext = lambda _: kind(stream)
        try:
            return capture()
        finally:
            parallel_state.GraphCaptureContext = kind


def _wrappers() -> list[tuple[Any, str]]:
    return [(wrapper, name) for kind, name in _KEPT for wrapper in list(kind._all_instances)]
