"""vLLM's configuration of a model's front end, from its options in the fleet file."""

from __future__ import annotations

import copy
import dataclasses
from argparse import Namespace
from functools import cache

from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from muxserve.spec import ModelSpec
from muxserve.vllm.args import frontend_args
from muxserve.vllm.gateway_seam import FrontendArgs, make_arg_parser


def configure(model: ModelSpec) -> tuple[Namespace, VllmConfig]:
    """vLLM's configuration of the front end of `model`: server options and engine options.

    The model's `engine_args` may hold options of either kind, named as on vLLM's command line.

    Raises:
        ValueError: an option that vLLM does not have, or a value that it refuses.
    """
    options = frontend_args(model)
    engine_names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    server_names = {field.name for field in dataclasses.fields(FrontendArgs)}
    unknown = sorted(set(options) - engine_names - server_names)
    if unknown:
        raise ValueError(f"model {model.name}: vLLM has no option {', '.join(unknown)}")
    engine_args = AsyncEngineArgs(**{name: value for name, value in options.items() if name in engine_names})
    config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    # There is more than one engine process, so that none of them can have what the front end has sent before: it keeps
    # its preprocessed images to itself.
    config.parallel_config._api_process_count = 2
    # What an engine of its own would have reported when ready.
    config.cache_config.num_gpu_blocks = model.num_blocks

    args = copy.copy(_default_args())
    for name, value in options.items():
        setattr(args, name, value)
    args.structured_outputs_config = config.structured_outputs_config
    args.enable_log_requests = False
    args.disable_log_stats = True
    args.disable_fastapi_docs = True
    # It leaves a query's vectors in one engine for the requests that follow, and engines die.
    args.enable_flash_late_interaction = False
    return args, config


@cache
def _default_args() -> Namespace:
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    return args
