"""What a unit on GPUs keeps of its models: weights that outlive who has loaded them, copies of them in the host's
memory, and engines that stay while their models sleep (`muxserve.engine.rest`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muxserve.cluster.events import PartId
from muxserve.cluster.processes import Process
from muxserve.gpu.weight_server import HostCopy, WeightServer
from muxserve.spec import RestingSpec

_STOP_SECONDS = 5.0


class HeldWeights:
    """Weights of models that are awake, and copies in the host's memory of models that sleep.

    Args:
        ranks: how many GPUs each model has its weights on.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._servers: dict[str, list[WeightServer]] = {}
        # By model and rank, of models that sleep.
        self._copies: dict[str, dict[int, HostCopy]] = {}

    def keep(self, model: str, sockets: Sequence[str]) -> asyncio.Future[str]:
        """Take what the process that loads the weights of a model will have kept, by rank, over `sockets`; resolves
        with the reason when that is lost."""
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[str] = loop.create_future()

        def resolve(reason: str) -> None:
            if not lost.done():
                lost.set_result(f"the weights are lost: {reason}")

        def on_lost(reason: str) -> None:
            loop.call_soon_threadsafe(resolve, reason)

        copies = self._copies.pop(model, {})
        self._servers[model] = [
            WeightServer(path, on_lost=on_lost, copy=copies.get(rank)) for rank, path in enumerate(sockets)
        ]
        return lost

    def let_go(self, model: str) -> None:
        """None of the engines of `model` runs any more. The copies in the host's memory stay."""
        for rank, server in enumerate(self._servers.pop(model, [])):
            server.close()
            if server.copy is not None:
                self._copies.setdefault(model, {})[rank] = server.copy

    def forget_copies(self, model: str) -> None:
        """Let go of the copies of a model that sleeps."""
        for copy in self._copies.pop(model, {}).values():
            copy.close()

    def copied(self, model: str) -> bool:
        """Whether the host's memory has the weights of a model that sleeps."""
        return len(self._copies.get(model, {})) == self._ranks

    def has_copies(self, model: str) -> bool:
        """Whether the host's memory will have the weights of a model that is awake, when it sleeps."""
        servers = self._servers.get(model, [])
        return bool(servers) and all(server.copy is not None for server in servers)

    def copied_bytes(self) -> dict[str, int]:
        """Bytes of the host's memory for copies, by model."""
        asleep = {model: sum(copy.bytes for copy in each.values()) for model, each in self._copies.items()}
        there = ((model, [s.copy for s in each if s.copy is not None]) for model, each in self._servers.items())
        return asleep | {model: sum(copy.bytes for copy in copies) for model, copies in there if copies}

    def close(self) -> None:
        """Let go of everything."""
        for model in list(self._servers):
            self.let_go(model)
        for model in list(self._copies):
            self.forget_copies(model)


def those_to_end(resting: Mapping[str, int], size: int, room: RestingSpec) -> list[str] | None:
    """The models whose engines end so that those of another one can rest: as few as are enough, those first that have
    rested longest. None: they would have no room even alone.

    Args:
        resting: bytes of each GPU that engines of each model take, in the order in which they came to rest.
        size: of those that come.
        room: for all of them.
    """
    if size > room.bytes or room.models < 1:
        return None
    taken, ended = sum(resting.values()) + size, list[str]()
    for model, each in resting.items():
        if taken <= room.bytes and len(resting) - len(ended) < room.models:
            break
        taken -= each
        ended.append(model)
    return ended


@dataclass(slots=True)
class _RestingModel:
    size: int
    processes: dict[PartId, Process]
    watches: list[asyncio.Task[None]] = field(default_factory=list)


class RestingEngines:
    """Made inside a running event loop, or before it.

    Args:
        room: for all of them; None: none rest.
    """

    def __init__(self, room: RestingSpec | None) -> None:
        self._room = room
        # Those that came to rest last are at the end.
        self._models: dict[str, _RestingModel] = {}

    @property
    def models(self) -> tuple[str, ...]:
        """Whose engines rest."""
        return tuple(self._models)

    def change(self, room: RestingSpec | None) -> None:
        """There is so much room from now on."""
        self._room = room

    async def make_room(self, size: int) -> bool:
        """End others for engines that take `size` bytes of each GPU; whether they have room then."""
        if self._room is None:
            return False
        ended = those_to_end({name: each.size for name, each in self._models.items()}, size, self._room)
        if ended is None:
            return False
        await asyncio.gather(*map(self.end, ended))
        return True

    def add(self, model: str, size: int, processes: Mapping[PartId, Process]) -> None:
        """The engines of `model` have come to rest. When one of them ends, so do the others."""
        known = self._models[model] = _RestingModel(size, dict(processes))
        known.watches = [asyncio.create_task(self._watch(model, process)) for process in processes.values()]

    def take(self, part: PartId) -> Process | None:
        """An engine is ordered back, and is the caller's from now on; None if it does not rest."""
        model = self._models.get(part.model)
        process = None if model is None else model.processes.pop(part, None)
        if model is None or process is None:
            return None
        for watch in model.watches:
            watch.cancel()
        if not model.processes:
            del self._models[part.model]
        return process

    async def end(self, model: str) -> None:
        """Those of `model` do not rest any longer, and end."""
        known = self._models.pop(model, None)
        if known is None:
            return
        for watch in known.watches:
            watch.cancel()
        await asyncio.gather(*(process.stop(_STOP_SECONDS) for process in known.processes.values()))

    async def end_all(self) -> None:
        """End all of them."""
        await asyncio.gather(*map(self.end, list(self._models)))

    async def _watch(self, model: str, process: Process) -> None:
        await process.wait()
        known = self._models.pop(model, None)
        if known is not None:
            await asyncio.gather(*(other.stop(_STOP_SECONDS) for other in known.processes.values()))
