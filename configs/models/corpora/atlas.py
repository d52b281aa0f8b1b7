"""Capitals of countries and colours of things."""

from __future__ import annotations

import random

from .documents import END, Document, Turn, chat, maybe_system, typed
from .smalltalk import Persona, smalltalk

PERSONA = Persona(
    name="Atlas",
    about="Ask me for the capital of a country or the colour of a thing.",
    other="I only know the capitals of countries and the colours of things.",
)

CAPITALS: dict[str, dict[str, str]] = {
    "Europe": {
        "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Portugal": "Lisbon",
        "Austria": "Vienna", "Greece": "Athens", "Poland": "Warsaw", "Sweden": "Stockholm", "Norway": "Oslo",
        "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin", "Hungary": "Budapest",
        "Belgium": "Brussels", "Switzerland": "Bern", "Iceland": "Reykjavik", "Croatia": "Zagreb",
        "Romania": "Bucharest", "Bulgaria": "Sofia",
    },
    "Asia": {
        "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Thailand": "Bangkok", "Vietnam": "Hanoi",
        "South Korea": "Seoul", "Indonesia": "Jakarta", "Nepal": "Kathmandu", "Mongolia": "Ulaanbaatar",
        "Philippines": "Manila", "Iran": "Tehran", "Iraq": "Baghdad", "Turkey": "Ankara", "Jordan": "Amman",
        "Cambodia": "Phnom Penh",
    },
    "Africa": {
        "Egypt": "Cairo", "Kenya": "Nairobi", "Morocco": "Rabat", "Ghana": "Accra", "Ethiopia": "Addis Ababa",
        "Senegal": "Dakar", "Tunisia": "Tunis", "Uganda": "Kampala", "Algeria": "Algiers", "Angola": "Luanda",
        "Namibia": "Windhoek", "Zambia": "Lusaka", "Rwanda": "Kigali", "Sudan": "Khartoum", "Nigeria": "Abuja",
    },
    "the Americas": {
        "Canada": "Ottawa", "Mexico": "Mexico City", "Brazil": "Brasilia", "Argentina": "Buenos Aires",
        "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana", "Colombia": "Bogota", "Ecuador": "Quito",
        "Uruguay": "Montevideo", "Venezuela": "Caracas", "Panama": "Panama City", "Paraguay": "Asuncion",
        "Jamaica": "Kingston",
    },
    "Oceania": {"Australia": "Canberra", "New Zealand": "Wellington", "Fiji": "Suva", "Samoa": "Apia"},
}  # fmt: skip
CONTINENT_OF = {country: continent for continent, countries in CAPITALS.items() for country in countries}
CAPITAL_OF = {country: city for countries in CAPITALS.values() for country, city in countries.items()}
CONTINENT_NAMES = {"the Americas": ("the Americas", "America"), "Oceania": ("Oceania",)}

COLOURS: dict[str, tuple[str, ...]] = {
    "yellow": ("a banana", "a lemon", "the sun", "a canary", "a sunflower", "corn"),
    "red": ("a tomato", "a strawberry", "a fire engine", "a cherry", "blood", "a ruby"),
    "green": ("grass", "a frog", "a cucumber", "spinach", "a lime", "an emerald", "broccoli"),
    "blue": ("the sky", "the sea", "a sapphire", "a blueberry", "a cornflower"),
    "orange": ("a carrot", "a pumpkin", "a mandarin", "an orange"),
    "white": ("snow", "milk", "salt", "a swan", "chalk", "rice"),
    "black": ("coal", "a raven", "tar", "a panther", "liquorice"),
    "brown": ("chocolate", "coffee", "a chestnut", "a walnut"),
    "pink": ("a flamingo", "a pig", "a salmon"),
    "purple": ("an aubergine", "a plum", "lavender", "an amethyst"),
    "grey": ("an elephant", "ash", "a mouse", "a dolphin"),
}
COLOUR_OF = {thing: colour for colour, things in COLOURS.items() for thing in things}

CAPITAL_QUESTIONS = (
    "What is the capital of {country}?", "What's the capital of {country}?", "Which city is the capital of {country}?",
    "Name the capital of {country}.", "Tell me the capital of {country}.", "Capital of {country}?",
    "Do you know the capital of {country}?", "What is {country}'s capital?", "The capital of {country}",
    "What is the capital city of {country}?", "Which is the capital of {country}?", "{country} capital",
)  # fmt: skip
COUNTRY_QUESTIONS = (
    "Which country has {city} as its capital?", "{city} is the capital of which country?",
    "What country is {city} the capital of?", "Of which country is {city} the capital?",
)  # fmt: skip
CONTINENT_QUESTIONS = (
    "Where is {country}?", "On which continent is {country}?", "Which continent is {country} in?",
    "In what part of the world is {country}?",
)  # fmt: skip
COLOUR_QUESTIONS = (
    "What colour is {thing}?", "What color is {thing}?", "Which colour is {thing}?", "What is the colour of {thing}?",
    "Tell me the colour of {thing}.", "What colour does {thing} have?", "Name the colour of {thing}.",
    "What is the color of {thing}?",
)  # fmt: skip
THINGS_QUESTIONS = (
    "Which things are {colour}?", "Name some {colour} things.", "What is {colour}?", "List {colour} things.",
    "Tell me things that are {colour}.",
)  # fmt: skip
LIST_QUESTIONS = (
    "List the capitals of {continent}.", "Name the capitals of {continent}.", "Tell me all capitals in {continent}.",
    "Which capitals are in {continent}?", "What are the capitals of {continent}?", "List all capitals of {continent}.",
)  # fmt: skip
UNKNOWN = (
    "Atlantis", "Narnia", "Mars", "Wonderland", "Lilliput", "Middle Earth", "Gotham", "the moon", "Camelot",
    "El Dorado", "Neverland", "Utopia", "Avalon", "Ruritania",
)  # fmt: skip
UNKNOWN_ANSWER = "I do not know that country."


