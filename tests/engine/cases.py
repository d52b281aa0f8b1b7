"""Requests whose tokens must come out as from stock vLLM, by name: prompt text and sampling parameters."""

from __future__ import annotations

from typing import Any

from tests.models.questions import QUESTIONS

LONG = "What is 12 + 7? " * 40

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("What is 12 + 7?", {"max_tokens": 40, "ignore_eos": True}),
    "chunked": (LONG, {"max_tokens": 24, "ignore_eos": True}),
    "one-token": ("hello", {"max_tokens": 1}),
    "stop-token": ("What is 3 + 4?", {"max_tokens": 60}),
    "logprobs": ("What is 5 + 5?", {"max_tokens": 12, "logprobs": 3, "ignore_eos": True}),
    "prompt-logprobs": ("What is 5 + 6?", {"max_tokens": 4, "prompt_logprobs": 2, "ignore_eos": True}),
    "penalties": (
        "a a a a b",
        {"max_tokens": 40, "repetition_penalty": 1.7, "presence_penalty": 0.9, "frequency_penalty": 0.6},
    ),
    "min-tokens": ("What is 9 - 2?", {"max_tokens": 30, "min_tokens": 25}),
    "seed": ("Tell me something.", {"max_tokens": 40, "temperature": 1.0, "seed": 7, "ignore_eos": True}),
    "seed-top-p": (
        "Tell me more.",
        {"max_tokens": 40, "temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 11, "ignore_eos": True},
    ),
    "bad-words": ("What is 2 + 2?", {"max_tokens": 20, "logit_bias": {5: 4.0, 9: -100.0}, "ignore_eos": True}),
    "json": (
        "What is 8 + 8?",
        {
            "max_tokens": 60,
            "json_schema": {
                "type": "object",
                "properties": {"answer": {"type": "integer"}, "sure": {"type": "boolean"}},
                "required": ["answer", "sure"],
                "additionalProperties": False,
            },
        },
    ),
}

# Only of models whose layers differ: an answer longer than a window and several blocks.
GROWN: dict[str, tuple[str, dict[str, Any]]] = {
    "grown": ("What is 12 + 7?", {"max_tokens": 200, "ignore_eos": True}),
    "grown-seed": ("Tell me something.", {"max_tokens": 200, "temperature": 1.0, "seed": 3, "ignore_eos": True}),
}
# Requests to a model that sees images: a prompt, the sizes of its images (width, height in pixels; one image per size),
# and sampling parameters. The first and the last size become five pieces of 16 tokens, the second one.
WIDE, SMALL, TALL = (100, 80), (40, 30), (60, 110)
SEEN: dict[str, tuple[str, list[tuple[int, int]], dict[str, Any]]] = {
    "image": ("Look: <image> What is it?", [WIDE], {"max_tokens": 40, "ignore_eos": True}),
    "another": ("Look: <image> What is it?", [TALL], {"max_tokens": 40, "ignore_eos": True}),
    "seed": ("<image>Tell me.", [SMALL], {"max_tokens": 40, "temperature": 1.0, "seed": 7, "ignore_eos": True}),
    "two": ("First <image>, then <image>.", [WIDE, TALL], {"max_tokens": 60, "ignore_eos": True}),
    "twice": ("Is <image> like <image>?", [SMALL, SMALL], {"max_tokens": 24, "ignore_eos": True}),
    "crossing": (
        f"{LONG[:70]}<image>{LONG[:40]}<image>",
        [WIDE, WIDE],
        {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True},
    ),
    "none": ("What is 12 + 7?", [], {"max_tokens": 40, "ignore_eos": True}),
    "long-none": (LONG, [], {"max_tokens": 24, "temperature": 1.0, "seed": 5, "ignore_eos": True}),
}
# What models with random weights are asked; their answers are no more than noise.
NOISE = ["greedy", "chunked", "seed", "penalties", *GROWN]


def questions(model: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """What a quickstart model was trained on, as cases. Its answers have wide margins, so that they are the same in 16
    bits in whatever batch, eager and compiled. Each is asked at once, and behind so many others that it is prefilled in
    chunks; greedily, and with a seed."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    before = ""
    for index, question in enumerate(QUESTIONS[model]):
        text = "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in question.messages)
        for name, prompt in (("", text), (" after others", before + text)):
            params = {"temperature": 0.4, "seed": index} if index % 2 else {"logprobs": 2}
            found[f"{question.messages[-1]['content']}{name}"] = (
                f"{prompt}<|assistant|>",
                {"max_tokens": 80, **params},
            )
        if len(question.messages) == 1:
            before += f"{text}<|assistant|>{question.answer}<|end|>"
    return found


def sampling(params: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of vLLM's `SamplingParams`."""
    from vllm.sampling_params import StructuredOutputsParams

    params = {"temperature": 0.0, **params}
    schema = params.pop("json_schema", None)
    if schema is not None:
        params["structured_outputs"] = StructuredOutputsParams(json=schema)
        params["structured_outputs"]._backend = "xgrammar"
    return params
