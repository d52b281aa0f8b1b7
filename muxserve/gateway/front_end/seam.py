"""The one place where stock vLLM front ends are built on our engine client, see
`muxserve.vllm.gateway_internals` for what that relies on."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import importlib
import json
import logging
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.envs import enable_envs_cache
from vllm.exceptions import GracefulHTTPError
from vllm.inputs import TokensPrompt
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient

from muxserve.gateway.front_end.adapters import adapter_requests
from muxserve.gateway.front_end.configuration import configure
from muxserve.gateway.front_end.engine_client import UnitEngineClient
from muxserve.gateway.front_end.images import fetch_nothing
from muxserve.gateway.front_end.long_texts import TOO_MANY, LongTexts, longest
from muxserve.gateway.front_end.stored_responses import attach
from muxserve.gateway.http.anthropic_errors import keep_reasons
from muxserve.gateway.http.responses import ResponseStore
from muxserve.gateway.http.served_app import POSTS, ServedApp
from muxserve.gateway.status.vllm_metrics import stat_logger
from muxserve.net.process import trim
from muxserve.spec import ModelSpec
from muxserve.vllm import language_models
from muxserve.vllm.gateway_internals import MODEL_CACHES
from muxserve.vllm.gateway_seam import chat_templates
from muxserve.vllm.tasks import tasks_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ModelFrontEnd:
    """One model's stock front end: `llm` makes requests of text, `models` knows vLLM's names (once there are). `names`
    are those that clients may ask for the model by, its own first."""

    model: ModelSpec
    client: UnitEngineClient
    llm: AsyncLLM
    args: Namespace
    registry: CollectorRegistry
    names: tuple[str, ...] = ()
    models: OpenAIServingModels | None = None


def make_llm(model: ModelSpec, client: UnitEngineClient, texts: LongTexts) -> ModelFrontEnd:
    """A stock `AsyncLLM` for `model` whose engine is `client`, and whose long texts are for `texts`; one at a time, in
    any thread but that of the event loop.

    Raises:
        ValueError: vLLM refuses the model or its options.
        OSError: the checkpoint cannot be read.
    """
    args, config = configure(model)
    fetch_nothing()
    client.tasks = tasks_of(config.model_config)
    client.vocabulary = config.model_config.get_vocab_size()
    registry = CollectorRegistry()
    stock = EngineCoreClient.__dict__["make_async_mp_client"]
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: client)
    try:
        llm = AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[stat_logger(model.name, registry)],
            # No log lines; a logger of one's own still gets the statistics.
            disable_log_stats=True,
        )
    finally:
        EngineCoreClient.make_async_mp_client = stock
    # `client` sees to it, elsewhere: compilers must not run in a process that serves.
    llm.input_processor.structured_outputs_config = None
    client.bind(llm.output_processor)
    texts.attach(llm.renderer)
    return ModelFrontEnd(model, client, llm, args, registry)


async def serve(front_end: ModelFrontEnd, texts: LongTexts, gateway: int, store: ResponseStore | None) -> ServedApp:
    """vLLM's own OpenAI application over `front_end.llm`, which begins to deliver outputs. Its long texts are for
    `texts`; `store` keeps the responses of this gateway."""
    front_end.llm._run_output_handler()
    tasks = front_end.client.get_supported_tasks()
    app: FastAPI = build_app(front_end.args, tasks, front_end.llm.model_config)
    await init_app_state(front_end.llm, app.state, front_end.args, tasks)
    texts.attach_chats(app.state, front_end.llm.renderer)
    # vLLM's handler of its engine's errors would end the server, and fails itself if there is none. Ours goes on.
    app.state.server = SimpleNamespace(should_exit=False)
    # Models that are pooled have neither.
    messages = getattr(app.state, "anthropic_serving_messages", None)
    if messages is not None:
        keep_reasons(messages)
    responses = getattr(app.state, "openai_serving_responses", None)
    if responses is not None:
        attach(responses, front_end.model.name, gateway, store)
    posts = POSTS.intersection(getattr(route, "path", "") for route in app.routes)
    front_end.models = app.state.openai_serving_models
    sees = front_end.model.sees_images
    most = TOO_MANY * longest(front_end.llm.model_config)
    made = ServedApp(app, {}, app.openapi, posts, sees, most, front_end.model.name)
    return await with_names(front_end, made)


async def with_names(front_end: ModelFrontEnd, served: ServedApp) -> ServedApp:
    """`served` under the names that the model has now, and with its adapters of now, each with a card of its own.
    Requests that run, or wait for their turn, keep the name or the adapter that they came with."""
    models, names, adapters = front_end.models, front_end.names, front_end.model.adapters
    assert models is not None
    known = [each.name for each in models.base_model_paths]
    new = [each for each in (*names, front_end.model.name) if each not in known]
    models.base_model_paths += [BaseModelPath(each, front_end.args.model) for each in dict.fromkeys(new)]
    models.lora_requests = adapter_requests(names[0], adapters)
    listed = {card.id: card.model_dump() for card in (await models.show_available_models()).data}
    return dataclasses.replace(served, cards={name: listed[name] for name in (*names, *adapters)})


async def check(front_end: ModelFrontEnd) -> None:
    """Have the model answer a request, such as no client has sent.

    Raises:
        ValueError: it has not answered, or with nothing.
    """
    llm, name = front_end.llm, front_end.model.name
    prompt: TokensPrompt = {"prompt_token_ids": [0]}
    tasks = front_end.client.get_supported_tasks()
    try:
        if "generate" in tasks:
            # Both phases have something to do where the model has room for two tokens.
            tokens = min(2, front_end.model.max_len - 1)
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            made = [output async for output in llm.generate(prompt, params, f"check-{name}")]
            whole = bool(made) and made[-1].finished and bool(made[-1].outputs[0].token_ids)
        else:
            vectors = [each async for each in llm.encode(prompt, PoolingParams(task=tasks[0]), f"check-{name}")]
            whole = bool(vectors) and vectors[-1].finished
    except GracefulHTTPError as error:
        raise ValueError(str(error)) from None
    if not whole:
        raise ValueError("the answer to its first request is empty")


async def end(front_end: ModelFrontEnd) -> None:
    """Let go of a front end that has no request any more."""
    loop = front_end.llm.output_handler
    front_end.llm.shutdown()
    if loop is not None:
        await asyncio.wait([loop])


async def forget_models() -> None:
    """Have nothing kept of front ends that have ended: neither by vLLM, which has caches of tokenizers, templates and
    settings by path, nor by Python, for which a front end is a large cycle."""
    for module, name in MODEL_CACHES:
        known = getattr(importlib.import_module(module), name)
        known.clear() if isinstance(known, dict) else known.cache_clear()
    chat_templates.cache_clear()
    gc.collect()
    await asyncio.to_thread(trim)


def settle() -> None:
    """All front ends are built: vLLM's settings stay, and need not be read from the environment for every token."""
    enable_envs_cache()


