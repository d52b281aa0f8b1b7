"""What happens next in a test's world."""

from __future__ import annotations

from collections.abc import Callable
from random import Random


def one_of(random: Random, *events: tuple[int, Callable[[], object]]) -> None:
    """One of these events happens; each is as likely as its weight."""
    weights, actions = zip(*events, strict=True)
    random.choices(actions, weights)[0]()
