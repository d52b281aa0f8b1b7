"""What different servers understand: how a request is written for them, and how their streams are read."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from muxserve.replay.prompts import Prompts


@dataclass(frozen=True)
class Dialect:
    """How to ask. `ids`: prompts are token ids, exact; else text of about as many tokens, `words_per_token` words for
    each. `ignore_eos`: answers are as long as asked. `chat`: chat completions, for servers without completions."""

    ids: bool
    ignore_eos: bool
    chat: bool = False
    words_per_token: float = 1.0

    @property
    def path(self) -> str:
        """Below the endpoint's URL."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def exact(self) -> bool:
        """Prompts and answers have exactly the workload's lengths."""
        return self.ids and self.ignore_eos

    def words(self) -> str:
        """For a person."""
        prompts = "prompts as token ids" if self.ids else "prompts as text of about the wanted length"
        answers = "answers of exactly the wanted length" if self.ignore_eos else "answers that may end early"
        return f"{'chat completions' if self.chat else 'completions'}, {prompts}, {answers}"

    def body(self, prompts: Prompts, number: int, model: str, prompt_tokens: int, output_tokens: int) -> bytes:
        """The request as JSON."""
        body: dict[str, object] = {
            "model": model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.ids:
            body["prompt"] = prompts.ids(number, prompt_tokens)
            return msgspec.json.encode(body)
        text = prompts.text(number, max(1, round(prompt_tokens * self.words_per_token)))
        if self.chat:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        return msgspec.json.encode(body)


# What is asked for first, then what most servers take at least. vLLM, SGLang and our own endpoint take the first.
DIALECTS = (
    Dialect(ids=True, ignore_eos=True),
    Dialect(ids=True, ignore_eos=False),
    Dialect(ids=False, ignore_eos=True),
    Dialect(ids=False, ignore_eos=False),
    Dialect(ids=False, ignore_eos=True, chat=True),
    Dialect(ids=False, ignore_eos=False, chat=True),
)


class Delta(msgspec.Struct):
    """A piece of a chat answer."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: object = None


class Choice(msgspec.Struct):
    """A piece of an answer."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """It brings at least one token. A chat begins with a piece that only names the role; the last piece of an
        answer may only say why it ended, while an empty one before that is half a character."""
        delta = self.delta
        if delta is None:
            return bool(self.text) or self.finish_reason is None
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Usage(msgspec.Struct):
    """What the server counted."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None


chunk_decoder = msgspec.json.Decoder(Chunk)


def error_words(body: object) -> str:
    """What a server's error says, in a line: an answer's bytes, or the decoded `error` of a stream."""
    error = body
    if isinstance(body, bytes):
        try:
            error = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            error = body.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(error, dict) and key in error:
            error = error[key]
    return " ".join(str(error).split())[:200]
