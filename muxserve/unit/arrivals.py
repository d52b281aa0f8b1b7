"""Requests that come from other units: the receiving unit scheduler's part of live migration."""

from __future__ import annotations

from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.types import QueuedRequest
from muxserve.unit.outbox import Outbox
from muxserve.unit.request_table import RequestEntry, UnitRequestTable, pages_for
from muxserve.wire import TakeOver, TookOver


class Arrivals:
    """Takes requests over, or says why not."""

    def __init__(self, ledger: UnitLedger, policy: Policy, request_table: UnitRequestTable, out: Outbox) -> None:
        self._ledger = ledger
        self._policy = policy
        self._request_table = request_table
        self._out = out

    def take_over(self, message: TakeOver, now: float) -> str:
        """A request comes from another unit with its KV, under a hand-off. Returns why not, or nothing."""
        request, request_table = message.request, self._request_table
        address = next((a for a, g in request_table.gateways.items() if g.epoch == request.gateway_epoch), None)
        if address is None:
            return f"its gateway {request.gateway_epoch} is not known here"
        model = self._ledger.by_name.get(request.model)
        if model is None or model.retired or not model.up:
            return f"model {request.model!r} is not up here"
        if not self._ledger.memory_up:
            return "the memory manager is not up"
        done = len(request.output_tokens)
        most = request.prompt_tokens + max(request.max_tokens, done + 1) - 1
        if pages_for(model, most) > self._policy.capacity(model):
            return f"it can grow to {most} tokens, for which there is no room here"
        known = request_table.held.get(request.request_id)
        if known is not None:
            if known.attempt >= request.attempt:
                return "it is here already"
            request_table.drop([request.request_id], now)
        request_table.held[request.request_id] = RequestEntry(
            address,
            request.attempt,
            request.body,
            request.output_tokens,
            message.key,
            request.computed_tokens,
            request.scheduling,
            foreign=True,
            moves=request.moves,
        )
        self._ledger.taken_over(
            QueuedRequest(
                request.request_id,
                request.model,
                request.prompt_tokens,
                request.max_tokens,
                now - request.waited,
                request.priority,
                done,
                True,
                request.execution,
            ),
            now,
        )
        self._out.send(address, TookOver(request.request_id, request.attempt, request.moves))
        return ""
