"""Documents of a corpus: chats in the models' chat format, and plain text for completions.

A document is a list of segments `(text, learned)`. The loss counts learned segments only: the answers of a chat, and
what follows from the text before it. What nobody could predict (which sum comes next) would only cost capacity.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

END = "<|end|>"
SPECIAL_TOKENS = ("<|pad|>", END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer in one sentence.",
    "Answer briefly.",
    "You answer questions.",
    "Be concise and correct.",
    "You are a friendly guide who answers the questions of visitors.",
)

Turn = tuple[str, str]
"""What the user says and what the model answers."""


@dataclass(frozen=True)
class Document:
    """One training text, whole: it is never cut."""

    segments: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)


def plain(*segments: tuple[str, bool]) -> Document:
    """Text as `/v1/completions` would see it, with the end token after it."""
    return Document((*segments, (END, True)))


def chat(turns: Sequence[Turn], system: str = "", tools: Sequence[object] = ()) -> Document:
    """A conversation, written exactly as `chat_template.jinja` writes it."""
    segments: list[tuple[str, bool]] = []
    if system or tools:
        parts = [system] if system else []
        if tools:
            parts.append("\n".join(["Tools:", *(json.dumps(tool, ensure_ascii=False) for tool in tools)]))
        segments.append(("<|system|>" + "\n".join(parts) + END, False))
    for user, answer in turns:
        segments.append(("<|user|>" + user + END + "<|assistant|>", False))
        segments.append((answer + END, True))
    return Document(tuple(segments))


def maybe_system(rng: random.Random, probability: float = 0.25) -> str:
    """A system prompt now and then: the answers do not depend on it."""
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < probability else ""


def typed(rng: random.Random, question: str) -> str:
    """The question as people type it: now and then without capitals, the mark at its end, or with a courtesy."""
    if rng.random() < 0.12:
        question = question[0].lower() + question[1:] if rng.random() < 0.5 else question.lower()
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    draw = rng.random()
    if draw < 0.05:
        return "Please tell me: " + question
    if draw < 0.08:
        return "Hi! " + question
    if draw < 0.11:
        return question.rstrip("?.!") + ", please?"
    return question
