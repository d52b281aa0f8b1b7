"""Requests that move between two real units while they are decoded: the tokens are those of requests that stay."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.two_units import MODEL, TwoUnits, bodies, unit_deployment
from muxserve.memory.client import MemoryClient
from tests.support.tiny_checkpoint import tiny_checkpoint

PROMPT, OUTPUT = 300, 1500


@pytest.fixture(scope="module")
def requests() -> list[bytes]:
    (made,) = bodies([(3, PROMPT, OUTPUT)], 256)
    return made


@pytest.fixture(scope="module")
def units() -> Iterator[TwoUnits]:
    checkpoint = tiny_checkpoint("llama", 2, 4, 2, 64)
    with (
        tempfile.TemporaryDirectory(prefix="mx") as root,
        TwoUnits(
            lambda name: unit_deployment(Path(root) / name, name, checkpoint, max_len=2048, blocks=240)
        ) as started,
    ):
        yield started


@pytest.fixture(scope="module")
def expected(units: TwoUnits, requests: list[bytes]) -> list[list[int]]:
    """What they answer when they stay where they are."""
    names = [units.submit("b", body, PROMPT, OUTPUT) for body in requests]
    units.pump(lambda: all(units.requests[name].finished for name in names))
    return [units.requests[name].tokens for name in names]


def nothing_is_left(units: TwoUnits) -> None:
    for unit in units.units.values():
        with MemoryClient(unit.deployment.memory_socket, "test") as client:

            def used(client: MemoryClient = client) -> int:
                return int(client.map(MODEL).counters.used_pages)

            units.pump(lambda used=used: used() == 0, 20.0)  # type: ignore[misc]


def migrator_of(units: TwoUnits, name: str) -> psutil.Process:
    unit = units.units[name]
    for process in psutil.Process(unit.process.pid).children(recursive=True):
        if "muxserve.migration.process" in process.cmdline():
            return process
    raise AssertionError("no migrator")


def test_tokens_are_the_same_wherever_they_come_from(
    units: TwoUnits, requests: list[bytes], expected: list[list[int]]
) -> None:
    """Three requests move one after another to the other unit, and back, while all of them are decoded."""
    names = [units.submit("a", body, PROMPT, OUTPUT) for body in requests]
    seen = [units.requests[name] for name in names]
    units.pump(lambda: all(len(one.tokens) > 20 for one in seen))
    units.begin_moving("a")
    units.pump(lambda: all(one.unit == "b" for one in seen))
    units.end_moving("a")
    assert not any(one.finished for one in seen)
    units.pump(lambda: not units.loads["a"].terminating)
    units.begin_moving("b")
    units.pump(lambda: all(one.unit == "a" for one in seen))
    units.end_moving("b")
    assert not any(one.finished for one in seen)
    units.pump(lambda: all(one.finished for one in seen))
    assert [one.tokens for one in seen] == expected
    assert not units.lost
    nothing_is_left(units)


@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_migrator_that_dies_costs_no_request(
    units: TwoUnits, requests: list[bytes], expected: list[list[int]], victim: str
) -> None:
    """Killed while requests move, again and again; the requests end as if nothing had happened, or are said to be lost
    when it is not known who has them, for the gateway to have them served again."""
    names = [units.submit("a", body, PROMPT, OUTPUT) for body in requests]
    seen = [units.requests[name] for name in names]
    units.pump(lambda: all(len(one.tokens) > 10 for one in seen))
    units.begin_moving("a")
    units.wait(0.03)
    migrator_of(units, victim).send_signal(signal.SIGKILL)
    units.wait(0.5)
    units.end_moving("a")
    lost = units.lost
    units.pump(lambda: all(one.finished or name in lost for name, one in zip(names, seen, strict=True)))
    for name, one, tokens in zip(names, seen, expected, strict=True):
        assert one.tokens == tokens or (name in lost and one.tokens == tokens[: len(one.tokens)])
    assert len(lost & set(names)) <= 1
    nothing_is_left(units)
