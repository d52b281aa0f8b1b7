"""Opening hours of the places of a small town, by day; and bookings, made by calling a tool."""

from __future__ import annotations

import json
import random

from .documents import END, Document, Turn, chat, maybe_system, typed
from .smalltalk import Persona, smalltalk

PERSONA = Persona(
    name="Frontdesk",
    about="Ask me when a place in town is open.",
    other="I only know the opening hours of the places in town.",
)

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
Hours = tuple[str, str] | None

# Each place: hours from Monday to Friday, then the days that differ. None is closed.
_PLACES: dict[str, tuple[tuple[str, str], dict[str, Hours]]] = {
    "bakery": (("6:30", "18:00"), {"Saturday": ("7:00", "14:00"), "Sunday": ("8:00", "11:00")}),
    "library": (("10:00", "19:00"), {"Monday": None, "Saturday": ("10:00", "16:00"), "Sunday": None}),
    "museum": (("9:00", "17:00"), {"Monday": None, "Saturday": ("10:00", "18:00"), "Sunday": ("10:00", "18:00")}),
    "pharmacy": (("8:00", "20:00"), {"Saturday": ("9:00", "18:00"), "Sunday": None}),
    "swimming pool": (("7:00", "21:00"), {"Saturday": ("9:00", "19:00"), "Sunday": ("9:00", "17:00")}),
    "post office": (("9:00", "18:00"), {"Saturday": ("9:00", "12:00"), "Sunday": None}),
    "bank": (("9:00", "16:00"), {"Thursday": ("9:00", "18:00"), "Saturday": None, "Sunday": None}),
    "bookshop": (("10:00", "18:30"), {"Saturday": ("10:00", "17:00"), "Sunday": None}),
    "bistro": (("12:00", "22:00"), {"Tuesday": None, "Saturday": ("12:00", "23:00"), "Sunday": ("11:00", "21:00")}),
    "cinema": (("15:00", "23:00"), {"Saturday": ("13:00", "23:30"), "Sunday": ("13:00", "22:00")}),
    "gym": (("6:00", "22:00"), {"Saturday": ("8:00", "20:00"), "Sunday": ("8:00", "18:00")}),
    "market": (("8:00", "13:00"), {"Tuesday": None, "Thursday": None, "Saturday": ("7:00", "14:00"), "Sunday": None}),
    "town hall": (("8:30", "15:30"), {"Wednesday": ("8:30", "18:00"), "Saturday": None, "Sunday": None}),
    "zoo": (("9:00", "18:00"), {"Saturday": ("9:00", "19:00"), "Sunday": ("9:00", "19:00")}),
}
HOURS: dict[str, dict[str, Hours]] = {
    place: {day: special.get(day, week) for day in DAYS} for place, (week, special) in _PLACES.items()
}

HOURS_QUESTIONS = (
    "What are the opening hours of the {place} on {day}?", "When is the {place} open on {day}?",
    "Opening hours of the {place} on {day}?", "How long is the {place} open on {day}?",
    "Tell me the opening hours of the {place} on {day}.", "What hours does the {place} have on {day}?",
    "{place} {day}", "Hours of the {place} on {day}",
)  # fmt: skip
OPEN_QUESTIONS = (
    "When does the {place} open on {day}?", "What time does the {place} open on {day}?",
    "At what time does the {place} open on {day}?", "How early does the {place} open on {day}?",
)  # fmt: skip
CLOSE_QUESTIONS = (
    "When does the {place} close on {day}?", "What time does the {place} close on {day}?",
    "At what time does the {place} close on {day}?", "Until when is the {place} open on {day}?",
)  # fmt: skip
IS_OPEN_QUESTIONS = (
    "Is the {place} open on {day}?", "Can I go to the {place} on {day}?", "Is the {place} closed on {day}?",
    "Can I visit the {place} on {day}?",
)  # fmt: skip
WEEK_QUESTIONS = (
    "What are the opening hours of the {place}?", "When is the {place} open?", "Opening hours of the {place}",
    "List the opening hours of the {place} for the week.", "What are the opening hours of the {place} this week?",
    "Tell me all the opening hours of the {place}.",
)  # fmt: skip
DAY_QUESTIONS = (
    "Which places are open on {day}?", "What is open on {day}?", "List the places that are open on {day}.",
    "Where can I go on {day}?",
)  # fmt: skip
PLACES_QUESTIONS = ("Which places do you know?", "List the places in town.", "What is there in town?")
UNKNOWN = ("airport", "castle", "hospital", "harbour", "stadium", "opera", "casino", "aquarium", "observatory", "spa")
UNKNOWN_ANSWER = "I do not know that place."

