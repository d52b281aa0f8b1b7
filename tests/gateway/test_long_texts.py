"""Long texts: in a thread of their own, and tokenized no further than a model can read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.datastructures import State
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.parser import harmony_utils
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer, TokenizeParams, online_renderer, renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

from muxserve.gateway.front_end.configuration import configure
from muxserve.gateway.front_end.long_texts import LONG, PIECE, LongTexts, TextLimit, size
from tests.gateway.unit_specs import model
from tests.support.tiny_checkpoint import tiny_checkpoint

# The tokens of the tiny checkpoints are bytes.
CONTEXT = 2048
PLAIN = TokenizeParams(max_total_tokens=None)
PROMPT = TokenizeParams(max_total_tokens=CONTEXT, max_output_tokens=1)


class TalkRequest(BaseModel):
    """The part of requests of chats that is looked at here."""

    messages: list[dict[str, str]]


class Counting:
    """A tokenizer of which each character is a token, and what it was given."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self, text: str) -> int:
        self.read += len(text)
        return len(text)


@pytest.fixture(scope="module")
def texts() -> Iterator[LongTexts]:
    made = LongTexts(1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def stock() -> BaseRenderer[Any]:
    _, config = configure(model("m", tiny_checkpoint(), max_len=CONTEXT))
    return renderer_from_config(config)


@pytest.fixture(scope="module")
def renderer(stock: BaseRenderer[Any], texts: LongTexts) -> BaseRenderer[Any]:
    made = renderer_from_config(stock.config)
    texts.attach(made)
    return made


async def tokens(renderer: BaseRenderer[Any], text: str, params: TokenizeParams = PLAIN) -> list[int]:
    found: Any = await renderer.tokenize_prompt_async({"prompt": text}, params)
    return list(found["prompt_token_ids"])


# ------------------------------------------------------------ how much of a text


def test_no_more_is_read_than_shows_that_a_text_is_too_long() -> None:
    counting = Counting()
    limit = TextLimit(counting, 10_000)
    text = "x" * (4 << 20)
    cut = limit.cut(text)
    assert limit.most < len(cut) <= limit.most + PIECE
    assert counting.read == len(cut)
    assert limit.cut(cut) is cut
    assert counting.read == len(cut)
    with pytest.raises(VLLMValidationError, match=r"more than 20000 tokens, .* maximum context length is 10000"):
        limit.check(text)


def test_what_a_context_holds_is_not_read_twice() -> None:
    counting = Counting()
    limit = TextLimit(counting, 10_000)
    assert limit.check("x" * 40_000) == "x" * 40_000
    assert counting.read == 0
    # A character of others may be several tokens.
    assert len(limit.cut("\N{SNOWMAN}" * 10_001)) == 10_001
    assert counting.read == 10_001


def test_the_end_of_a_text_is_what_is_left_of_it() -> None:
    limit = TextLimit(Counting(), 10_000)
    text = "".join(chr(33 + n % 90) for n in range(200_001))
    cut = limit.cut(text, end=True)
    assert text.endswith(cut)
    assert limit.most < len(cut) <= limit.most + PIECE


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", 4),
        ([1] * 100, 100),
        (([{"role": "user", "content": [{"type": "text", "text": "x" * 50}]}],), 58),
        ({"prompt": "abc", "n": 5, "x": None}, 3),
        (object(), 0),
        (TalkRequest(messages=[{"role": "user", "content": "x" * 50}]), 54),
        ([[[[[[[[[["deep"]]]]]]]]]], 0),
    ],
)
def test_the_size_of_what_is_rendered(value: object, expected: int) -> None:
    assert size(value) == expected


# ------------------------------------------------------------ a real renderer


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("count", [-1, 1, 100])
async def test_texts_are_truncated_as_ever(
    renderer: BaseRenderer[Any], stock: BaseRenderer[Any], side: Any, count: int
) -> None:
    text = "Some words, and \N{SNOWMAN}. " * 200
    assert await tokens(renderer, text) == await tokens(stock, text)
    params = TokenizeParams(max_total_tokens=CONTEXT, truncate_prompt_tokens=count, truncation_side=side)
    for times in (1, 50):  # as long as it may be, and cut before it is tokenized
        found = await tokens(renderer, text * times, params)
        assert len(found) == (CONTEXT if count < 0 else count)
        assert found == await tokens(stock, text * times, params)


async def test_a_text_that_no_context_holds_is_refused(renderer: BaseRenderer[Any]) -> None:
    for text in ("x" * (4 << 20), "x " * (2 << 20)):
        with pytest.raises(VLLMValidationError, match="maximum context length is 2048"):
            await tokens(renderer, text)
        with pytest.raises(VLLMValidationError, match="maximum context length is 2048"):
            await tokens(renderer, text, PROMPT)
    assert len(await tokens(renderer, "x" * 4000)) >= 4000
    with pytest.raises(VLLMValidationError, match="send it in parts"):
        await renderer.tokenize_prompt_async(
            {"prompt_token_ids": [9] * 1_000_000}, TokenizeParams(max_total_tokens=None, needs_detokenization=True)
        )


