"""A request among instances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxserve.replicas.priorities import NORMAL
from muxserve.simulator.requests import SimRequest

if TYPE_CHECKING:
    from muxserve.simulator.instances.instance import Instance
    from muxserve.simulator.instances.migration import Migration


class ReplicaRequest(SimRequest):
    """A request with priorities. `instance` has it; `migration` moves it, if any. `lost` sums the seconds from each
    preemption to the end of the prefill that made it good (Llumnix's preemption loss), `down` those in which it was in
    no batch because it moved, `moves` how often it did. `rank` is that of its scheduling priority."""

    __slots__ = ("down", "execution", "instance", "lost", "migration", "moves", "preempted_at", "rank", "scheduling")

    def __init__(
        self,
        request_id: str,
        model: str,
        arrival: float,
        prompt: int,
        output: int,
        scheduling: str = NORMAL,
        execution: str = NORMAL,
    ) -> None:
        super().__init__(request_id, model, arrival, prompt, output)
        self.scheduling = scheduling
        self.execution = execution
        self.rank = 0
        self.instance: Instance | None = None
        self.migration: Migration | None = None
        self.preempted_at: float | None = None
        self.lost = 0.0
        self.down = 0.0
        self.moves = 0
