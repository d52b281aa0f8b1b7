"""Units on GPUs on Ray, with real raylets that are told to have GPUs; what needs a driver is played."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.thorough
@pytest.mark.program("gpus")
def test_units_are_on_the_gpus_that_ray_gives_them_and_leave_nothing_there(said: Callable[[float], str]) -> None:
    text = said(280)
    for step in (
        "every node is examined",
        "two units, each on the GPUs of a node",
        "GPUs of another type are not taken",
        "a killed unit is back with an MPS server of its own, and the old one is gone",
        "a unit that is stopped leaves no MPS server",
        "where MPS does not work engines alternate",
        "the unit of a node that was killed has the GPUs of the other one",
        "nothing is left",
    ):
        assert step in text, text[-6000:]
