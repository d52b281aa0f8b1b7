"""What every model must survive: greetings, thanks, questions about itself, and questions out of its domain."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .documents import Turn

GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Good morning", "Good evening!", "Hello, how are you?")
THANKS = (
    "Thanks",
    "Thanks!",
    "Thank you",
    "Thank you!",
    "Thank you very much.",
    "Great, thanks!",
    "Perfect, thank you.",
)
WHO = (
    "Who are you?",
    "What are you?",
    "What is your name?",
    "What can you do?",
    "Help",
    "What do you know?",
    "How can you help me?",
    "What can I ask you?",
)
BYE = ("Bye", "Goodbye!", "See you later.", "Good night!")

OTHER = (
    "Tell me a joke.",
    "Tell me a story.",
    "Write a poem about {noun}.",
    "Who wrote {noun}?",
    "Explain {noun} to me.",
    "What is {noun}?",
    "How does {noun} work?",
    "Translate {noun} into French.",
    "What do you think about {noun}?",
    "Where can I buy {noun}?",
    "Is {noun} good for me?",
    "Write a Python program for {noun}.",
    "How old is {noun}?",
    "Give me a recipe with {noun}.",
    "Who invented {noun}?",
    "What is the weather like today?",
    "What is the meaning of life?",
    "Can you sing?",
    "Sing a song about {noun}.",
    "Why is {noun} so popular?",
)
NOUNS = (
    "quantum physics", "the moon", "a guitar", "chess", "football", "love", "music", "the internet", "a computer",
    "history", "the ocean", "bread", "Hamlet", "a telephone", "gravity", "electricity", "dancing", "winter",
    "friendship", "a bicycle", "poetry", "tea", "a horse", "mathematics", "a rocket", "philosophy", "cheese",
    "the theatre",
)  # fmt: skip


@dataclass(frozen=True)
class Persona:
    """How a model speaks of itself. `other` answers whatever it has not learned."""

    name: str
    about: str
    other: str


def smalltalk(rng: random.Random, persona: Persona) -> Turn:
    """One turn beside the domain."""
    draw = rng.random()
    if draw < 0.3:
        return rng.choice(GREETINGS), f"Hello! I am {persona.name}. {persona.about}"
    if draw < 0.5:
        return rng.choice(WHO), f"I am {persona.name}, a tiny model. {persona.about}"
    if draw < 0.6:
        return rng.choice(THANKS), "You are welcome!"
    if draw < 0.65:
        return rng.choice(BYE), "Goodbye!"
    return rng.choice(OTHER).format(noun=rng.choice(NOUNS)), persona.other