def go_on(front_end: ModelFrontEnd) -> None:
    """Start the front end's output loop again whenever it ends by itself, because vLLM could not read an output.

    All requests that the front end had end with the loop's error; later ones are served, and other models' requests
    notice nothing. A server of one model would end here.
    """
    llm = front_end.llm
    tell_all = llm.output_processor.propagate_error

    def failed(error: Exception) -> None:
        log.error("the output loop of %s failed, and the requests that it had with it", front_end.model.name)
        # Its last deed. To whoever hears the error this front end shall not look dead.
        llm.output_handler = None
        tell_all(error)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            watch()

    def watch() -> None:
        llm._run_output_handler()  # unless a new request has done so already
        assert llm.output_handler is not None
        llm.output_handler.add_done_callback(ended)

    llm.output_processor.propagate_error = failed
    watch()


def register_architectures(checkpoints: Mapping[str, bool]) -> None:
    """Let vLLM look at the classes of these checkpoints in this process; whether a multi-modal one is served as its
    language model alone, they say.

    By itself it starts another Python process per architecture, which imports vLLM anew, the first time on a machine.
    """
    for checkpoint, text_only in checkpoints.items():
        try:
            config = json.loads((Path(checkpoint) / "config.json").read_text())
            if not (text_only and language_models.register(config.get("model_type"))):
                language_models.register_classes(config)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            pass  # not a local checkpoint, or not one; vLLM will say
        except Exception:
            # Who is to serve it says why that cannot be; others are served.
            log.exception("the classes of %s cannot be looked at", checkpoint)
