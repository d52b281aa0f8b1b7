"""Texts that are long, or longer than a model can read: tokenized beside all others, and no further than is of use.

vLLM tokenizes in a thread, one for each model, so that a text of megabytes would hold up all requests of its model.
Here such texts have a thread of their own. And vLLM tokenizes a whole text before it looks at its length, with
hundreds of bytes of memory for each token. Here a text is looked at in pieces, and whatever comes after twice as many
tokens as the model's context has is cut off or refused: no answer depends on it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer, TokenizeParams
from vllm.utils.async_utils import make_async

# Characters, or tokens, that one call brings; from so many on it is long.
LONG = 64 << 10
# Characters that are tokenized at once to find out how many tokens a long text has.
PIECE = 16 << 10
# A text of so many tokens per token of the context is longer than anything that can be served; pieces are tokenized
# apart from each other, so that a text has a few tokens less than its pieces.
TOO_MANY = 2
# How deep texts lie in what is rendered: in a list of messages, in their contents, in their parts.
_DEPTH = 5


class CutText(str):
    """A text of which so much is left as a tokenizer may be given."""

    __slots__ = ()


class TextLimit:
    """How much of a text a model can have use for.

    Args:
        tokens: how many tokens a text has; in any thread.
        context: the model's, in tokens.
    """

    def __init__(self, tokens: Callable[[str], int], context: int) -> None:
        self._tokens = tokens
        self.context = context
        self.most = TOO_MANY * context

    def cut(self, text: str, end: bool = False) -> CutText:
        """The beginning of `text`, or its `end`, that has more than `most` tokens; all of it if there are not so
        many."""
        if isinstance(text, CutText):
            return text
        # A token is a byte at least. What a context holds has about four to each, and needs no second look.
        if len(text) * (1 if text.isascii() else 4) <= 4 * self.context:
            return CutText(text)
        found = 0
        for at in range(0, len(text), PIECE):
            piece = text[max(0, len(text) - at - PIECE) : len(text) - at] if end else text[at : at + PIECE]
            found += self._tokens(piece)
            if found > self.most:
                return CutText(text[len(text) - at - len(piece) :] if end else text[: at + len(piece)])
        return CutText(text)

    def check(self, text: str) -> CutText:
        """`text`, where all of it matters.

        Raises:
            VLLMValidationError: it has more than `most` tokens.
        """
        cut = self.cut(text)
        if len(cut) < len(text):
            raise self._too_long("prompt")
        return cut

    def check_tokens(self, count: int) -> None:
        """Refuse to make a text of so many tokens.

        Raises:
            VLLMValidationError: they are more than `most`.
        """
        if count > self.most:
            raise self._too_long("tokens")

    def _too_long(self, parameter: str) -> VLLMValidationError:
        return VLLMValidationError(
            f"this is more than {self.most} tokens, and the model's maximum context length is {self.context}; send it "
            "in parts",
            parameter=parameter,
        )


class LongTexts:
    """The threads of one gateway that render and tokenize what is long, for all its models.

    Args:
        threads: how many. Tokenizers leave Python's lock to others, but not the cores.
    """

    def __init__(self, threads: int = max(1, (os.cpu_count() or 1) // 4)) -> None:
        self._executor = ThreadPoolExecutor(threads, "long-texts")

    def attach(self, renderer: BaseRenderer[Any]) -> None:
        """Have `renderer` work within the limits of its model, and on what is long in these threads."""
        if renderer.tokenizer is not None:
            limit = _bound(renderer.tokenizer, longest(renderer.model_config))
            stock: Callable[..., Any] = renderer._tokenize_prompt

            def tokenize(prompt: Mapping[str, Any], params: TokenizeParams) -> Any:
                if params.truncation_side is not None and params.truncate_prompt_tokens is not None:
                    # vLLM tokenizes all of it, and cuts the tokens on that side.
                    text = limit.cut(prompt["prompt"], end=params.truncation_side == "left")
                    prompt = {**prompt, "prompt": text}
                return stock(prompt, params)

            renderer._tokenize_prompt_async = make_async(tokenize, executor=renderer._executor)
        short = renderer._executor.submit

        def submit(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            given = (function.args, function.keywords) if isinstance(function, partial) else ()
            put = self._executor.submit if size((given, args, kwargs)) >= LONG else short
            return put(function, *args, **kwargs)

        renderer._executor.submit = submit

    def close(self) -> None:
        """Begin with nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def size(value: object, depth: int = _DEPTH + 3) -> int:
    """Characters of the texts, and numbers of the lists, in what a function is given."""
    if isinstance(value, str | bytes):
        return len(value)
    if not depth:
        return 0
    if isinstance(value, Mapping):
        return sum(size(each, depth - 1) for each in value.values())
    if isinstance(value, Sequence):
        # Of a list of tokens no element is looked at but the first.
        if value and isinstance(value[0], int):
            return len(value)
        return sum(size(each, depth - 1) for each in value)
    return 0


def longest(config: ModelConfig) -> int:
    """Tokens of the longest text that a model takes; embeddings can be made of a longer one than the context holds."""
    pooler = config.pooler_config
    if pooler is not None and pooler.enable_chunked_processing:
        return pooler.max_embed_len or sys.maxsize
    return int(config.max_model_len)


def _bound(tokenizer: Any, context: int) -> TextLimit:
    """Let `tokenizer` take no text that is too long for a context of so many tokens, and no tokens."""
    stock: type = type(tokenizer)

    def tokens(text: str) -> int:
        return len(stock.__call__(tokenizer, text, add_special_tokens=False)["input_ids"])

    limit = TextLimit(tokens, context)

    class BoundedTokenizer(stock):
        def __call__(self, text: Any = None, text_pair: Any = None, *args: Any, **kwargs: Any) -> Any:
            # What is truncated, or only looked at to be truncated, may be cut before that.
            if kwargs.get("truncation") or kwargs.get("return_offsets_mapping"):
                end = self.truncation_side == "left"
                text, text_pair = (limit.cut(t, end) if isinstance(t, str) else t for t in (text, text_pair))
            else:
                text, text_pair = (limit.check(t) if isinstance(t, str) else t for t in (text, text_pair))
            return super().__call__(text, text_pair, *args, **kwargs)

        def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(token_ids, Sequence):
                limit.check_tokens(len(token_ids))
            return super().decode(token_ids, *args, **kwargs)

    BoundedTokenizer.__name__ = f"Bounded{stock.__name__}"
    tokenizer.__class__ = BoundedTokenizer
    return limit
