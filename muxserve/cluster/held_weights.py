"""Weights of models on GPUs that outlive who has loaded them, those of one unit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from muxserve.gpu.weight_server import HostCopy, WeightServer


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
