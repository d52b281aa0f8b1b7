"""What is learnt of the way of a request beside the unit's queue and its steps."""

from __future__ import annotations

import pytest

from muxserve.gateway.request_delays import RequestDelays
from muxserve.gateway.requests import Tracked

IN_UNIT, WAY, TO_ENGINE = 0.010, 0.004, 0.001


class Gateway:
    """First tokens of a gateway."""

    def __init__(self) -> None:
        self.delays = RequestDelays()
        self.now = 0.0

    def answers(
        self,
        count: int = 1,
        way: float = WAY,
        in_unit: float = IN_UNIT,
        to_engine: float | None = TO_ENGINE,
        unit: str = "u0",
        **more: object,
    ) -> None:
        """`way` is all of it, that to the engine included."""
        for _ in range(count):
            self.now += 1.0
            request = Tracked("id", "front", "m", b"", 64, 9, self.now, unit=unit, **more)  # type: ignore[arg-type]
            request.first_token_at = request.arrival + way - TO_ENGINE + in_unit
            self.delays.answered(request, in_unit, to_engine)

    @property
    def way(self) -> float | None:
        return None if self.delay is None else self.delay[0]

    @property
    def delay(self) -> tuple[float, float] | None:
        """In the mean, and its standard deviation."""
        return self.delays.by_device({"u0": "CPU", "u1": "CPU", "u2": "H100"}.get).get("CPU")


def test_the_way_is_what_queue_and_steps_do_not_take() -> None:
    gateway = Gateway()
    gateway.answers(7)
    assert gateway.way is None, "few say nothing"
    gateway.answers(1, in_unit=5.0)
    assert gateway.way == pytest.approx(WAY)


def test_busy_engines_say_nothing_of_the_way_to_them() -> None:
    gateway = Gateway()
    gateway.answers(50, to_engine=None)
    assert gateway.way is None
    gateway.answers(50)
    gateway.answers(50, way=2 * WAY, to_engine=None)
    assert gateway.way == pytest.approx((10 * WAY + 50 * 2 * WAY) / 60, rel=0.02), "of the last minute"


def test_how_much_ways_differ_is_known() -> None:
    gateway = Gateway()
    for _ in range(30):
        gateway.answers(1, way=WAY - 0.001)
        gateway.answers(1, way=WAY + 0.001)
    assert gateway.delay == pytest.approx((WAY, 0.001), rel=0.01)


def test_units_of_one_device_count_together() -> None:
    gateway = Gateway()
    gateway.answers(10)
    gateway.answers(30, way=2 * WAY, unit="u1")
    gateway.answers(10, way=9.0, unit="u2")
    gateway.answers(10, way=9.0, unit="gone")
    assert gateway.way == pytest.approx(1.75 * WAY)


def test_of_units_that_are_gone_nothing_is_kept() -> None:
    gateway = Gateway()
    for number in range(40):
        gateway.answers(1, unit=f"passing-{number}")
    gateway.answers(10)
    gateway.delays.learn({"u0"})
    assert {*gateway.delays._outside} == {*gateway.delays._ways} == {"u0"}
    assert gateway.way == pytest.approx(WAY)


def test_it_is_the_mean_since_ways_on_busy_cores_are_long_now_and_then() -> None:
    gateway = Gateway()
    gateway.answers(30)
    gateway.answers(10, way=3 * WAY)
    assert gateway.way == pytest.approx(1.5 * WAY)


def test_one_that_a_machine_has_let_wait_does_not_count_for_all() -> None:
    gateway = Gateway()
    gateway.answers(39)
    gateway.answers(1, way=30.0)
    assert gateway.way == pytest.approx(WAY)


def test_a_machine_that_gets_slower_is_followed() -> None:
    gateway = Gateway()
    gateway.answers(1000)
    gateway.answers(61, way=3 * WAY)
    assert gateway.way == pytest.approx(3 * WAY)


def test_where_few_come_the_last_sixteen_count() -> None:
    gateway = Gateway()
    gateway.answers(100, way=0.5)
    gateway.answers(15, way=WAY)
    gateway.now += 3600.0
    gateway.answers(1, way=WAY)
    assert gateway.way == pytest.approx(WAY)


@pytest.mark.parametrize("more", [{"waited": True}, {"images": ("a picture",)}], ids=["that has waited", "with images"])
def test_one_whose_way_is_not_the_usual_says_nothing(more: dict[str, object]) -> None:
    gateway = Gateway()
    gateway.answers(20, **more)  # type: ignore[arg-type]
    assert gateway.way is None
