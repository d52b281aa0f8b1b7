"""What the next micro-batch of an engine may hold, decided by a token budget instead of by vLLM alone.

`scheduling.token_throttling` decides how much; this counts what the engine holds, in vLLM's terms, and says which
sequences wait.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from vllm.v1.request import Request

from muxserve.scheduling.token_throttling import BudgetInputs, TokenBudget


class BudgetedSteps:
    """Applies a budget to one engine's steps. `depth` is how many micro-batches may be in flight."""

    def __init__(self, budget: TokenBudget, depth: int) -> None:
        self._budget = budget
        self._depth = depth
        self._scheduled_at: dict[str, int] = {}

    def tokens(
        self,
        running: list[Request],
        adopted: int,
        waiting: Iterable[Request],
        prompts: Container[str],
        kv_free: float,
        step: int,
    ) -> int:
        """Most tokens of the micro-batch of `step`.

        Sequences beyond the budget sit this step out: of those that could decode, those that did last. `running` is
        sorted so that vLLM takes those that decode first, which prompts would take the tokens from.

        Args:
            adopted: requests that wait with the KV of all tokens but one. They wait for nothing that prompts wait for.
            waiting: those of which nothing is computed.
            prompts: ids of all requests without a token from this engine.
            kv_free: the free part of the model's quota, in 0..1.
        """
        ready: list[Request] = []
        decoding = unfinished = 0
        for request in running:
            left = request.num_tokens - request.num_computed_tokens
            if request.request_id in prompts:
                unfinished += left
                continue
            decoding += 1
            if left:
                ready.append(request)
        unfinished += sum(request.num_tokens for request in waiting)
        prefill, decode = self._budget.next(BudgetInputs(unfinished, decoding, len(ready), kv_free, self._depth))
        ready.sort(key=lambda request: self._scheduled_at.get(request.request_id, 0))
        for request in ready[decode:]:
            request.next_decode_eligible_step = step + 1
        running.sort(key=lambda request: request.request_id in prompts)
        return min(decode, len(ready)) + adopted + prefill

    def scheduled(self, request_ids: Iterable[str], step: int) -> None:
        """These are in the micro-batch of `step`."""
        for request_id in request_ids:
            self._scheduled_at[request_id] = step

    def forget(self, request_id: str) -> None:
        """It is no longer in the engine."""
        self._scheduled_at.pop(request_id, None)
