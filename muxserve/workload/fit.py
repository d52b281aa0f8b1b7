"""Whether requests can be served at all: prompt and answer together are at most the context of their model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from muxserve.workload.errors import WorkloadError
from muxserve.workload.source import Workload
from muxserve.workload.trace import TraceRequest


class Context(NamedTuple):
    """The longest sequence of a model, in tokens. One that does not generate answers a prompt with a vector."""

    tokens: int
    generates: bool = True

    def holds(self, request: TraceRequest) -> bool:
        """Whether a request has room in it."""
        return request.prompt_tokens + (request.output_tokens if self.generates else 0) <= self.tokens


def check_fits(workload: Workload, contexts: Mapping[str, Context]) -> None:
    """Some request to each model, if there are any, fits into its context. Single ones that do not are refused by
    whoever serves them, as live; a workload of nothing else is a mistake.

    Raises:
        WorkloadError: no request to some model fits, or the workload cannot be read.
        OSError: as the workload.
    """
    too_long = _never_fitting(workload, contexts)
    if not too_long:
        return
    name, (number, request) = next(iter(too_long.items()))
    context = contexts[name]
    answer = f" and an answer of {request.output_tokens:,}" if context.generates else ""
    raise WorkloadError(
        f"{workload.about}: no request to {name} fits into its context of {context.tokens:,} tokens, so that no engine "
        f"could serve it: the first, request {number}, has a prompt of {request.prompt_tokens:,} tokens{answer}. Ask "
        "for shorter ones, or cap them with max_prompt=... and max_output=... in the workload"
    )


def _never_fitting(
    requests: Iterable[TraceRequest], contexts: Mapping[str, Context]
) -> dict[str, tuple[int, TraceRequest]]:
    """Models without any fitting request, with the number of their first request, and that request."""
    fits: set[str] = set()
    found: dict[str, tuple[int, TraceRequest]] = {}
    for number, request in enumerate(requests, 1):
        name = request.model
        if name in fits or name not in contexts:
            continue
        if contexts[name].holds(request):
            fits.add(name)
            found.pop(name, None)
            if len(fits) == len(contexts):
                break
        else:
            found.setdefault(name, (number, request))
    return found
