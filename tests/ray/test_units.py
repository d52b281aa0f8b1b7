"""Units on Ray, with real raylets: two nodes of this machine, one of which is killed.

Needs Ray beside the environment, which `make unit` installs:

    pip install --no-deps --target build/ray -r requirements/ray.txt
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.program("scenario")
def test_units_on_two_nodes_are_started_moved_and_ended(said: Callable[[float], str]) -> None:
    text = said(280)
    for step in (
        "a controller that dies takes its units along",
        "two units on two nodes",
        "commands and replies",
        "refusals in words",
        "an actor that was killed is back at its addresses",
        "the unit of a node that was killed is on the other one",
        "a host that failed is told with its reason",
        "stopped, started again, killed",
    ):
        assert step in text, text[-6000:]
