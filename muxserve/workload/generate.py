"""Traces from a seed: arrivals of several models, each with its own rate and lengths."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from muxserve.workload.arrivals import POISSON, Arrivals
from muxserve.workload.conversations import Conversations
from muxserve.workload.lengths import Lengths
from muxserve.workload.shapes import ModelPosition
from muxserve.workload.trace import TraceRequest


@dataclass(frozen=True)
class ModelLoad:
    """What one model gets: `rate` requests per second, the lengths of its prompts and answers in tokens, and how its
    arrivals are spread over time. With `conversations` requests are turns, and lengths are of what each adds."""

    rate: float
    prompt: Lengths
    output: Lengths
    arrivals: Arrivals = POISSON
    conversations: Conversations | None = None


def _of_model(
    name: str, load: ModelLoad, duration: float, seed: int, position: ModelPosition
) -> Iterator[TraceRequest]:
    if load.conversations is not None:
        yield from load.conversations.requests(name, load.rate, load.prompt, load.output, duration, seed)
        return
    # Each model draws from its own streams: changing one model leaves the requests of the others alone.
    arrivals = random.Random(f"{seed}/{name}/arrivals")
    lengths = random.Random(f"{seed}/{name}/lengths")
    for arrival in load.arrivals.times(load.rate, duration, arrivals, position):
        yield TraceRequest(round(arrival, 6), name, load.prompt.sample(lengths), load.output.sample(lengths))


def generate(loads: Mapping[str, ModelLoad], duration: float, seed: int) -> Iterator[TraceRequest]:
    """The requests of all models below `duration` seconds in order of arrival, streamed. Arrivals are whole
    microseconds. The same arguments give the same requests. Shapes that put models apart do so in the order of
    `loads`.

    Raises:
        ValueError: a rate or the duration is negative or not finite.
    """
    streams = [
        _of_model(name, load, duration, seed, ModelPosition(number, len(loads)))
        for number, (name, load) in enumerate(loads.items())
    ]
    return heapq.merge(*streams, key=lambda request: (request.arrival, request.model))
