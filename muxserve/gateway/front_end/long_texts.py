"""Texts that are long, or longer than a model can read: tokenized beside all others, and no further than is of use.

vLLM tokenizes in a thread, one for each model, so that a text of megabytes would hold up all requests of its model.
Here such texts have a thread of their own. And vLLM tokenizes a whole text before it looks at its length, with
hundreds of bytes of memory for each token. Here a text is looked at in pieces, and whatever comes after twice as many
tokens as the model's context has is cut off or refused: no answer depends on it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import State
from vllm.config import ModelConfig
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer, TokenizeParams
from vllm.utils.async_utils import make_async

# A call with at least this many characters or tokens is long.
LONG = 64 << 10
# Characters that are tokenized at once to find out how many tokens a long text has.
PIECE = 16 << 10
# A text with this many times the tokens of the context is longer than anything that can be served. Its pieces are
# tokenized one by one, and together have a few tokens more than the text.
TOO_MANY = 2
# Levels above the deepest text of a function's arguments: the three of `partial`, a request, its conversations (in a
# batch), their messages, and the contents, parts and fields of a message.
_DEPTH = 9


class CutText(str):
    """A text that is no longer than a tokenizer may get."""

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
        """Refuse to make a text of `count` tokens.

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

    def attach_chats(self, state: State, renderer: BaseRenderer[Any]) -> None:
        """Have the chats of gpt-oss rendered in the threads of other texts, and within the limits of the model. vLLM
        renders them by openai-harmony, in the event loop. `state` is that of vLLM's application."""
        chats = state.online_renderer
        if not chats.use_harmony:
            return
        limit = TextLimit(_harmony_tokens, longest(renderer.model_config))
        batches = getattr(state, "openai_serving_chat_batch", None)
        for owner, name in (
            (chats, "render_chat"),
            (chats, "render_responses"),
            (batches, "render_batch_chat_request"),
        ):
            if owner is not None:
                render = partial(_render_here, getattr(owner, name), limit)
                setattr(owner, name, make_async(render, executor=renderer._executor))

    def close(self) -> None:
        """Begin with nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def size(value: object) -> int:
    """Characters of the texts, and numbers of the lists, in what a function is given."""
    return sum(len(each) for each in _long_parts(value))


def _long_parts(value: object, depth: int = _DEPTH) -> Iterator[str | bytes | Sequence[int]]:
    """The texts and lists of tokens in `value`."""
    if isinstance(value, str | bytes):
        yield value
        return
    if not depth:
        return
    if isinstance(value, BaseModel):
        value = vars(value)
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _long_parts(each, depth - 1)
    elif isinstance(value, Sequence):
        # Only the first element says whether it is a list of tokens.
        if value and isinstance(value[0], int):
            yield value
            return
        for each in value:
            yield from _long_parts(each, depth - 1)


def _harmony_tokens(text: str) -> int:
    return len(get_encoding().encode(text, disallowed_special=()))


def _render_here(stock: Callable[..., Awaitable[Any]], limit: TextLimit, request: BaseModel, **options: Any) -> Any:
    """Render a chat of gpt-oss in this thread.

    openai-harmony keeps Python's lock for a whole conversation, so that a text that no context holds is refused before.

    Raises:
        VLLMValidationError: the texts of the request have more tokens than `limit` allows.
    """
    limit.check("".join(part for part in _long_parts((request, options)) if isinstance(part, str)))

    async def render() -> Any:
        return await stock(request, **options)

    return asyncio.run(render())


def longest(config: ModelConfig) -> int:
    """Tokens of the longest text that a model takes; an embedding model may take a longer one than its context
    holds."""
    pooler = config.pooler_config
    if pooler is not None and pooler.enable_chunked_processing:
        return pooler.max_embed_len or sys.maxsize
    return int(config.max_model_len)


def _bound(tokenizer: Any, context: int) -> TextLimit:
    """Let `tokenizer` take no text, and no list of tokens, that is too long for a context of `context` tokens."""
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
