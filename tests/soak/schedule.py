"""Which fault comes when: by seed, topology and step alone, so that any step can be done again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from tests.soak import chaos, clients, faults
from tests.soak.world import Kind

KINDS: tuple[Kind, ...] = (*faults.KINDS, *chaos.KINDS, *clients.KINDS)


def chosen(only: str) -> list[Kind]:
    """The kinds of these groups or names, separated by commas; all without any.

    Raises:
        ValueError: there is no such group or name.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {kind.group for kind in KINDS} | {kind.name for kind in KINDS}
    if unknown := [name for name in names if name not in known]:
        groups = ", ".join(sorted({kind.group for kind in KINDS}))
        raise ValueError(f"no fault is called {', '.join(unknown)}; groups: {groups}")
    return [kind for kind in KINDS if not names or kind.group in names or kind.name in names]


def possible(kinds: Sequence[Kind], found: Counter[str]) -> list[Kind]:
    """Those that a fleet of these parts can be struck by."""
    return [kind for kind in kinds if kind.needs is None or found[kind.needs]]


def random_of(seed: int, topology: str, step: int) -> random.Random:
    """What decides within one step."""
    return random.Random(f"{seed}/{topology}/{step}")


def kind_of(kinds: Sequence[Kind], seed: int, topology: str, step: int) -> Kind:
    """The kind of a step. Each comes once before any comes again."""
    deck, place = divmod(step, len(kinds))
    order = sorted(kinds, key=lambda kind: kind.name)
    random.Random(f"{seed}/{topology}/deck {deck}").shuffle(order)
    return order[place]
