"""Structured output in an engine: grammars compile off the step's path, each with the backend that it was checked with,
and one that fails costs its own request only."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import vllm.v1.structured_output as structured_output
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from muxserve.net.logs import of_request

log = logging.getLogger(__name__)

# Why a request ends although its answer is not complete.
NOTHING_LEFT = (
    "no token was left: the structured output together with allowed_token_ids, bad_words or min_tokens excludes all"
)
BROKEN = "the grammar of the structured output failed"
# Compiled side by side; each has passed the gateway's limits. They come behind what steps.
COMPILERS = 4
NICENESS = 5


def make_backend(name: str, config: VllmConfig, tokenizer: Any) -> StructuredOutputBackend:
    """vLLM's backend of that name, for the tokenizer of a model.

    Raises:
        ValueError: there is no such backend, or it cannot use the tokenizer.
    """
    backends: dict[str, Callable[..., StructuredOutputBackend]] = {
        "xgrammar": XgrammarBackend,
        "guidance": GuidanceBackend,
    }
    if name == "outlines":
        from vllm.v1.structured_output.backend_outlines import OutlinesBackend

        backends[name] = OutlinesBackend
    elif name == "lm-format-enforcer":
        from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend

        backends[name] = LMFormatEnforcerBackend
    if name not in backends:
        raise ValueError(f"there is no structured output backend {name}")
    return backends[name](config, tokenizer=tokenizer, vocab_size=config.model_config.get_vocab_size())


def load_tokenizers_later() -> None:
    """Have no manager of grammars load its model's tokenizer when it is made: that is part of every start of an engine,
    and few engines ever see a grammar. `EngineGrammars` loads it with the first one."""
    structured_output.cached_tokenizer_from_config = lambda model_config: None


class EngineGrammars(StructuredOutputManager):
    """vLLM's manager of grammars, with a backend for each request instead of the first one's for all.

    `ended` has the requests that must end since their grammar cannot go on, and why; the scheduler takes it.
    """

    tokenizer: Any

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.backend: StructuredOutputBackend | None = None
        self.ended: dict[str, str] = {}
        self._backends: dict[str, StructuredOutputBackend] = {}
        self._making = threading.Lock()
        # By identity, since some backends' grammars cannot be hashed.
        self._broken: dict[int, StructuredOutputGrammar] = {}
        self._compiling: dict[str, Future[StructuredOutputGrammar]] = {}
        self.executor = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar", initializer=_be_nice)
        if self.reasoner_cls is not None:
            self._load_tokenizer()  # what reads the reasoning of an answer needs it in the step's path

    def _load_tokenizer(self) -> None:
        if self.tokenizer is None:
            self.tokenizer = cached_tokenizer_from_config(self.vllm_config.model_config)

    def grammar_init(self, request: Request) -> None:
        if request.structured_output_request is None:
            return
        future = self.executor.submit(self._create_grammar, request)
        self._compiling[request.request_id] = future
        request.structured_output_request.grammar = future

    def forget(self, request_id: str) -> None:
        """The request is gone; its grammar is not compiled unless that has begun."""
        future = self._compiling.pop(request_id, None)
        if future is not None:
            future.cancel()

    def _create_grammar(self, request: Request) -> StructuredOutputGrammar:
        params = request.sampling_params
        assert params is not None
        assert params.structured_outputs is not None
        assert request.structured_output_request is not None
        name = params.structured_outputs._backend or "xgrammar"
        with self._making:
            self._load_tokenizer()
            if name not in self._backends:
                self._backends[name] = make_backend(name, self.vllm_config, self.tokenizer)
            backend = self._backends[name]
            if self.backend is None:
                self.backend = backend  # it makes the bit masks, which are alike
        kind, grammar = request.structured_output_request.structured_output_key
        return backend.compile_grammar(kind, grammar, stop_token_ids=params.all_stop_token_ids)

    def _fill_bitmasks(self, batch: Iterable[tuple[StructuredOutputGrammar, int, bool]]) -> None:
        for each in batch:
            try:
                super()._fill_bitmasks([each])
            except Exception:
                # What is sampled now is not accepted below, and ends the request.
                log.exception("a grammar cannot say which tokens it allows")
                assert self._grammar_bitmask is not None
                self._grammar_bitmask[each[1]].fill_(self._full_mask)
                self._broken[id(each[0])] = each[0]

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        if not request.use_structured_output or not new_token_ids:
            return True
        assert request.structured_output_request is not None
        grammar = request.structured_output_request.grammar
        if id(grammar) in self._broken:
            del self._broken[id(grammar)]
            self.ended[request.request_id] = BROKEN
            return False
        if _excluded(request, new_token_ids):
            self.ended[request.request_id] = NOTHING_LEFT
            return False
        try:
            accepted = super().accept_tokens(request, new_token_ids)
        except Exception:
            log.exception("the grammar of %s cannot go on", request.request_id, extra=of_request(request.request_id))
            self.ended[request.request_id] = BROKEN
            return False
        if not accepted:
            self.ended[request.request_id] = NOTHING_LEFT
        return accepted


def use_grammars(core: EngineCore) -> None:
    """Have `core` manage grammars as above."""
    assert isinstance(core.scheduler, Scheduler)
    stock = core.structured_output_manager
    core.structured_output_manager = core.scheduler.structured_output_manager = EngineGrammars(core.vllm_config)
    stock.clear_backend()


def _excluded(request: Request, new_token_ids: list[int]) -> bool:
    """Whether a token was sampled that the request excludes, which happens when nothing else was left."""
    params = request.sampling_params
    assert params is not None
    if params.allowed_token_ids and any(token not in params.allowed_token_ids for token in new_token_ids):
        return True
    tokens = request.output_token_ids
    for words in params.bad_words_token_ids or ():
        if list(tokens[-len(words) :]) == words:
            return True
    return request.num_output_tokens <= params.min_tokens and not params.all_stop_token_ids.isdisjoint(new_token_ids)


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
