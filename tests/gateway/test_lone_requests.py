"""What is learnt of the way of a request from those that are alone."""

from __future__ import annotations

import pytest

from muxserve.costs.profile import EngineProfile, PrefillCell, ProfiledModel
from muxserve.gateway.lone_requests import QUIET_SECONDS, LoneRequests
from muxserve.gateway.requests import Tracked

STEP, WAY = 0.010, 0.004
MOST_TOKENS = 512


def engine(unit: str, model: str) -> EngineProfile | None:
    """One whose prefill steps take `STEP` per 64 tokens."""
    if (unit, model) != ("u0", "m"):
        return None
    shape = ProfiledModel(2, 2, 2, 64, 128, 256, 1000)
    cells = [PrefillCell(1, tokens, 0, STEP * tokens / 64) for tokens in (32, 64, 128, 256, MOST_TOKENS)]
    return EngineProfile("m", shape, "CPU", "float32", prefill=cells)


class Gateway:
    """Requests of a gateway, one after another, a second apart."""

    def __init__(self) -> None:
        self.lone = LoneRequests()
        self.now = 0.0
        self.in_flight = 0

    def comes(self, tokens: int = 64, unit: str = "u0", images: tuple[object, ...] = ()) -> Tracked:
        request = Tracked("id", "front", "m", b"", tokens, 9, self.now, unit=unit, images=images)
        self.in_flight += 1
        self.lone.submitted(request, self.in_flight)
        return request

    def answers(self, request: Tracked, after: float = STEP + WAY, cached: int = 0) -> None:
        self.now = request.arrival + after
        request.first_token_at, request.emitted, request.cached_tokens = self.now, [1], cached
        self.lone.answered(request)

    def ends(self, quiet: float = 1.0) -> None:
        self.in_flight -= 1
        self.lone.ended(self.now)
        self.now += quiet

    def serves(self, count: int = 1, quiet: float = 1.0, **request: object) -> None:
        for _ in range(count):
            self.answers(self.comes(**request))  # type: ignore[arg-type]
            self.ends(quiet)

    @property
    def way(self) -> float | None:
        return self.lone.beyond_steps(engine).get("CPU")


def test_the_way_is_what_the_step_does_not_take() -> None:
    gateway = Gateway()
    gateway.serves(7)
    assert gateway.way is None, "few say nothing"
    gateway.serves(1)
    assert gateway.way == pytest.approx(WAY)


def test_what_is_cached_is_not_computed() -> None:
    gateway = Gateway()
    for _ in range(8):
        gateway.answers(gateway.comes(tokens=128), cached=64)
        gateway.ends()
    assert gateway.way == pytest.approx(WAY)


def test_one_that_had_to_wait_does_not_count_for_all() -> None:
    gateway = Gateway()
    gateway.serves(10)
    gateway.answers(gateway.comes(), after=30.0)
    gateway.ends()
    assert gateway.way == pytest.approx(WAY)


def test_a_machine_that_gets_slower_is_followed() -> None:
    gateway = Gateway()
    gateway.serves(100)
    for _ in range(40):
        gateway.answers(gateway.comes(), after=STEP + 3 * WAY)
        gateway.ends()
    assert gateway.way == pytest.approx(3 * WAY)


def test_a_request_beside_another_says_nothing() -> None:
    gateway = Gateway()
    for _ in range(20):
        first, second = gateway.comes(), gateway.comes()
        gateway.answers(first)
        gateway.answers(second)
        gateway.ends()
        gateway.ends()
    assert gateway.way is None


def test_nor_does_one_that_comes_while_the_one_before_is_wound_up() -> None:
    gateway = Gateway()
    gateway.serves(20, quiet=QUIET_SECONDS / 2)
    assert gateway.way is None


@pytest.mark.parametrize(
    "request_",
    [{"unit": "u1"}, {"tokens": MOST_TOKENS + 1}, {"images": ("a picture",)}],
    ids=["of an engine that is not known", "computed in several steps", "with images"],
)
def test_nor_does_one_whose_step_is_not_known(request_: dict[str, object]) -> None:
    gateway = Gateway()
    gateway.serves(20, **request_)  # type: ignore[arg-type]
    assert gateway.way is None


def test_nor_does_one_that_waits_for_a_model_to_wake_or_is_served_again() -> None:
    gateway = Gateway()
    for _ in range(20):
        request = gateway.comes()
        gateway.lone.delayed()
        gateway.answers(request)
        gateway.ends()
    assert gateway.way is None


def test_a_vector_has_no_first_token() -> None:
    gateway = Gateway()
    for _ in range(20):
        request = gateway.comes()
        request.first_token_at = gateway.now + STEP
        gateway.lone.answered(request)
        gateway.ends()
    assert gateway.way is None
