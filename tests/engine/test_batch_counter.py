"""What a step consists of, counted from what vLLM's scheduler says. No vLLM: the counter alone."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from muxserve.costs.steps import StepBatch
from muxserve.engine.batch_counter import BatchCounter


def counted(counter: BatchCounter, tokens: dict[str, int], after: dict[str, int], prompts: set[str]) -> StepBatch:
    requests: dict[str, Any] = {name: SimpleNamespace(num_computed_tokens=count) for name, count in after.items()}
    return counter.count(tokens, sum(tokens.values()), requests, prompts)


def test_chunks_of_prompts_count_the_pairs_with_what_was_before() -> None:
    step = counted(BatchCounter(), {"a": 10, "b": 4}, {"a": 10, "b": 24}, {"a", "b"})
    assert step == StepBatch(True, 14, 55 + 4 * 20 + 10, 2, 0)


def test_sequences_that_decode_among_prompts_read_their_context() -> None:
    step = counted(BatchCounter(), {"a": 10, "b": 1}, {"a": 10, "b": 31}, {"a"})
    assert step == StepBatch(True, 11, 55, 2, 31)


def test_a_batch_that_goes_on_is_counted_as_if_anew() -> None:
    """Requests come, end, pause, and others come in their place; prompts of one token are prompts."""
    draw = random.Random(5)
    counter, lengths, prompts = BatchCounter(), {f"r{n}": draw.randint(1, 50) for n in range(6)}, {"r5"}
    for turn in range(300):
        prompts = {name for name in prompts if draw.random() < 0.5}
        chosen = [*lengths] if turn % 5 else draw.sample([*lengths], draw.randint(1, 6))
        if turn % 11 == 0:
            lengths.pop(next(iter(lengths)))
            lengths[f"n{turn}"] = draw.randint(1, 50)
            prompts.add(f"n{turn}")
            chosen = [*lengths]
        for name in chosen:
            lengths[name] += 1
        found = counted(counter, dict.fromkeys(chosen, 1), lengths, prompts)
        assert found == counted(BatchCounter(), dict.fromkeys(chosen, 1), lengths, prompts), turn
