"""What engines do in one way with one version of vLLM and in another way with the next."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from muxserve.vllm.since import since


def runner_choice(device: str) -> dict[str, str]:
    """What vLLM must find in the environment of engines on `device` (cpu or cuda) when it makes their configuration. On
    CPUs its second runner needs a Triton for CPUs, which is not on PyPI."""
    return {"VLLM_USE_V2_MODEL_RUNNER": str(int(device == "cuda" and since("0.33.0")))}


def fail_for_grammar(scheduler: Scheduler, request: Request, reason: str) -> None:
    """Have a waiting request end with an error at the next step, because its grammar does not hold its tokens."""
    if since("0.33.0"):
        from vllm.outputs import RequestError

        scheduler.grammar_compile_error_reqs[request.request_id] = RequestError("validation_error", reason)
    else:
        scheduler.grammar_compile_error_reqs.add(request.request_id)
