"""An engine with a cache of its own is bound to its unit, and to no memory manager."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from muxserve.engine.binding import Binding
from muxserve.memory.client import MemoryClient
from muxserve.memory.view import ModelView
from muxserve.spec import ModelSpec
from muxserve.spec.unit import EnginePhase


class OwnMemory:
    """In place of the memory manager's client, and of what it maps: there is nothing to guard, and no manager to die.
    Pages and blocks are not here: whoever asks for them is wrong."""

    generation = 0

    @property
    def counters(self) -> OwnMemory:
        """Its generation is always the same."""
        return self

    def writing(self) -> AbstractContextManager[None]:
        """Nobody else reads what is written."""
        return nullcontext()

    def close(self) -> None:
        """Nothing is open."""


class NoPool:
    """In place of `PooledBlockPool`."""

    def end_step(self) -> None:
        """There is nobody to tell."""


def private_binding(model: ModelSpec, phase: EnginePhase) -> Binding:
    """The binding of an engine with a cache of its own."""
    memory: Any = OwnMemory()
    return Binding(model, phase, cast(MemoryClient, memory), cast(ModelView, memory))
