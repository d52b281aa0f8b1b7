"""Two migrators as processes, with a real memory manager each; unit schedulers and engines are played by the test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from muxserve.net import sockets
from muxserve.spec import Listen
from muxserve.wire import (
    MoveAbort,
    MoveCommit,
    MoveCommitted,
    MoveFailed,
    MoveStaged,
    TakenOver,
    TakeOver,
)
from tests.migration.support import HEADS, LAYERS, MODEL, TOKENS, Unit, adopt, moving, stage
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.thoroughness import cases

MakeUnits = Callable[..., tuple[Unit, Unit]]
PAGES = LAYERS * HEADS


@pytest.fixture
def units() -> Iterator[MakeUnits]:
    """Makes two units, `a` and `b`, whose migrators have been greeted."""
    with tempfile.TemporaryDirectory(prefix="mx") as root, zmq.Context() as context:
        made: list[Unit] = []

        def make(**changes: Any) -> tuple[Unit, Unit]:
            only_b = changes.pop("b", {})
            for name in ("a", "b"):
                made.append(Unit(Path(root), name, context, **{**changes, **(only_b if name == "b" else {})}))
            for unit in made:
                unit.up()
            return made[0], made[1]

        yield make
        for unit in made:
            unit.close()


def move_all(a: Unit, b: Unit, count: int, address: str = "", move: str = "a:1:1") -> None:
    """A whole move in two stages, with all its bytes compared; nothing is left of it."""
    free_a, free_b = a.free_pages(), b.free_pages()
    blocks = a.fill(count)
    first = count // 2
    a.send(stage(move, address or b, 0, blocks[:first], reserve=count + 2))
    assert a.next(MoveStaged).until == first
    b.until_moving_in({MODEL: 1})
    a.send(stage(move, address or b, first, blocks[first:]))
    staged = a.next(MoveStaged)
    page_bytes = a.unit_spec.pools[0].page_bytes
    assert (staged.until, staged.bytes) == (count, (count - first) * PAGES * page_bytes * a.unit_spec.ranks)
    request = moving(count * TOKENS - 3)
    a.send(MoveCommit(move, request))
    take_over = b.next(TakeOver)
    assert (take_over.move, take_over.blocks, take_over.request) == (move, count, request)
    arrived = adopt(b, take_over)
    b.send(TakenOver(move))
    assert a.next(MoveCommitted).move == move
    b.until_moving_in({})
    for ours, theirs in zip(a.content(blocks), b.content(arrived), strict=True):
        assert np.array_equal(ours, theirs)
    # Only what the engines hold is left, at once on either side but for the last word of the copying thread.
    b.eventually_free(free_b - count * PAGES)
    a.engine.step(MODEL, release=np.array(blocks, dtype=np.int32))
    b.engine.step(MODEL, release=np.array(arrived, dtype=np.int32))
    a.eventually_free(free_a)
    b.eventually_free(free_b)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_moves_within_a_machine(units: MakeUnits, ranks: int) -> None:
    a, b = units(ranks=ranks)
    for number in range(3):
        move_all(a, b, 20, move=f"a:1:{number}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_moves_between_machines(units: MakeUnits, ranks: int) -> None:
    keys = sockets.new_keys()
    port = free_port()
    listen = Listen("127.0.0.1", free_port(), port)
    # Blocks of 12 MiB over both ranks, so that a stage takes more chunks than may be under way.
    a, b = units(ranks=ranks, page_bytes=(1 << 20), blocks=30, keys=keys, b={"listen": listen, "machine": "another/0"})
    move_all(a, b, 14, f"tcp://127.0.0.1:{port}")


# ---------------------------------------------------------------- what dies, and when

OPENED, COPYING, COMMITTING = "opened", "copying", "committing"
MOVE = "a:1:1"
BLOCKS = 20


def until_point(a: Unit, b: Unit, point: str) -> tuple[list[int], str]:
    """Bring a move to that point; its blocks, and the key it was handed off under."""
    blocks = a.fill(BLOCKS)
    first = BLOCKS if point == COPYING else 1
    a.send(stage(MOVE, b, 0, blocks[:first], reserve=BLOCKS + 2))
    b.until_moving_in({MODEL: 1})
    if point == COPYING:
        return blocks, ""  # for a second and more, by the limit
    assert a.next(MoveStaged).until == first
    if point == OPENED:
        return blocks, ""
    a.send(MoveCommit(MOVE, moving(first * TOKENS)))
    return blocks, b.next(TakeOver).key


def limited(make: MakeUnits, other_machine: bool = False) -> tuple[Unit, Unit]:
    # A block is 384 KiB, so that a stage of 20 takes two seconds.
    return make(page_bytes=1 << 16, bandwidth=4 << 20, b={"machine": "another/0"} if other_machine else {})


POINTS = [(OPENED, False), (COPYING, False), (COPYING, True), (COMMITTING, False)]
VICTIMS = ["a.migrator", "b.migrator", "a.memory", "b.memory", "a.scheduler", "b.scheduler"]
DEATHS = [(victim, *point) for victim in VICTIMS for point in POINTS]


@pytest.mark.parametrize(
    ("victim", "point", "other_machine"),
    # Usually each at one point, and one at each.
    cases(DEATHS, [(victim, *POINTS[number % 4]) for number, victim in enumerate(VICTIMS)]),
)
def test_whatever_dies_nothing_is_left(units: MakeUnits, victim: str, point: str, other_machine: bool) -> None:
    a, b = limited(units, other_machine)
    free_a, free_b = a.free_pages(), b.free_pages()
    blocks, key = until_point(a, b, point)
    unit, what = {"a": a, "b": b}[victim[0]], victim.split(".")[1]
    unit.restart(what)

    # The unit scheduler of A hears of it in words, or knows by itself.
    if victim == "a.migrator" or victim == "a.scheduler":
        a.up()
    elif point != COMMITTING:
        failed = a.next(MoveFailed)
        assert failed.move == MOVE
        assert not failed.uncertain
        assert failed.reason
    elif victim in ("b.migrator", "b.scheduler"):
        assert a.next(MoveFailed).uncertain
    else:
        # The request was given to the unit scheduler of B, and that can answer still.
        b.send(TakenOver(MOVE))
        assert a.next(MoveCommitted).move == MOVE
    if victim in ("b.migrator", "b.scheduler"):
        b.up()

    # Pages come back on either side, but for what was handed off and not refused.
    if point == COMMITTING and victim in ("a.migrator", "a.scheduler", "a.memory"):
        if victim != "a.memory":
            b.send(TakenOver(MOVE, "the request is not wanted"))
        else:
            b.engine.drop(MODEL, key)
    if point == COMMITTING and victim == "b.migrator":
        # The unit scheduler gives up hand-offs that it does not know.
        assert b.hand_offs() == [key]
        b.engine.drop(MODEL, key)
    b.eventually_free(free_b)
    assert b.hand_offs() == []
    if victim != "a.memory":
        a.engine.step(MODEL, release=np.array(blocks, dtype=np.int32))
    a.eventually_free(free_a)

    # And everything goes on, once the migrator has found a new memory manager.
    if what == "memory":
        unit.until_bound(2)
    move_all(a, b, 4, move="a:1:2")


def test_an_aborted_move_leaves_nothing(units: MakeUnits) -> None:
    a, b = limited(units)
    free = b.free_pages()
    for point in (COPYING, OPENED):
        until_point(a, b, point)
        a.send(MoveAbort(MOVE))
        b.until_moving_in({})
        b.eventually_free(free)
        a.engine.close()
        a.engine = type(a.engine)(a.unit_spec.memory_socket, "engine", PATIENCE)
    # Nobody was told, since nobody else wanted to know.
    move_all(a, b, 4, move="a:1:2")
    assert not [message for message in a.heard if isinstance(message, MoveFailed)]


def test_a_unit_that_has_no_room_or_does_not_want_it(units: MakeUnits) -> None:
    a, b = units(blocks=30)
    free = b.free_pages()
    blocks = a.fill(10)
    a.send(stage("a:1:1", b, 0, blocks, reserve=30))
    failed = a.next(MoveFailed)
    assert not failed.uncertain
    assert "no room for 30 more blocks" in failed.reason
    a.send(stage("a:1:2", b, 0, blocks, reserve=10))
    assert a.next(MoveStaged).until == 10
    a.send(MoveCommit("a:1:2", moving(10 * TOKENS)))
    b.next(TakeOver)
    b.send(TakenOver("a:1:2", "its gateway is not known here"))
    assert a.next(MoveFailed) == MoveFailed("a:1:2", "its gateway is not known here")
    b.eventually_free(free)


def test_other_layouts_and_other_models_are_refused(units: MakeUnits) -> None:
    a, b = units(b={"head_dim": 128})
    a.send(stage("a:1:1", b, 0, a.fill(2), reserve=2))
    assert "has its KV as 16t.2l.3h.128d" in a.next(MoveFailed).reason


def test_nobody_is_there(units: MakeUnits) -> None:
    a, b = units()
    a.send(stage("a:1:1", f"ipc://{b.unit_spec.run_dir}/nobody.sock", 0, a.fill(2), reserve=2))
    assert "no migrator listens" in a.next(MoveFailed).reason


def test_the_wrong_keys_are_kept_out(units: MakeUnits) -> None:
    listen = Listen("127.0.0.1", free_port(), free_port())
    a, b = units(keys=sockets.new_keys(), b={"listen": listen, "keys": sockets.new_keys()})
    free = b.free_pages()
    a.send(stage("a:1:1", f"tcp://127.0.0.1:{listen.migrator_port}", 0, a.fill(2), reserve=2))
    assert not a.next(MoveFailed).uncertain
    assert b.free_pages() == free
