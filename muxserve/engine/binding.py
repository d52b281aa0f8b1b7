"""What binds this engine process to its unit: model, phase, memory manager.

vLLM builds the worker, the attention backend and the scheduler by class name, so they cannot be handed their
surroundings as arguments. They read them here; an engine process binds itself exactly once, before it builds its
`EngineCore`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from muxserve.deployment import ModelDeployment
from muxserve.memory.client import MemoryClient, ModelView

Phase = Literal["prefill", "decode"]


@dataclass(slots=True)
class Binding:
    """This process's place in the unit. `view` holds the mapped page table and pool; it stays valid when the memory
    manager restarts, while `client` is replaced."""

    model: ModelDeployment
    phase: Phase
    client: MemoryClient
    view: ModelView


_binding: Binding | None = None


def bind(binding: Binding) -> None:
    """Make `binding` this process's."""
    global _binding
    _binding = binding


def current() -> Binding:
    """This process's binding.

    Raises:
        RuntimeError: the process was not bound; an engine class of ours was used outside an engine process.
    """
    if _binding is None:
        raise RuntimeError("this process is not an engine of a unit: muxserve.engine.binding.bind() was not called")
    return _binding
