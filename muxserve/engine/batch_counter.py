"""What each step of an engine computes, in the terms of cost models."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Protocol

from muxserve.costs.steps import StepBatch


class Computed(Protocol):
    """A request, as vLLM's scheduler has it when it has scheduled a step: tokens that the step is to have computed."""

    num_computed_tokens: int


class BatchCounter:
    """Counts steps. One that decodes the sequences of the one before costs no Python per sequence: each of them has a
    token of context more."""

    def __init__(self) -> None:
        self._decoded: frozenset[str] = frozenset()
        self._context = 0

    def count(
        self, tokens: Mapping[str, int], total: int, requests: Mapping[str, Computed], prompts: Container[str]
    ) -> StepBatch:
        """A step computes so many `tokens` of each request, `total` in all; `prompts` are those without their first
        token."""
        if total == len(tokens) == len(self._decoded) and tokens.keys() == self._decoded:
            self._context += total
            return StepBatch(False, total, 0, total, self._context)
        pairs = context = decoded = 0
        for request_id, count in tokens.items():
            after = requests[request_id].num_computed_tokens
            if request_id in prompts:
                before = after - count
                pairs += count * before + count * (count + 1) // 2
            else:
                decoded += 1
                context += after
        only = decoded == len(tokens)
        self._decoded = frozenset(tokens) if only else frozenset()
        self._context = context
        return StepBatch(not only, total, pairs, len(tokens), context)