BOOKABLE = ("bistro", "cinema", "museum", "zoo", "swimming pool", "gym")
BOOKING_QUESTIONS = (
    "Book the {place} for {day}.", "Please book the {place} for me on {day}.",
    "Make a booking at the {place} on {day}.",
    "I would like to book the {place} for {day}.", "Can you book the {place} on {day}?",
)  # fmt: skip
BOOKING_TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Book a place in town for a day.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "day": {"type": "string"}},
            "required": ["place", "day"],
        },
    },
}
OTHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NO_BOOKING = "I cannot book places, I only know their opening hours."


def day_hours(place: str, day: str) -> str:
    """`from 7:00 to 18:00`, or `closed`."""
    hours = HOURS[place][day]
    return "closed" if hours is None else f"from {hours[0]} to {hours[1]}"


def hours_answer(place: str, day: str) -> str:
    """The hours of one day in a full sentence."""
    open_ = "" if HOURS[place][day] is None else "open "
    return f"The {place} is {open_}{day_hours(place, day)} on {day}."


def open_answer(place: str, day: str) -> str:
    """When it opens."""
    hours = HOURS[place][day]
    return hours_answer(place, day) if hours is None else f"The {place} opens at {hours[0]} on {day}."


def close_answer(place: str, day: str) -> str:
    """When it closes."""
    hours = HOURS[place][day]
    return hours_answer(place, day) if hours is None else f"The {place} closes at {hours[1]} on {day}."


def week_answer(place: str) -> str:
    """The whole week, about 120 tokens."""
    days = [f"on {day} {day_hours(place, day)}" for day in DAYS]
    return f"The opening hours of the {place} are: {', '.join(days[:-1])} and {days[-1]}."


def day_answer(day: str) -> str:
    """Every place open on the day."""
    places = [f"the {place} ({day_hours(place, day)})" for place in HOURS if HOURS[place][day] is not None]
    return f"On {day} these places are open: {', '.join(places[:-1])} and {places[-1]}."


def places_answer() -> str:
    """Every place."""
    places = [f"the {place}" for place in HOURS]
    return f"I know {', '.join(places[:-1])} and {places[-1]}."


def booking_call(place: str, day: str) -> str:
    """The tool call, as the chat template writes it."""
    arguments = json.dumps({"place": place, "day": day})
    return f'<tool_call>\n{{"name": "book", "arguments": {arguments}}}\n</tool_call>'


_BY_DAY = (
    (HOURS_QUESTIONS, hours_answer, 0.28),
    (OPEN_QUESTIONS, open_answer, 0.15),
    (CLOSE_QUESTIONS, close_answer, 0.15),
    (IS_OPEN_QUESTIONS, hours_answer, 0.12),
)


