"""What engines do in one way with one version of vLLM and in another way with the next."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from muxserve.vllm.since import since


def fail_for_grammar(scheduler: Scheduler, request: Request, reason: str) -> None:
    """Have a waiting request end with an error at the next step, because its grammar does not hold its tokens."""
    if since("0.33.0"):
        from vllm.outputs import RequestError

        scheduler.grammar_compile_error_reqs[request.request_id] = RequestError("validation_error", reason)
    else:
        scheduler.grammar_compile_error_reqs.add(request.request_id)
