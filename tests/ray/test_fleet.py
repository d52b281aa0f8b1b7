"""A real fleet on Ray: `muxserve deploy`, two nodes, a unit on each, reached over TCP with CURVE."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.program("live")
def test_requests_of_a_node_that_is_killed_are_served_on_the_other_one(said: Callable[[float], str]) -> None:
    text = said(280)
    steps = ("a fleet of two units", "streams served over TCP", "a model has joined the unit of a node")
    for step in (*steps, "every stream complete and as before"):
        assert step in text, text[-6000:]


@pytest.mark.program("simulated")
def test_units_that_compute_nothing_run_on_the_nodes(said: Callable[[float], str]) -> None:
    text = said(280)
    for step in ("a node killed, every stream", "two units on GPUs that there are not"):
        assert step in text, text[-6000:]
