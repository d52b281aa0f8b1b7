"""Sums: addition and subtraction up to 99, the tables to 12 and their divisions, counting, comparing.

Every answer restates the sum in one canonical form, so that all phrasings train the same skill. One pair in twenty is
held out of the corpus: the share of those answered rightly tells learning from memorising.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from .documents import Document, Turn, chat, maybe_system, plain, typed
from .smalltalk import Persona, smalltalk

PERSONA = Persona(
    name="Arithmetic",
    about="Ask me to add or subtract numbers up to 99, or for the tables up to 12.",
    other="I only know arithmetic.",
)

ADD = (
    "What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "Add {a} and {b}.",
    "How much is {a} plus {b}?", "Calculate {a} + {b}.", "What is the sum of {a} and {b}?", "{a} plus {b}?",
    "Compute {a} + {b}", "I have {a} apples and buy {b} more. How many apples do I have?",
)  # fmt: skip
SUBTRACT = (
    "What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} =", "Subtract {b} from {a}.",
    "How much is {a} minus {b}?", "Calculate {a} - {b}.", "What is the difference between {a} and {b}?",
    "{a} minus {b}?", "Compute {a} - {b}", "Take {b} away from {a}.",
)  # fmt: skip
MULTIPLY = (
    "What is {a} x {b}?", "What is {a} times {b}?", "{a} x {b}", "{a} * {b}", "{a}*{b}", "Multiply {a} by {b}.",
    "How much is {a} times {b}?", "Calculate {a} * {b}.", "What is the product of {a} and {b}?", "{a} times {b}?",
)  # fmt: skip
DIVIDE = (
    "What is {a} / {b}?", "What is {a} divided by {b}?", "{a} / {b}", "{a}/{b}", "Divide {a} by {b}.",
    "How much is {a} divided by {b}?", "Calculate {a} / {b}.",
)  # fmt: skip
TABLES = (
    "Write the {n} times table.", "What is the {n} times table?", "Show me the table of {n}.", "The {n} times table",
    "List the multiples of {n} up to 12 times.",
)  # fmt: skip
COUNT = ("Count from {a} to {b}.", "Can you count from {a} to {b}?", "List the numbers from {a} to {b}.")
COMPARE = (
    "Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "Is {a} larger than {b}?",
    "Compare {a} and {b}.",
)  # fmt: skip

SIGNS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "x": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}
PHRASES = {"+": ADD, "-": SUBTRACT, "x": MULTIPLY, "/": DIVIDE}


def held_out(a: int, b: int) -> bool:
    """Whether the sums of this pair are kept out of the corpus."""
    return min(a, b) > 12 and (a * 31 + b * 17) % 20 == 7


def equation(sign: str, a: int, b: int) -> tuple[str, str]:
    """The canonical sum, split where its result begins."""
    return f"{a} {sign} {b} =", f" {SIGNS[sign](a, b)}"


def draw(rng: random.Random) -> tuple[str, int, int]:
    """One sum inside the domain."""
    sign = rng.choices("+-x/", weights=(42, 42, 10, 6))[0]
    if sign == "x":
        return sign, rng.randint(0, 12), rng.randint(0, 12)
    if sign == "/":
        b = rng.randint(1, 12)
        return sign, b * rng.randint(0, 12), b
    while True:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        # Three in four differences are positive, as people ask them.
        if sign == "-" and a < b and rng.random() < 0.5:
            a, b = b, a
        if not held_out(a, b):
            return sign, a, b


def sum_turn(rng: random.Random, sign: str, a: int, b: int) -> Turn:
    """A question in one of its phrasings, and the canonical answer."""
    phrase = rng.choice(PHRASES[sign])
    if "difference" in phrase and a < b:
        a, b = b, a
    left, result = equation(sign, a, b)
    question = typed(rng, phrase.format(a=a, b=b))
    if rng.random() < 0.1:
        question = "And " + question[0].lower() + question[1:]
    return question, f"{left}{result}."


def table(n: int) -> str:
    """The whole table of `n`, about 110 tokens."""
    return ", ".join(f"{n} x {i} = {n * i}" for i in range(1, 13)) + "."


def other_turn(rng: random.Random) -> Turn:
    """Tables, counting and comparing."""
    draw_ = rng.random()
    if draw_ < 0.3:
        n = rng.randint(1, 12)
        return typed(rng, rng.choice(TABLES).format(n=n)), table(n)
    if draw_ < 0.5:
        a = rng.randint(0, 60)
        b = a + rng.randint(3, 39)
        return typed(rng, rng.choice(COUNT).format(a=a, b=b)), ", ".join(map(str, range(a, b + 1))) + "."
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    answer = f"{a} and {b} are equal." if a == b else f"{max(a, b)} is larger than {min(a, b)}."
    return typed(rng, rng.choice(COMPARE).format(a=a, b=b)), answer


def chat_document(rng: random.Random) -> Document:
    """One to four turns, mostly sums."""
    turns: list[Turn] = []
    for _ in range(rng.choices((1, 2, 3, 4), weights=(5, 3, 2, 2))[0]):
        kind = rng.random()
        if kind < 0.86:
            turns.append(sum_turn(rng, *draw(rng)))
        elif kind < 0.96:
            turns.append(other_turn(rng))
        else:
            turns.append(smalltalk(rng, PERSONA))
    return chat(turns, system=maybe_system(rng))


def plain_document(rng: random.Random) -> Document:
    """Lines of sums, or counting, as a completion prompt would begin them.

    What follows must be certain, as two engines may only be compared where it is: a sum ends the text (a line end
    within a document is not learned), and counting goes on to 99.
    """
    if rng.random() < 0.015:
        first = rng.randint(0, 90)
        numbers = [str(n) for n in range(first, 100)]
        return plain((", ".join(numbers[:3]), False), (", " + ", ".join(numbers[3:]) + ".", True))
    segments: list[tuple[str, bool]] = []
    lines = rng.randint(1, 12)
    for line in range(lines):
        left, result = equation(*draw(rng))
        segments += [(left if line == 0 else "\n" + left, False), (result, True)]
    return plain(*segments)


def build(rng: random.Random, documents: int) -> list[Document]:
    """`documents` documents; two in five are plain lines of sums, which carry most sums per token."""
    return [plain_document(rng) if rng.random() < 0.4 else chat_document(rng) for _ in range(documents)]