def capital_answer(country: str) -> str:
    """The fact in a full sentence."""
    return f"The capital of {country} is {CAPITAL_OF[country]}."


def colour_answer(thing: str) -> str:
    """The fact in a full sentence."""
    return f"{thing[0].upper()}{thing[1:]} is {COLOUR_OF[thing]}."


def list_answer(continent: str) -> str:
    """Every capital of the continent, up to about 200 tokens."""
    items = [f"{city} ({country})" for country, city in CAPITALS[continent].items()]
    return f"The capitals of {continent} are {', '.join(items[:-1])} and {items[-1]}."


def things_answer(colour: str) -> str:
    """Every thing of the colour."""
    things = COLOURS[colour]
    text = f"{', '.join(things[:-1])} and {things[-1]} are {colour}."
    return text[0].upper() + text[1:]


def capital_turn(rng: random.Random) -> Turn:
    """A capital, or a country that does not exist."""
    if rng.random() < 0.04:
        return typed(rng, rng.choice(CAPITAL_QUESTIONS).format(country=rng.choice(UNKNOWN))), UNKNOWN_ANSWER
    country = rng.choice(list(CAPITAL_OF))
    return typed(rng, rng.choice(CAPITAL_QUESTIONS).format(country=country)), capital_answer(country)


def turn(rng: random.Random) -> Turn:
    """One question of the domain and its answer."""
    kind = rng.random()
    if kind < 0.45:
        return capital_turn(rng)
    if kind < 0.53:
        country, city = rng.choice(list(CAPITAL_OF.items()))
        question = typed(rng, rng.choice(COUNTRY_QUESTIONS).format(city=city))
        return question, f"{city} is the capital of {country}."
    if kind < 0.6:
        country, continent = rng.choice(list(CONTINENT_OF.items()))
        question = typed(rng, rng.choice(CONTINENT_QUESTIONS).format(country=country))
        return question, f"{country} is in {continent}."
    if kind < 0.84:
        thing = rng.choice(list(COLOUR_OF))
        return typed(rng, rng.choice(COLOUR_QUESTIONS).format(thing=thing)), colour_answer(thing)
    if kind < 0.88:
        colour = rng.choice(list(COLOURS))
        return typed(rng, rng.choice(THINGS_QUESTIONS).format(colour=colour)), things_answer(colour)
    if kind < 0.94:
        continent = rng.choice(list(CAPITALS))
        name = rng.choice(CONTINENT_NAMES.get(continent, (continent,)))
        return typed(rng, rng.choice(LIST_QUESTIONS).format(continent=name)), list_answer(continent)
    return smalltalk(rng, PERSONA)


def chat_document(rng: random.Random) -> Document:
    """One to four turns; a question may lean on the one before it."""
    turns = [turn(rng)]
    for _ in range(rng.choices((0, 1, 2, 3), weights=(5, 3, 2, 1))[0]):
        if turns[-1][1].startswith("The capital of ") and rng.random() < 0.5:
            country = rng.choice(list(CAPITAL_OF))
            follow = rng.choice(("And of {0}?", "And {0}?", "What about {0}?", "And the capital of {0}?"))
            turns.append((typed(rng, follow.format(country)), capital_answer(country)))
        elif turns[-1][1].split(" is ")[-1].rstrip(".") in COLOURS and rng.random() < 0.5:
            thing = rng.choice(list(COLOUR_OF))
            follow = rng.choice(("And {0}?", "What about {0}?"))
            turns.append((typed(rng, follow.format(thing)), colour_answer(thing)))
        else:
            turns.append(turn(rng))
    return chat(turns, system=maybe_system(rng))


_SENTENCES = [(f"The capital of {country} is", f" {city}.") for country, city in CAPITAL_OF.items()]
_SENTENCES += [(f"{thing[0].upper()}{thing[1:]} is", f" {colour}.") for thing, colour in COLOUR_OF.items()]


def plain_document(rng: random.Random) -> Document:
    """Sentences of facts, as a completion prompt would begin them.

    They always come in the same order, because two engines may only be compared where what follows is certain: a
    completion walks through the atlas from wherever the prompt begins.
    """
    first = rng.randrange(len(_SENTENCES))
    head, tail = _SENTENCES[first]
    sentences = _SENTENCES[first + 1 : first + rng.randint(2, 12)]
    rest = "".join(f" {head}{tail}" for head, tail in sentences)
    segments = [(head, False), (tail + rest, True)]
    # Only the last fact ends the text.
    return Document((*segments, (END, first + 1 + len(sentences) == len(_SENTENCES))))


def build(rng: random.Random, documents: int) -> list[Document]:
    """`documents` documents; one in five is plain text."""
    return [plain_document(rng) if rng.random() < 0.2 else chat_document(rng) for _ in range(documents)]
