"""`/metrics` as it is now: a gateway renders the text once a second at most."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.patience import eventually


def fresh_metrics(get: Callable[[], str]) -> str:
    """A text that was rendered after this was called. Two renderings differ in the gateway's CPU time at least."""
    texts = [get()]

    def another() -> bool:
        texts.append(get())
        return texts[-1] != texts[0]

    eventually(another, "the metrics were rendered again")
    return texts[-1]
