"""Round robin, the policy of MuxServe's figure 9: engines in cyclic order, prefill and decode alike, fixed quotas.

What fits the free compute runs. An engine that does not fit keeps its place; when it has waited for longer than a
`patience` nothing else is launched until it fits.
"""

from __future__ import annotations

from muxserve.scheduling.admission import admissible, wants_prefill
from muxserve.scheduling.leases import Quanta
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policies import POLICIES
from muxserve.scheduling.policy import Policy, cyclic
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import DECODE, PREFILL, Grant, Phase
from muxserve.simulator import MODES, Mode


class RoundRobin(Policy):
    """No priority of phases, no adaptation of quotas."""

    name = "round_robin"

    def __init__(self, quanta: Quanta | None = None, patience: float = 0.1) -> None:
        super().__init__(quanta)
        self.patience = patience
        self._next = 0
        self._left_out_since: dict[int, float] = {}

    def decide(self, ledger: UnitLedger, now: float) -> list[Grant]:
        free = ledger.share_free
        waiting: list[tuple[int, ModelState, Phase]] = []
        for model in ledger.models:
            if wants_prefill(ledger, model, now):
                waiting.append((2 * model.index, model, PREFILL))
            if model.decode.ready(now):
                waiting.append((2 * model.index + 1, model, DECODE))
        launched: list[tuple[ModelState, Phase]] = []
        still_out: dict[int, float] = {}
        start = next((i for i, each in enumerate(waiting) if each[0] >= self._next), 0)
        first_left_out: int | None = None
        closed = False
        for slot, model, phase in cyclic(waiting, start):
            share = model.engine(phase).share
            if share <= free and not closed:
                free -= share
                launched.append((model, phase))
                if first_left_out is None:
                    self._next = slot + 1
                continue
            if first_left_out is None:
                first_left_out = slot
                if not launched:
                    self._next = slot
            since = still_out[slot] = self._left_out_since.get(slot, now)
            closed = closed or now - since > self.patience
        self._left_out_since = still_out
        contended = bool(still_out)
        grants: list[Grant] = []
        reserved: dict[str, int] = {}
        for model, phase in launched:
            if phase is DECODE:
                grants.append(self._decode_job(ledger, model, contended))
                continue
            # Quotas need not be parts of the pool here: earlier jobs of this decision have their pages first.
            pool = model.pool
            left = pool.available - pool.promised - reserved.get(pool.profile.name, 0)
            limit = min(model.quota, model.used + model.promised + left)
            if model.prefill.inside or wants_prefill(ledger, model, now, limit):
                grant = self._prefill_grant(model, admissible(ledger, model, limit))
                grants.append(grant)
                blocks = sum(ledger.requests[request_id].blocks for request_id in grant.admit)
                reserved[pool.profile.name] = reserved.get(pool.profile.name, 0) + blocks * model.pages_per_block
        for model in ledger.models:
            if model.decode.lease is not None:
                renewal = self._renewal(ledger, model, now, contended)
                if renewal is not None:
                    grants.append(renewal)
        return grants


POLICIES[RoundRobin.name] = RoundRobin
MODES["round-robin"] = Mode("round-robin", "muxserve with the round-robin policy", policy=RoundRobin.name)
