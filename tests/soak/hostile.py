"""What hostile or careless clients send: grammars that cost much or are none, and bodies that are no requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"


def _json(schema: Any) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema}}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


GRAMMARS: dict[str, Callable[[], dict[str, Any]]] = {
    "an enum of 100,000": lambda: _json({"enum": [f"value {n}" for n in range(100_000)]}),
    "maxLength of 10^9": lambda: _json({"type": "string", "maxLength": 10**9}),
    "minItems of 10^9": lambda: _json({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    "nested repetitions": lambda: {"structured_outputs": {"regex": "((((a{1,99}){1,99}){1,99}){1,99})"}},
    "a pattern of nested repetitions": lambda: _json({"type": "string", "pattern": "^(([a-z]{1,500}){1,500}){1,500}$"}),
    "a choice of 50,000": lambda: {"structured_outputs": {"choice": [f"choice {n}" for n in range(50_000)]}},
    "a choice of 300,000 letters": lambda: {"structured_outputs": {"choice": ["a" * 300_000, "b"]}},
    "a large EBNF": lambda: {
        "structured_outputs": {
            "grammar": "root ::= " + " | ".join(f'"word{n}" rule' for n in range(20_000)) + '\nrule ::= "x"'
        }
    },
    "an alternation of 50,000": lambda: {"structured_outputs": {"regex": "|".join(f"w{n}" for n in range(50_000))}},
    "a schema that is itself": lambda: _json({"$ref": "#"}),
    "mutual recursion": lambda: {"structured_outputs": {"grammar": "root ::= a\na ::= b\nb ::= a"}},
    "empty recursion": lambda: {"structured_outputs": {"grammar": 'root ::= root | ""'}},
    "an escape that is none": lambda: {"structured_outputs": {"regex": "\\p"}},
    "an open bracket": lambda: {"structured_outputs": {"regex": "(((((("}},
    "an EBNF that is none": lambda: {"structured_outputs": {"grammar": "root := ::= {"}},
    "an empty choice": lambda: {"structured_outputs": {"choice": []}},
    "a schema of depth 200 with minProperties of 10^6": lambda: _json(_nested(200) | {"minProperties": 10**6}),
    "a $ref to nowhere": lambda: _json({"$ref": "#/$defs/nowhere"}),
    "two constraints": lambda: {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "constraints without a token": lambda: {"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": [5]},
}


def _chat(model: str, **changes: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 4, **changes}


Body = tuple[str, "bytes | dict[str, Any] | list[Any]"]

BODIES: dict[str, Callable[[str], Body]] = {
    "no JSON": lambda model: (_CHAT, b"{"),
    "nothing": lambda model: (_CHAT, b""),
    "what is not UTF-8": lambda model: (_CHAT, b'{"model": "\xff\xfe"}'),
    "a list": lambda model: (_CHAT, [1, 2, 3]),
    "brackets of depth 50,000": lambda model: (_CHAT, b"[" * 50_000 + b"]" * 50_000),
    "NaN": lambda model: (_CHAT, b'{"model": "' + model.encode() + b'", "temperature": NaN}'),
    "an unknown model": lambda model: (_CHAT, _chat("nobody")),
    "a model that is a number": lambda model: (_CHAT, _chat(model) | {"model": 7}),
    "a NUL in the model's name": lambda model: (_CHAT, _chat(f"{model}\0")),
    "no messages": lambda model: (_CHAT, _chat(model, messages=[])),
    "messages that are text": lambda model: (_CHAT, _chat(model, messages="Hello?")),
    "a role that is none": lambda model: (_CHAT, _chat(model, messages=[{"role": "\0", "content": [{"type": "x"}]}])),
    "an image": lambda model: (
        _CHAT,
        _chat(model, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]),
    ),
    "max_tokens of -1": lambda model: (_CHAT, _chat(model, max_tokens=-1)),
    "max_tokens of 10^12": lambda model: (_CHAT, _chat(model, max_tokens=10**12)),
    "n of 10^9": lambda model: (_CHAT, _chat(model, n=10**9)),
    "logprobs of 10^9": lambda model: (_CHAT, _chat(model, logprobs=True, top_logprobs=10**9)),
    "temperature of 10^308": lambda model: (_CHAT, _chat(model, temperature=1e308)),
    "a seed of 2^80": lambda model: (_CHAT, _chat(model, seed=2**80)),
    "a bias of a token that is none": lambda model: (_CHAT, _chat(model, logit_bias={"999999999": 5})),
    "stop strings without end": lambda model: (_CHAT, _chat(model, stop=["x" * 1000] * 5000)),
    "a prompt of 400,000 words": lambda model: (
        _CHAT,
        _chat(model, messages=[{"role": "user", "content": "word " * 400_000}]),
    ),
    "tokens that are none": lambda model: (_COMPLETIONS, {"model": model, "prompt": [2**31, -5], "max_tokens": 4}),
    "an empty prompt": lambda model: (_COMPLETIONS, {"model": model, "prompt": [], "max_tokens": 4}),
    "20,000 prompts": lambda model: (_COMPLETIONS, {"model": model, "prompt": ["a"] * 20_000, "max_tokens": 1000}),
    "a template of the client's": lambda model: (
        _CHAT,
        _chat(model, chat_template="{% for i in range(10**9) %}x{% endfor %}"),
    ),
    "a tool that is none": lambda model: (_CHAT, _chat(model, tools=[{"type": "function", "function": {"name": 5}}])),
    "instructions that are a list": lambda model: (
        "/v1/responses",
        {"model": model, "input": "Hello?", "instructions": [{}]},
    ),
    "an input that is none": lambda model: ("/v1/responses", {"model": model, "input": [{"type": "nothing"}]}),
    "a path that is none": lambda model: ("/v1/nothing", _chat(model)),
}
