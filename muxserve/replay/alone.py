"""What a request takes alone: measured one request at a time before the replay, as the unit of SLO scales.

TTFT is taken to grow linearly with the prompt, and every later token to take the same time, which holds well enough
between the lengths that are measured; docs/replay.md says where it does not.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from muxserve.metrics import Reference, RequestRecord
from muxserve.replay.dialect import Dialect
from muxserve.replay.endpoint import Endpoint, EndpointAnswer, EndpointError
from muxserve.replay.prompts import Prompts

_OUTPUT = 16
_REPEATS = 3
_LEAST = 1e-6


@dataclass(frozen=True)
class Alone:
    """One model's latencies without company, seconds. `per_output_token` is None if its answers have one token."""

    base: float
    per_prompt_token: float
    per_output_token: float | None

    def of(self, record: RequestRecord) -> Reference:
        """What that request would take."""
        ttft = max(_LEAST, self.base + self.per_prompt_token * record.prompt_tokens)
        per_token = self.per_output_token
        return Reference(ttft + (per_token or 0.0) * max(0, record.output_tokens - 1), ttft, per_token)


async def measure_alone(
    endpoint: Endpoint, dialect: Dialect, prompts: Prompts, model: str, short: int, long: int
) -> Alone:
    """Ask for prompts of `short` and `long` tokens, in turn, nothing else being under way.

    Raises:
        EndpointError: a request failed.
    """
    answers: dict[int, list[EndpointAnswer]] = {}
    # Numbers below zero are free: the replay counts from 1. The first pair warms up.
    for repeat in range(_REPEATS + 1):
        for offset, tokens in enumerate((short, long)):
            body = dialect.body(prompts, -1 - 2 * repeat - offset, model, tokens, _OUTPUT)
            answer = await endpoint.send(dialect, body)
            if answer.error:
                raise EndpointError(f"{model} failed while its latencies alone were measured: {answer.error}")
            if repeat:
                answers.setdefault(tokens, []).append(answer)
    return fit(answers)


def fit(answers: dict[int, list[EndpointAnswer]]) -> Alone:
    """From answers to prompts of one or two lengths (tokens -> answers)."""
    points = []
    tpots = []
    for tokens, given in answers.items():
        points.append((tokens, statistics.median((a.first or 0.0) - a.sent for a in given)))
        tpots += [((a.last or 0.0) - (a.first or 0.0)) / (a.tokens - 1) for a in given if a.tokens > 1]
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = max(0.0, (y1 - y0) / (x1 - x0)) if x1 > x0 else 0.0
    return Alone(max(0.0, y0 - slope * x0), slope, max(_LEAST, statistics.median(tpots)) if tpots else None)
