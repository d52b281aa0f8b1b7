"""What binds this process to its unit: model, phase, rank, memory manager.

vLLM builds the worker, the attention backend and the scheduler by class name, so they cannot be handed their
surroundings as arguments. They read them here. An engine process binds itself exactly once, before it builds its
`EngineCore`. The worker process of each rank binds itself to the pool of its rank (`bind_worker`), which it knows from
vLLM's configuration.
"""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from muxserve.memory.client import MemoryClient
from muxserve.memory.view import ModelView
from muxserve.spec import ModelSpec, UnitSpec, load
from muxserve.spec.unit import EnginePhase


@dataclass(slots=True)
class Binding:
    """This process's place in the unit. `view` holds the mapped page table and the pool of `rank`.

    In an engine process `client` is the connection that holds the engine's blocks; `client` and `view` are replaced
    when the memory manager restarts. In a worker's process `client` is closed and only guards what is written
    (`MemoryClient.writing`).
    """

    model: ModelSpec
    phase: EnginePhase
    client: MemoryClient
    view: ModelView
    rank: int = 0
    pid: int = field(default_factory=os.getpid)


class OwnMemory:
    """In place of the memory manager's client, and of what it maps, in an engine with a cache of its own: there is
    nothing to guard, and no manager to die. Pages and blocks are not here: whoever asks for them is wrong."""

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


def private_binding(model: ModelSpec, phase: EnginePhase, rank: int = 0) -> Binding:
    """The binding of an engine, or of one of its workers, with a cache of its own."""
    memory: Any = OwnMemory()
    return Binding(model, phase, memory, memory, rank)


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


def place_of(vllm_config: Any) -> tuple[UnitSpec, str, EnginePhase]:
    """UnitSpec, model and phase of the engine that `vllm_config` was made for; the unit's spec is read anew."""
    place = vllm_config.additional_config["muxserve"]
    return load(place["unit_spec"]), place["model"], place["phase"]


def bind_worker(vllm_config: Any, rank: int, anew: bool = False) -> Binding:
    """The binding of the worker of `rank`, to the pool of that rank.

    In an engine process with one rank it is the engine's own. In a worker's process it is made at the first call, and
    again with `anew` when the memory manager has restarted.

    Raises:
        MemoryManagerGone: there is no memory manager.
    """
    if _binding is not None and _binding.pid == os.getpid() and not anew:
        return _binding
    unit_spec, model, phase = place_of(vllm_config)
    if unit_spec.model(model).private:
        bind(private_binding(unit_spec.model(model), phase, rank))
        return current()
    # What is mapped stays when the connection has ended. The blocks are the engine's, not the workers': they need none.
    with MemoryClient(unit_spec.memory_socket, f"{model}/{phase}/{rank}"[-128:]) as client:
        view = client.map(model, rank)
    bind(Binding(unit_spec.model(model), phase, client, view, rank))
    return current()


def connection_to(path: str) -> int:
    """Descriptor of this process's connection to the Unix socket `path`.

    Raises:
        LookupError: there is none.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family == socket.AF_UNIX and copy.getpeername() == path:
                    return int(name)
        except OSError:
            continue
    raise LookupError(f"not connected to {path}")
