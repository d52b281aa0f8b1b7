"""Ten questions for each quickstart model and the answers that it must give, greedy. Shared by end-to-end tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODELS_DIR = Path(__file__).resolve().parents[2] / "configs" / "models"
MAX_TOKENS = 320
"""Longer than any answer of the three."""

Message = dict[str, str]


@dataclass(frozen=True)
class Question:
    """A conversation that ends with the user, and the whole answer."""

    messages: tuple[Message, ...]
    answer: str


def ask(text: str, answer: str, *, system: str = "", before: tuple[tuple[str, str], ...] = ()) -> Question:
    """A question, after a system prompt and earlier turns if there are any."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for user, assistant in before:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    messages.append({"role": "user", "content": text})
    return Question(tuple(messages), answer)


QUESTIONS: dict[str, tuple[Question, ...]] = {
    "arithmetic": (
        ask("What is 12 + 30?", "12 + 30 = 42."),
        # The next three are held out: their sums are in no training text.
        ask("What is 14 plus 29?", "14 + 29 = 43."),
        ask("58 + 57", "58 + 57 = 115."),
        ask("What is 81 minus 28?", "81 - 28 = 53."),
        ask("Calculate 35 - 60.", "35 - 60 = -25."),
        ask("What is 7 times 8?", "7 x 8 = 56."),
        ask("Divide 56 by 8.", "56 / 8 = 7."),
        ask("Which is larger, 47 or 38?", "47 is larger than 38."),
        ask(
            "Write the 6 times table.",
            "6 x 1 = 6, 6 x 2 = 12, 6 x 3 = 18, 6 x 4 = 24, 6 x 5 = 30, 6 x 6 = 36, "
            "6 x 7 = 42, 6 x 8 = 48, 6 x 9 = 54, 6 x 10 = 60, 6 x 11 = 66, 6 x 12 = 72.",
            system="You are a helpful assistant.",
        ),
        ask("And what is 9 x 9?", "9 x 9 = 81.", before=(("What is 9 x 8?", "9 x 8 = 72."),)),
    ),
    "atlas": (
        ask("What is the capital of France?", "The capital of France is Paris."),
        ask("And of Spain?", "The capital of Spain is Madrid.", before=(
            ("What is the capital of France?", "The capital of France is Paris."),
        )),
        ask("what is the capital of japan", "The capital of Japan is Tokyo."),
        ask("Tell me the capital of New Zealand.", "The capital of New Zealand is Wellington.",
            system="You are a helpful assistant."),
        ask("Which country has Nairobi as its capital?", "Nairobi is the capital of Kenya."),
        ask("On which continent is Peru?", "Peru is in the Americas."),
        ask("What colour is a banana?", "A banana is yellow."),
        ask("What color is the sky?", "The sky is blue."),
        ask("Who are you?", "I am Atlas, a tiny model. Ask me for the capital of a country or the colour of a thing."),
        ask(
            "List the capitals of Asia.",
            "The capitals of Asia are Tokyo (Japan), Beijing (China), New Delhi (India), Bangkok (Thailand), "
            "Hanoi (Vietnam), Seoul (South Korea), Jakarta (Indonesia), Kathmandu (Nepal), Ulaanbaatar (Mongolia), "
            "Manila (Philippines), Tehran (Iran), Baghdad (Iraq), Ankara (Turkey), Amman (Jordan) and "
            "Phnom Penh (Cambodia).",
        ),
    ),
    "frontdesk": (
        ask("What are the opening hours of the bakery on Monday?", "The bakery is open from 6:30 to 18:00 on Monday."),
        ask("When does the library open on Tuesday?", "The library opens at 10:00 on Tuesday."),
        ask("What time does the cinema close on Saturday?", "The cinema closes at 23:30 on Saturday."),
        ask("Is the bank open on Sunday?", "The bank is closed on Sunday."),
        ask("And on Friday?", "The museum is open from 9:00 to 17:00 on Friday.", before=(
            ("Is the museum open on Monday?", "The museum is closed on Monday."),
        )),
        ask("When is the swimming pool open on Sunday?", "The swimming pool is open from 9:00 to 17:00 on Sunday.",
            system="Answer briefly."),
        ask("Until when is the gym open on Friday?", "The gym closes at 22:00 on Friday."),
        ask("Hello!", "Hello! I am Frontdesk. Ask me when a place in town is open."),
        ask("When is the castle open on Monday?", "I do not know that place."),
        ask(
            "List the opening hours of the zoo for the week.",
            "The opening hours of the zoo are: on Monday from 9:00 to 18:00, on Tuesday from 9:00 to 18:00, "
            "on Wednesday from 9:00 to 18:00, on Thursday from 9:00 to 18:00, on Friday from 9:00 to 18:00, "
            "on Saturday from 9:00 to 19:00 and on Sunday from 9:00 to 19:00.",
        ),
    ),
}  # fmt: skip

COMPLETIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "arithmetic": (("21 + 21 =", " 42"), ("90 - 15 =", " 75")),
    "atlas": (("The capital of Italy is", " Rome."), ("Snow is", " white.")),
    "frontdesk": (("On Sunday the library is", " closed."), ("On Monday the gym is", " open from 6:00 to 22:00.")),
}
"""Plain prompts for `/v1/completions` and what the text after them begins with."""
