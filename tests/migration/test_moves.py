"""Both ends of a move on a virtual clock: every message, task and death where the test wants it."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from muxserve.memory import MemoryManagerError, MemoryManagerGone
from muxserve.migration import chunks, incoming, outgoing
from muxserve.migration.chunks import MoveState
from muxserve.wire import (
    MoveAbort,
    MoveCommit,
    MoveCommitted,
    MoveFailed,
    MoveStage,
    MoveStaged,
    MovingIn,
    PeerAbort,
    PeerOpen,
    PeerPages,
)
from tests.migration.support import moving
from tests.migration.world import ADDRESS, BLOCK_BYTES, MODEL, STATE_BLOCKS, World

MOVE = "a:1:1"
WAYS = {
    "within": {},
    "between": {"same_machine": False},
    "unreachable": {"reachable": False},  # one machine, but its memory cannot be mapped
}


@pytest.fixture(params=list(WAYS))
def world(request: pytest.FixtureRequest) -> World:
    return World(**WAYS[request.param])


def staged(world: World, since: int, until: int, reserve: int = 0, move: str = MOVE) -> None:
    blocks = [100 + number for number in range(since, until)]
    world.outgoing.stage(MoveStage(move, MODEL, ADDRESS, since, blocks, reserve), world.now)


def commit(world: World, blocks: int, move: str = MOVE) -> None:
    world.outgoing.commit(MoveCommit(move, moving(16 * blocks)), world.now)


def failure(world: World) -> MoveFailed:
    """The only end of the move."""
    (failed,) = world.ends(MOVE)
    assert isinstance(failed, MoveFailed)
    return failed


def nothing_left(world: World, but: int = 0) -> None:
    assert len(world.store.used()) == but
    assert not world.outgoing.moves
    assert not world.incoming.arrivals
    assert not world.joined


def test_three_stages_and_the_last_block_twice(world: World) -> None:
    staged(world, 0, 10, reserve=14)
    world.settle()
    staged(world, 10, 13)
    world.settle()
    staged(world, 12, 16)  # block 12 was not full before; two blocks more than were set aside
    world.settle()
    assert world.staged() == [10, 13, 16]
    assert [m.bytes for m in world.unit_a if isinstance(m, MoveStaged)] == [n * BLOCK_BYTES for n in (10, 3, 4)]
    assert len(world.store.used()) == 16
    assert world.unit_b[-1] == MovingIn({MODEL: 1})
    commit(world, 15)
    world.settle()
    assert not world.ends(MOVE)
    assert world.answer_take_over()
    world.settle()
    assert world.ends(MOVE) == [MoveCommitted(MOVE)]
    assert world.unit_b[-1] == MovingIn({})
    nothing_left(world, but=15)  # in B's engine; the one that was not needed has been given back


@pytest.mark.parametrize("way", WAYS)
def test_a_state_is_copied_again_at_the_end(way: str) -> None:
    """Its pages are taken for one sequence in the order of their numbers, on either side."""
    world = World(**WAYS[way], stateful=True)
    staged(world, 0, 10, reserve=14)
    world.settle()
    assert world.staged() == [10]
    world.steps += 7
    staged(world, 10, 12)
    world.settle()
    staged(world, 0, STATE_BLOCKS)
    world.settle()
    assert world.staged() == [10, 12, STATE_BLOCKS]
    commit(world, 12 - STATE_BLOCKS)
    world.settle()
    assert world.answer_take_over()
    world.settle()
    assert world.ends(MOVE) == [MoveCommitted(MOVE)]
    nothing_left(world, but=12)


@pytest.mark.parametrize("stage", [(0, 2), (1, 5)])
def test_a_part_of_a_state_does_not_move(stage: tuple[int, int]) -> None:
    world = World(stateful=True)
    staged(world, 0, 5, reserve=5)
    world.settle()
    staged(world, *stage)
    world.settle()
    assert world.ends(MOVE) == [MoveFailed(MOVE, "a part of its state was to be moved")]
    nothing_left(world)


def test_several_moves_take_turns_and_keep_to_the_limit() -> None:
    rate = 10.0 * chunks.COPY_BYTES
    world = World(rate=rate)
    for number in range(3):
        staged(world, 0, 10, reserve=10, move=f"a:1:{number}")
    world.let_pass(1.0)
    done = [move.done for move in world.outgoing.moves.values()]
    assert 8 <= sum(done) <= 12
    assert max(done) - min(done) <= chunks.DEPTH  # the first began alone
    world.let_pass(2.1)
    assert sorted(world.staged()) == [10, 10, 10]
    assert max(m.seconds for m in world.unit_a if isinstance(m, MoveStaged)) == pytest.approx(3.0, abs=0.2)


def test_only_so_much_is_under_way_to_another_machine() -> None:
    world = World(same_machine=False)
    blocks_per_chunk = chunks.SEND_BYTES // BLOCK_BYTES
    staged(world, 0, 30, reserve=30)
    for _ in range(100):  # B is slow: it takes messages in and writes nothing
        world.turn()
        world.deliver_to_b(), world.deliver_to_a(), world.work_a()
    assert sum(len(task.blocks) for task in world.tasks_b) == chunks.WINDOW * blocks_per_chunk
    for _ in range(2):
        assert world.work_b()
    world.deliver_to_a(), world.deliver_to_a()
    world.turn()
    for _ in range(10):
        world.work_a(), world.deliver_to_b()
    assert sum(len(task.blocks) for task in world.tasks_b) == chunks.WINDOW * blocks_per_chunk
    world.settle()
    assert world.staged() == [30]


def test_an_abort_ends_it_without_a_word(world: World) -> None:
    staged(world, 0, 8, reserve=8)
    world.turn()
    world.deliver_to_b(), world.deliver_to_a()
    world.work_a()
    world.turn()
    world.outgoing.abort(MoveAbort(MOVE))
    world.settle()
    nothing_left(world)
    assert world.unit_a == []


def test_blocks_are_not_given_back_while_they_are_written() -> None:
    world = World(same_machine=False)
    staged(world, 0, 8, reserve=8)
    world.turn()
    world.deliver_to_b(), world.deliver_to_a()
    world.turn()
    while world.work_a():
        world.turn()
    world.outgoing.abort(MoveAbort(MOVE))
    while world.deliver_to_b():
        pass
    assert not world.incoming.arrivals
    assert len(world.store.used()) == 8
    world.settle()
    nothing_left(world)


def test_no_answer_to_the_first_message(world: World) -> None:
    staged(world, 0, 4, reserve=4)
    world.turn()
    world.a_to_b.clear()
    world.turn(outgoing.OPEN_SECONDS + 0.1)
    assert not failure(world).uncertain
    assert [type(message) for message, _ in world.a_to_b] == [PeerAbort]


def test_no_answer_to_the_commit_is_uncertain(world: World) -> None:
    staged(world, 0, 4, reserve=4)
    world.settle()
    commit(world, 4)
    while world.deliver_to_b() or world.work_a():
        pass
    world.a_to_b.clear()
    world.b_to_a.clear()
    world.outgoing.tick(world.now + outgoing.COMMIT_SECONDS + 0.1)
    assert failure(world) == MoveFailed(
        MOVE, f"the migrator at {ADDRESS} does not say whether its unit has the request", uncertain=True
    )


def test_a_unit_that_does_not_answer_is_uncertain_and_its_blocks_come_back(world: World) -> None:
    staged(world, 0, 4, reserve=4)
    world.settle()
    commit(world, 4)
    world.settle()
    world.let_pass(incoming.TAKE_OVER_SECONDS + 0.1)
    assert failure(world).uncertain
    nothing_left(world)


def test_a_unit_that_refuses_is_certain(world: World) -> None:
    staged(world, 0, 4, reserve=4)
    world.settle()
    commit(world, 4)
    world.settle()
    assert world.answer_take_over("it is not wanted")
    world.settle()
    assert failure(world) == MoveFailed(MOVE, "it is not wanted")
    nothing_left(world)


@pytest.mark.parametrize("at_commit", [False, True], ids=["at the first stage", "at the commit"])
def test_a_unit_that_is_not_there_is_certain(world: World, at_commit: bool) -> None:
    world.unit_b_there = at_commit
    staged(world, 0, 4, reserve=4)
    world.settle()
    if at_commit:
        world.unit_b_there = False
        commit(world, 4)
        world.settle()
    assert failure(world) == MoveFailed(MOVE, "the unit scheduler is not there")
    nothing_left(world)


def test_silence_ends_what_is_under_way_but_a_quiet_move_lives(world: World) -> None:
    staged(world, 0, 4, reserve=4)
    world.let_pass(outgoing.IDLE_SECONDS - 1)
    assert world.incoming.arrivals
    assert not world.ends(MOVE)
    # A's machine is gone without a word.
    world.a_to_b.clear()
    for _ in range(int(incoming.SILENCE_SECONDS) + 1):
        world.now += 1.0
        world.incoming.tick(world.now)
    assert not world.incoming.arrivals


def test_a_silent_peer_is_given_up() -> None:
    world = World(same_machine=False)
    staged(world, 0, 20, reserve=20)
    world.turn()
    world.deliver_to_b(), world.deliver_to_a()
    for _ in range(30):
        world.turn(0.5)
        world.work_a()
        world.a_to_b.clear()
    assert "silent" in failure(world).reason


def test_a_peer_that_is_gone_is_noticed_by_its_connection(world: World) -> None:
    staged(world, 0, 4, reserve=4)
    world.settle()
    world.connected = False
    world.incoming.tick(world.now + incoming.LOOK_SECONDS)
    assert not world.incoming.arrivals


def test_a_migrator_that_started_anew_voids_its_earlier_moves(world: World) -> None:
    staged(world, 0, 4, reserve=4)
    world.settle()
    open_again = PeerOpen("a:2:1", unit="a", epoch="2", model=MODEL, layout="layout", blocks=1, machine="elsewhere")
    world.incoming.heard(b"a/1/1", open_again, world.now)
    assert list(world.incoming.arrivals) == ["a:2:1"]
    world.settle()
    failure(world)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (PeerPages(MOVE, 3, 2, 0), "not set aside"),
        (PeerPages(MOVE, -1, 2, 0), "not set aside"),
        (PeerPages(MOVE, 0, 2, 1), "not set aside"),
        (PeerPages(MOVE, 0, 1, 0), "bytes are not 1 blocks"),
        (PeerPages(MOVE, 2, 2, 0), "of a state came with others"),
    ],
)
def test_pages_that_make_no_sense_end_the_move(wrong: PeerPages, reason: str) -> None:
    world = World(same_machine=False, stateful="state" in reason)
    staged(world, 0, 4, reserve=4)
    world.settle()
    world.a_to_b.append((wrong, np.zeros(2 * BLOCK_BYTES, dtype=np.uint8)))
    world.settle()
    assert reason in failure(world).reason
    nothing_left(world)


def test_more_than_was_moved_is_not_handed_over(world: World) -> None:
    staged(world, 0, 4, reserve=6)
    world.settle()
    commit(world, 5)
    world.settle()
    assert not failure(world).uncertain
    nothing_left(world)


@pytest.mark.parametrize("fault", [MemoryManagerError("INVALID", "odd"), MemoryManagerGone("gone")])
def test_blocks_come_back_when_the_hand_over_goes_wrong_half_way(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(same_machine=True, reachable=False)
    staged(world, 0, 3)
    world.settle()
    drop = world.store.drop

    def failing(model: str, key: str) -> None:
        if key == MOVE:  # the hand-off; what was shared is what goes wrong
            drop(model, key)
            return
        if isinstance(fault, MemoryManagerGone):
            world.kill_memory_b()
        raise fault

    monkeypatch.setattr(world.store, "drop", failing)
    commit(world, 3)
    world.settle()
    assert not failure(world).uncertain
    assert not world.answer_take_over()
    # What was shared goes when its time is over, which does not come here.
    world.store.keys.pop(f"{MOVE}/0", None)
    nothing_left(world)


def test_orders_for_a_move_that_is_over() -> None:
    world = World()
    staged(world, 3, 5)
    commit(world, 5, move="a:1:2")
    world.outgoing.abort(MoveAbort("a:1:3"))
    assert [(m.move, m.uncertain) for m in world.unit_a if isinstance(m, MoveFailed)] == [
        (MOVE, False),
        ("a:1:2", False),
    ]
    world.settle()
    nothing_left(world)


def test_whatever_happens_in_whatever_order() -> None:
    """No block is written that is not held, none is left behind, each move ends once, and what is said to have failed
    for certain was not taken over."""
    seen: Counter[str] = Counter()
    for seed in range(400):
        seen += one_history(random.Random(seed))
    # All kinds of ends have been met, so that the above means something.
    for kind in ("committed", "uncertain", "aborted", "connection", "memory", "not wanted"):
        assert seen[kind] > 20, seen


def one_history(draw: random.Random) -> Counter[str]:
    states = draw.choice([0, STATE_BLOCKS])
    world = World(**WAYS[draw.choice(list(WAYS))], stateful=states > 0)
    moves: list[str] = []
    plan: list[tuple[int, int]] = []  # stages that unit A has still to ask for
    unheard: set[str] = set()  # moves of whose end unit A wants to hear nothing
    restarts = 0
    quiet = ["no"] + ["to b"] * 8 + ["to a"] * 6 + ["work a"] * 8 + ["work b"] * 4 + ["unit a"] * 4 + ["yes"] * 2
    loud = ["no", "abort", "restart b", "memory b", "unit a restarts", "unit b restarts"]
    for _ in range(draw.randrange(600)):
        world.turn()
        current = world.outgoing.moves.get(moves[-1]) if moves else None
        match draw.choice(loud) if draw.random() < 0.01 else draw.choice(quiet):
            case "to b":
                world.deliver_to_b()
            case "to a":
                world.deliver_to_a()
            case "work a":
                world.work_a()
            case "work b":
                world.work_b()
            case "unit a":
                if current is None:
                    moves.append(f"a:1:{len(moves)}")
                    plan = [(0, 5), (4, 7), (0, states)] if states else [(0, 5), (4, 7)]
                    staged(world, 0, 6, reserve=6, move=moves[-1])
                elif current.state is MoveState.IDLE:
                    if plan:
                        # Until it leaves its engine, steps overwrite its state.
                        world.steps += len(plan) > 1
                        staged(world, *plan.pop(0), move=moves[-1])
                    else:
                        commit(world, 6 - states, move=moves[-1])
            case "yes":
                world.answer_take_over()
            case "no":
                world.answer_take_over("not wanted")
            case "abort":
                if current is not None and current.state is not MoveState.COMMITTING:
                    world.outgoing.abort(MoveAbort(moves[-1]))
                    unheard.add(moves[-1])
            case "restart b":
                world.disconnect()
                restarts += 1
            case "memory b":
                world.kill_memory_b()
            case "unit a restarts":
                unheard |= set(world.outgoing.moves)
                world.outgoing.unit_lost()
            case "unit b restarts":
                world.unit_b.clear()
                world.incoming.unit_lost()
    world.let_pass(60.0)
    while world.answer_take_over():
        pass
    world.settle()
    assert not world.outgoing.moves
    assert not world.incoming.arrivals
    assert not world.joined
    assert not world.tasks_a
    assert not world.tasks_b
    engine = {block for block, holders in world.store.holders.items() if "engine" in holders}
    # What was handed off by a migrator that died before it could say so is for B's unit scheduler to give up, and what
    # was shared goes when its time is over, which does not come here.
    orphans = {key for key in world.store.keys if key.split("/")[0] in moves}
    assert world.store.used() - engine == {block for key in orphans for block in world.store.keys[key]}
    assert len(orphans) <= 2 * restarts
    seen: Counter[str] = Counter()
    for each in moves:
        ends = world.ends(each)
        if each in unheard:
            assert not ends
            seen["aborted"] += 1
            continue
        (end,) = ends
        if isinstance(end, MoveCommitted):
            assert each in world.accepted
            seen["committed"] += 1
        else:
            assert isinstance(end, MoveFailed)
            assert end.uncertain or each not in world.accepted
            kinds = [kind for kind in ("connection", "memory", "not wanted") if kind in end.reason]
            seen.update(["uncertain"] if end.uncertain else kinds)
    return seen