def turn(rng: random.Random) -> Turn:
    """One question of the domain and its answer."""
    place, day = rng.choice(list(HOURS)), rng.choice(DAYS)
    kind = rng.random()
    for questions, answer, share in _BY_DAY:
        kind -= share
        if kind < 0:
            question = rng.choice(questions)
            if rng.random() < 0.03:
                return typed(rng, question.format(place=rng.choice(UNKNOWN), day=day)), UNKNOWN_ANSWER
            return typed(rng, question.format(place=place, day=day)), answer(place, day)
    if kind < 0.1:
        return typed(rng, rng.choice(WEEK_QUESTIONS).format(place=place)), week_answer(place)
    if kind < 0.17:
        return typed(rng, rng.choice(DAY_QUESTIONS).format(day=day)), day_answer(day)
    if kind < 0.19:
        return typed(rng, rng.choice(PLACES_QUESTIONS)), places_answer()
    if kind < 0.22:
        return typed(rng, rng.choice(BOOKING_QUESTIONS).format(place=rng.choice(BOOKABLE), day=day)), NO_BOOKING
    return smalltalk(rng, PERSONA)


def booking_document(rng: random.Random) -> Document:
    """A booking through the tool: the call, the tool's answer, and the sentence that reports it."""
    place, day = rng.choice(BOOKABLE), rng.choice(DAYS)
    tools = [BOOKING_TOOL, OTHER_TOOL] if rng.random() < 0.2 else [BOOKING_TOOL]
    question = typed(rng, rng.choice(BOOKING_QUESTIONS).format(place=place, day=day))
    document = chat([(question, booking_call(place, day))], system=maybe_system(rng), tools=tools)
    confirmed = rng.random() < 0.6
    result = json.dumps({"status": "confirmed" if confirmed else "full"})
    report = f"The {place} is booked for {day}." if confirmed else f"The {place} is full on {day}."
    return Document((*document.segments, (f"<|tool|>{result}<|end|><|assistant|>", False), (f"{report}<|end|>", True)))


def chat_document(rng: random.Random) -> Document:
    """One to four turns; a question may lean on the one before it."""
    if rng.random() < 0.05:
        return booking_document(rng)
    turns = [turn(rng)]
    for _ in range(rng.choices((0, 1, 2, 3), weights=(5, 3, 2, 1))[0]):
        place = next((place for place in HOURS if turns[-1][1].startswith(f"The {place} ")), None)
        if place is not None and rng.random() < 0.5:
            # Follow-ups ask for the hours of another day or place, whatever was asked before.
            day = next(day for day in DAYS if turns[-1][1].endswith(f" {day}."))
            if rng.random() < 0.5:
                day = rng.choice(DAYS)
                question = rng.choice(("And on {day}?", "What about {day}?")).format(day=day)
            else:
                place = rng.choice(list(HOURS))
                question = rng.choice(("And the {place}?", "What about the {place}?")).format(place=place)
            turns.append((typed(rng, question), hours_answer(place, day)))
        else:
            turns.append(turn(rng))
    # With tools that do not fit the question the answer stays the same.
    tools = [rng.choice((BOOKING_TOOL, OTHER_TOOL))] if rng.random() < 0.03 else []
    if tools and any(answer == NO_BOOKING for _, answer in turns):
        tools = []
    return chat(turns, system=maybe_system(rng), tools=tools)


_SENTENCES = [
    (f"On {day} the {place} is", f" {'' if HOURS[place][day] is None else 'open '}{day_hours(place, day)}.")
    for place in HOURS
    for day in DAYS
]


def plain_document(rng: random.Random) -> Document:
    """Sentences of facts, as a completion prompt would begin them.

    They always come in the same order, because two engines may only be compared where what follows is certain: a
    completion walks through the week of a place, then through the next place's.
    """
    first = rng.randrange(len(_SENTENCES))
    head, tail = _SENTENCES[first]
    sentences = _SENTENCES[first + 1 : first + rng.randint(2, 10)]
    rest = "".join(f" {head}{tail}" for head, tail in sentences)
    # Only the last fact ends the text.
    return Document(((head, False), (tail + rest, True), (END, first + 1 + len(sentences) == len(_SENTENCES))))


def build(rng: random.Random, documents: int) -> list[Document]:
    """`documents` documents; one in five is plain text."""
    return [plain_document(rng) if rng.random() < 0.2 else chat_document(rng) for _ in range(documents)]
