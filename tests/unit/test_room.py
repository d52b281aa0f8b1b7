"""A unit whose KV pools get and give memory, as the global scheduler says."""

from __future__ import annotations

import msgspec

from muxserve.wire import Loads, PoolsLoad, SchedulerHello, SetRoom
from tests.unit.support import Bench, Sent, model

SCHEDULER = b"scheduler/s1"
# Of a page, and of all but the null page.
PAGE, WHOLE = 2 * 16 * 64 * 4, 1000 * 2 * 16 * 64 * 4


def pools(sent: Sent) -> PoolsLoad | None:
    """What the last report says of the pools."""
    return [message.pools for peer, message in sent if peer == SCHEDULER and isinstance(message, Loads)][-1]


def bench(chunk_bytes: int) -> Bench:
    made = Bench(model("a"), model("b"))
    # The list is read anew for each report.
    made.unit_spec.pools[:] = [msgspec.structs.replace(made.unit_spec.pools[0], chunk_bytes=chunk_bytes)]
    return made


def later(unit: Bench, seconds: float) -> Sent:
    """What it sends in that time."""
    return [each for _ in range(int(seconds / 0.05)) for each in unit.turn(0.05)]


def test_the_first_report_says_what_the_pools_have() -> None:
    sent = bench(chunk_bytes=1 << 16).say(SCHEDULER, SchedulerHello("s1"))
    load = pools(sent)
    assert load is not None
    assert load.elastic
    assert load.backed == WHOLE + PAGE
    assert load.target == 0


def test_pools_in_one_piece_say_so() -> None:
    load = pools(bench(chunk_bytes=0).say(SCHEDULER, SchedulerHello("s1")))
    assert load is not None
    assert not load.elastic


def test_what_it_is_told_it_does_and_says() -> None:
    unit = bench(chunk_bytes=1 << 16)
    unit.say(SCHEDULER, SchedulerHello("s1"))
    sent = unit.say(SCHEDULER, SetRoom(WHOLE // 2))
    assert unit.memory.room == {"main": 501}
    assert unit.unit.ledger.pools["main"].room == 500
    load = pools([*sent, *later(unit, 0.05)])
    assert load is not None
    assert (load.target, load.backed) == (WHOLE // 2, 501 * PAGE)
    # Quotas follow: together they are not more than there is.
    later(unit, 2.0)
    assert sum(each.quota for each in unit.unit.ledger.models) <= 500


def test_a_memory_manager_that_is_started_again_is_told_again() -> None:
    unit = bench(chunk_bytes=1 << 16)
    unit.say(SCHEDULER, SchedulerHello("s1"))
    unit.say(SCHEDULER, SetRoom(WHOLE // 2))
    unit.memory.room.clear()
    unit.memory.die(up=True)
    later(unit, 1.0)
    assert unit.memory.room == {"main": 501}
