"""A request of the engine's own: to warm up, and to see whether it still computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.tasks import POOLING_TASKS
from vllm.v1.engine.core import EngineCore

from muxserve.engine.leased_scheduler import LeasedScheduler
from muxserve.engine.synthetic import tokens_request

_PROMPT_TOKENS = 8
# A probe that finds no pages for so long says nothing.
_MOST_STEPS = 100


def probe(core: EngineCore, max_tokens: int, writing: Callable[[], AbstractContextManager[None]]) -> None:
    """Run a short request alone, while nothing is in flight; what else is in the engine sits still. `writing` guards
    what is written into the pool. An encoder-decoder is not tried.

    Raises:
        Exception: the engine cannot compute it, for whatever reason.
    """
    scheduler = core.scheduler
    assert isinstance(scheduler, LeasedScheduler)
    if core.vllm_config.model_config.is_encoder_decoder:
        return  # which computes nothing without an image or a sound
    vocabulary = core.vllm_config.model_config.get_vocab_size()
    config = core.vllm_config.model_config
    pooling = None
    if config.runner_type == "pooling":
        task = next(task for task in core.get_supported_tasks() if task in POOLING_TASKS)
        pooling = PoolingParams(task=task)
        pooling.verify(config)
    sampling = None if pooling else SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompt = [i % vocabulary for i in range(_PROMPT_TOKENS)]
    request = tokens_request("probe", prompt, sampling, pooling, cache_salt="probe")
    before, scheduler.alone = scheduler.alone, request.request_id
    holding, scheduler.holding = scheduler.holding, False
    try:
        core.add_request(*core.preprocess_add_request(request))
        steps = 0
        # A step may go on after the call that began it.
        with writing():
            while request.request_id in scheduler.requests or core.batch_queue:
                core.step_fn()
                scheduler.pool.end_step()
                steps += 1
                if steps == _MOST_STEPS:
                    core.abort_requests([request.request_id])
    finally:
        scheduler.alone, scheduler.holding = before, holding
