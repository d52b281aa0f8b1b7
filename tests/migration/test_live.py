"""Requests that move between two real units while they are decoded: the tokens are those of requests that stay."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from benchmarks.two_units import Pair, Seen, TwoUnits
from tests.migration.conftest import BY_HEAD, LATENTS, MOVING, SPARSE_STATES, STATES
from tests.migration.live import limit, nothing_is_left, process
from tests.support.thoroughness import cases

_, PROMPT, OUTPUT = MOVING
EACH_CLASS = [
    pytest.param(BY_HEAD, marks=pytest.mark.serves("Llama", "migrates")),
    pytest.param(LATENTS, marks=pytest.mark.serves("DeepseekV2", "migrates")),
    pytest.param(STATES, marks=pytest.mark.serves("GraniteMoeHybrid (Granite 4 H)", "migrates")),
    pytest.param(SPARSE_STATES, marks=pytest.mark.serves("NemotronH", "migrates")),
]
VICTIMS = [(BY_HEAD, "a"), (LATENTS, "b"), (STATES, "a"), (STATES, "b")]
TRIES = 10


@pytest.fixture(scope="module")
def bodies(requests: dict[tuple[int, int, int], list[bytes]]) -> list[bytes]:
    return requests[MOVING]


@pytest.fixture(scope="module")
def units(pair: Pair) -> Iterator[TwoUnits]:
    limit(pair, 0.0)
    with TwoUnits(pair) as asking:
        yield asking


@pytest.fixture(scope="module")
def expected(units: TwoUnits, bodies: list[bytes]) -> list[list[int]]:
    """What they answer when they stay where they are."""
    names = [units.submit("b", body, PROMPT, OUTPUT) for body in bodies]
    units.pump(lambda: all(units.requests[name].finished for name in names))
    return [units.requests[name].tokens for name in names]


@pytest.mark.parametrize("kind", cases(EACH_CLASS, [EACH_CLASS[2]]), indirect=True, scope="package")
def test_tokens_are_the_same_wherever_they_come_from(
    units: TwoUnits, bodies: list[bytes], expected: list[list[int]]
) -> None:
    """Three requests move one after another to the other unit, and back, while all of them are decoded."""
    for _ in range(TRIES):
        names = [units.submit("a", body, PROMPT, OUTPUT) for body in bodies]
        seen = [units.requests[name] for name in names]
        units.pump(lambda seen=seen: all(len(one.tokens) > 20 for one in seen))
        moved = all_move(units, seen, "a", "b") and all_move(units, seen, "b", "a")
        units.pump(lambda seen=seen: all(one.finished for one in seen))
        assert [one.tokens for one in seen] == expected
        assert not units.lost
        nothing_is_left(units)
        if moved:
            return
    pytest.fail("each time some request had ended before it had moved to and fro")


def all_move(units: TwoUnits, seen: list[Seen], source: str, destination: str) -> bool:
    """Whether they have moved, all of them, before one has ended."""
    units.begin_moving(source)
    units.pump(lambda: any(one.finished for one in seen) or all(one.unit == destination for one in seen))
    units.end_moving(source)
    units.pump(lambda: not units.loads[source].terminating)
    return not any(one.finished for one in seen)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "victim"), cases(VICTIMS, [(STATES, "b")]), indirect=["kind"], scope="package")
def test_a_migrator_that_dies_costs_no_request(
    units: TwoUnits, bodies: list[bytes], expected: list[list[int]], victim: str
) -> None:
    """Killed while requests move, again and again; the requests end as if nothing had happened, or are said to be lost
    when it is not known who has them, for the gateway to have them served again."""
    names = [units.submit("a", body, PROMPT, OUTPUT) for body in bodies]
    seen = [units.requests[name] for name in names]
    units.pump(lambda: all(len(one.tokens) > 10 for one in seen))
    units.begin_moving("a")
    units.wait(0.03)
    process(units, victim, "migrator").send_signal(signal.SIGKILL)
    units.wait(0.5)
    units.end_moving("a")
    lost = units.lost
    units.pump(lambda: all(one.finished or name in lost for name, one in zip(names, seen, strict=True)))
    for name, one, tokens in zip(names, seen, expected, strict=True):
        assert one.tokens == tokens or (name in lost and one.tokens == tokens[: len(one.tokens)])
    assert len(lost & set(names)) <= 1
    nothing_is_left(units)