async def test_pairs_are_cut_as_they_are_truncated(renderer: BaseRenderer[Any]) -> None:
    tokenizer = renderer.get_tokenizer()
    kwargs = {"truncation": True, "max_length": CONTEXT}
    short = tokenizer("query", "document" * 1000, **kwargs)["input_ids"]
    assert tokenizer("query", "document" * 100_000, **kwargs)["input_ids"] == short


async def test_short_texts_do_not_wait_for_long_ones(renderer: BaseRenderer[Any], texts: LongTexts) -> None:
    busy, go = threading.Event(), threading.Event()

    def occupy() -> None:
        busy.set()
        go.wait()

    texts._executor.submit(occupy)
    busy.wait()
    try:
        side = TokenizeParams(max_total_tokens=CONTEXT, truncate_prompt_tokens=5, truncation_side="right")
        long = asyncio.ensure_future(tokens(renderer, "x" * LONG, side))
        assert len(await tokens(renderer, "short")) >= 5
        assert not long.done()
        # The client of another one leaves: nobody works on it.
        gone = asyncio.ensure_future(tokens(renderer, "y" * LONG, side))
        await asyncio.sleep(0)
        gone.cancel()
    finally:
        go.set()
    assert len(await long) == 5


# ------------------------------------------------------------ chats of gpt-oss


def chats_of(renderer: BaseRenderer[Any]) -> State:
    """The part of the state of vLLM's application that renders chats."""
    chats = OnlineRenderer(
        renderer.model_config,
        renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )
    batches = OpenAIServingChatBatch.__new__(OpenAIServingChatBatch)
    batches.renderer, batches.online_renderer = renderer, chats

    async def known(_request: object) -> None:
        """A model that is served."""

    batches._check_model, batches._preflight = known, lambda: None
    return State({"online_renderer": chats, "openai_serving_chat_batch": batches})


@pytest.fixture(scope="module")
def gpt_oss() -> BaseRenderer[Any]:
    _, config = configure(model("m", tiny_checkpoint("gpt_oss"), max_len=CONTEXT))
    return renderer_from_config(config)


@pytest.fixture(scope="module")
def gpt_oss_chats(gpt_oss: BaseRenderer[Any], texts: LongTexts) -> State:
    made = renderer_from_config(gpt_oss.config)
    texts.attach(made)
    state = chats_of(made)
    texts.attach_chats(state, made)
    return state


async def rendered(state: State, kind: str, text: str) -> list[int]:
    """The tokens of a chat that asks `text`."""
    messages: Any = [{"role": "user", "content": text}]
    if kind == "responses":
        answer = await state.online_renderer.render_responses(ResponsesRequest(model="m", input=text))
        return list(answer.engine_input["prompt_token_ids"])
    if kind == "batch":
        request = BatchChatCompletionRequest(model="m", messages=[messages])
        _, _, inputs = await state.openai_serving_chat_batch.render_batch_chat_request(request)
    else:
        _, inputs = await state.online_renderer.render_chat(ChatCompletionRequest(model="m", messages=messages))
    return list(inputs[0]["prompt_token_ids"])


@pytest.mark.parametrize("kind", ["chat", "batch", "responses"])
async def test_chats_of_gpt_oss_are_rendered_beside_the_event_loop(
    gpt_oss: BaseRenderer[Any], gpt_oss_chats: State, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    stock = harmony_utils.render_for_completion

    def render(messages: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return stock(messages)

    monkeypatch.setattr(online_renderer, "render_for_completion", render)
    long = "word " * (LONG // 4)
    for text in ("short", long[: LONG // 8]):
        assert await rendered(gpt_oss_chats, kind, text) == await rendered(chats_of(gpt_oss), kind, text)
    assert [name == threading.main_thread().name for name in threads] == [False, True] * 2
    with pytest.raises(VLLMValidationError, match=r"more than 4096 tokens"):
        await rendered(gpt_oss_chats, kind, long)
    assert len(threads) == 4  # it was refused before it was rendered


async def test_short_chats_of_gpt_oss_do_not_wait_for_long_ones(gpt_oss_chats: State, texts: LongTexts) -> None:
    go = threading.Event()
    texts._executor.submit(go.wait)
    try:
        long = asyncio.ensure_future(rendered(gpt_oss_chats, "chat", "word " * LONG))
        assert await rendered(gpt_oss_chats, "chat", "short")
        assert not long.done()
    finally:
        go.set()
    with pytest.raises(VLLMValidationError):
        await long
