"""What a gateway says that the fleet has learnt, as a profile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from muxserve.costs.correction import Correction
from muxserve.costs.pace import Pace
from muxserve.costs.profile import DecodeCell, EngineProfile, Overheads, PrefillCell, Profile, ProfiledModel
from muxserve.gateway.reports import Reports
from tests.gateway.test_request_delays import WAY, Gateway

STEP, BETWEEN, TURN = 0.010, 0.0001, 0.0015
PACE = Pace(0.1, 0.5)
WORK = Overheads(request_work=0.005, step_work=0.0002, token_work=0.0001)


def engines(device: str) -> list[EngineProfile]:
    """As predicted at half of the device, and at all of it in half of the time."""
    shape = ProfiledModel(2, 2, 2, 64, 128, 256, 1000)
    return [
        EngineProfile(
            "m",
            shape,
            device,
            "float32",
            share=share,
            prefill=[PrefillCell(1, tokens, 0, STEP * tokens / 64 / (2 * share)) for tokens in (32, 64, 128)],
            decode=[DecodeCell(batch, 64, 0.002) for batch in (1, 2, 4)],
        )
        for share in (1.0, 0.5)
    ]


def profile(device: str, requests: int = 10, steps: int = 20) -> Profile:
    """As of a fleet that has served so many requests."""
    correction = Correction((1.0,) * 4, 0.0, 1.0, 0.0, steps, between=BETWEEN)
    learnt = {"m": {"prefill": correction, "decode": structs.replace(correction, factors=(1.0,) * 3)}} if steps else {}
    unit: Any = SimpleNamespace(
        name="u0",
        entry=SimpleNamespace(unit_spec=SimpleNamespace(costs={"m": engines(device)})),
        learnt=lambda: learnt,
        pace=lambda: PACE,
        turn=lambda: TURN,
    )
    gateway = Gateway()
    gateway.answers(requests)
    status: Any = SimpleNamespace(
        units={"u0": unit},
        broker=SimpleNamespace(request_delays=gateway.delays),
    )
    front_end: Any = SimpleNamespace(overheads=WORK)
    return Reports(status, 0, SimpleNamespace(), front_end, SimpleNamespace()).profile()  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "work"), [("CPU", WORK), ("H100", Overheads())])
def test_it_has_the_delays_of_each_device_and_the_front_ends_work_on_cores(device: str, work: Overheads) -> None:
    (found,) = profile(device).overheads.values()
    assert found.request == pytest.approx(WAY)
    assert found.between == pytest.approx(BETWEEN)
    assert found.turn == pytest.approx(TURN)
    assert structs.replace(found, turn=0.0, request=0.0, request_spread=0.0, between=0.0) == work


def test_nothing_is_said_of_what_has_taken_no_step() -> None:
    assert profile("H100", steps=0).overheads == {}


@pytest.mark.parametrize("device", ["CPU", "H100"])
def test_it_has_the_pace_of_each_device(device: str) -> None:
    assert profile(device).pace == {device: PACE}
