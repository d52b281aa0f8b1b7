"""What a grammar must pass before an engine sees it: vLLM's own validation, its compiler, and a first token.

Runs in processes of the grammar compiler, see `compiler_process`: it takes what time and memory the grammar makes it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar
from vllm.v1.structured_output.request import get_structured_output_key

from muxserve.engine.grammars import make_backend
from muxserve.gateway.front_end.configuration import configure
from muxserve.gateway.grammars.messages import CompileResult, Constraints
from muxserve.spec import ModelSpec

# Where in its sources the compiler found it, before what it found.
_SOURCE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ")
_LONGEST_REASON = 500
# What most grammars are compiled by.
_USUAL = "xgrammar"


class Checker:
    """Compiles grammars for one model with the tokenizer and the backends that its engines have.

    Raises:
        ValueError: vLLM refuses the model or its options.
        OSError: the tokenizer cannot be read.
    """

    def __init__(self, model: ModelSpec) -> None:
        _, self._config = configure(model)
        self._tokenizer = cached_tokenizer_from_config(model_config=self._config.model_config)
        self._backends: dict[str, StructuredOutputBackend] = {}
        configured = self._config.structured_outputs_config.backend
        self.prepare(_USUAL if configured == "auto" else configured)

    def prepare(self, backend: str) -> StructuredOutputBackend:
        """The part of compiling that does not depend on a grammar."""
        if backend not in self._backends:
            self._backends[backend] = make_backend(backend, self._config, self._tokenizer)
        return self._backends[backend]

    def check(self, job: int, constraints: Constraints) -> CompileResult:
        """Compile. What a grammar may have wrong is an answer.

        Raises:
            MemoryError: there was not enough.
        """
        try:
            structured = StructuredOutputsParams(**constraints.structured)
            before = dict(vars(structured))
            params = SamplingParams(structured_outputs=structured)
            params._validate_structured_outputs(
                self._config.model_config, self._config.structured_outputs_config, self._tokenizer
            )
            assert structured._backend is not None
            backend = self.prepare(structured._backend)
            stops = set(constraints.stops)
            grammar = backend.compile_grammar(*get_structured_output_key(structured), stop_token_ids=stops or None)
            nothing = _no_first_token(backend, grammar, constraints)
        except MemoryError:
            raise
        except Exception as error:  # each compiler has types of its own
            if "bad_alloc" in str(error):
                raise MemoryError from error
            return CompileResult(job, "refused", _tidy(str(error) or type(error).__name__))
        if nothing:
            return CompileResult(job, "refused", nothing)
        changes = {name: value for name, value in vars(structured).items() if value != before[name]}
        return CompileResult(job, "accepted", changes=changes)


def _no_first_token(
    backend: StructuredOutputBackend, grammar: StructuredOutputGrammar, constraints: Constraints
) -> str:
    """Why no token can be the first; empty if one can."""
    mask = backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(mask, 0)
    # llguidance says only now what it failed with.
    matcher: Any = getattr(grammar, "ll_matcher", None)
    if matcher is not None and (error := matcher.get_error()):
        return _tidy(error)
    left = _tokens(mask.numpy())
    if not left.any():
        return "the grammar allows no token: it is empty, or refers to nothing but itself"
    if constraints.allowed is not None:
        only = np.zeros_like(left)
        only[_within(left, constraints.allowed)] = True
        left &= only
    left[_within(left, constraints.excluded)] = False
    if constraints.min_tokens > 0:
        left[_within(left, constraints.stops)] = False
    if not left.any():
        return (
            "no token can be the first of the answer: the structured output together with allowed_token_ids, "
            "bad_words, min_tokens and the tokens that end an answer excludes them all"
        )
    return ""


def _within(tokens: npt.NDArray[np.bool_], ids: list[int]) -> list[int]:
    return [token for token in ids if 0 <= token < len(tokens)]


def _tokens(mask: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Which tokens a row of a bit mask allows."""
    return np.unpackbits(mask.reshape(-1).view(np.uint8), bitorder="little").astype(np.bool_)


def _tidy(text: str) -> str:
    text = _SOURCE.sub("", text).strip()
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
