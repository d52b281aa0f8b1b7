"""The ledger: queues, places, leases, pages, told event by event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.replicas.priorities import ServiceClass
from muxserve.scheduling.adbs import Adbs
from muxserve.scheduling.admission import admissible, prefill_steps, wants_prefill
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.loads import load_of
from muxserve.scheduling.types import (
    WHOLE,
    Grant,
    Phase,
    PoolProfile,
    QueuedRequest,
    RequestPlace,
    StepsDone,
    share_units,
)
from tests.scheduling.machine import profile
from tests.support.requests import without


def ledger(**changes: object) -> UnitLedger:
    made = UnitLedger([profile("a", **changes), profile("b")], [PoolProfile("pool", 1000)])
    for name in ("a", "b"):
        for phase in (Phase.PREFILL, Phase.DECODE):
            made.engine_up(name, phase, 0.0)
    return made


def arrive(
    book: UnitLedger, request_id: str, model: str = "a", prompt: int = 20, at: float = 0.0, **more: object
) -> None:
    service = ServiceClass(**without(more, *ServiceClass.__struct_fields__))
    book.arrived(QueuedRequest(request_id, model, prompt, 10, at, service, **more), at)  # type: ignore[arg-type]


def prefill(book: UnitLedger, *ids: str, model: str = "a", lease: int = 1, steps: int = 2, now: float = 0.0) -> None:
    share = book.by_name[model].prefill.share
    book.granted(Grant(model, Phase.PREFILL, steps, 1.0, share, ids), lease, now)


def decode(book: UnitLedger, *ids: str, model: str = "a", lease: int = 2, steps: int = 8, now: float = 0.0) -> None:
    share = book.by_name[model].decode.share
    book.granted(Grant(model, Phase.DECODE, steps, 1.0, share, ids), lease, now)


def hand_over(book: UnitLedger, request_id: str, lease: int = 1, now: float = 0.1) -> None:
    """The prefill engine of a reports that it is done with the request, and what it still has."""
    assert book.handed_over(request_id, lease, 1, now)
    book.stepped(
        "a",
        Phase.PREFILL,
        StepsDone(lease, 1, seconds=0.01, tokens=20, remaining=len(book.by_name["a"].prefilling)),
        now,
    )


def queue_ids(book: UnitLedger, model: str = "a") -> list[str]:
    return [r.request_id for r in book.by_name[model].queue.first(99)]


def test_the_queue_is_by_resumed_then_priority_then_arrival() -> None:
    book = ledger()
    arrive(book, "late", at=3.0)
    arrive(book, "early", at=1.0)
    arrive(book, "urgent", at=4.0, priority=-1)
    arrive(book, "resumed", at=5.0, resumed=True)
    arrive(book, "same", at=3.0)
    assert queue_ids(book) == ["resumed", "urgent", "early", "late", "same"]
    book.cancelled("early", 6.0)
    assert queue_ids(book) == ["resumed", "urgent", "late", "same"]


def admit_all(book: UnitLedger, rounds: int = 99) -> list[str]:
    """The order in which they enter the prefill engine, one by one."""
    order = []
    while book.by_name["a"].queue and len(order) < rounds:
        head = book.by_name["a"].queue.head().request_id
        book.granted(Grant("a", Phase.PREFILL, 1, 1.0, 1, (head,)), len(order) + 1, 0.0)
        book.cancelled(head, 0.0)
        order.append(head)
    return order


def test_prompts_of_one_request_take_turns_with_others() -> None:
    book = ledger()
    for n in range(6):
        arrive(book, f"batch{n}", group="batch")
    arrive(book, "single", at=1.0)
    arrive(book, "two0", at=2.0, group="two")
    arrive(book, "two1", at=2.0, group="two")
    assert admit_all(book) == ["batch0", "single", "two0", "batch1", "two1", "batch2", "batch3", "batch4", "batch5"]


def test_who_comes_while_a_batch_is_under_way_waits_for_one_of_it() -> None:
    book = ledger()
    for n in range(100):
        arrive(book, f"batch{n}", group="batch")
    assert admit_all(book, 50)[-1] == "batch49"
    arrive(book, "first", at=1.0)
    arrive(book, "second", at=2.0, group="second")
    assert admit_all(book, 4) == ["batch50", "first", "second", "batch51"]


def test_a_stream_of_requests_does_not_starve_a_batch() -> None:
    book = ledger()
    for n in range(5):
        arrive(book, f"batch{n}", group="batch")
    order = []
    # Each comes behind all that wait, so that there is one more of them in each round.
    for n in range(2 + 3 + 4 + 5 + 6):
        arrive(book, f"single{n}", at=float(n + 1))
        order += admit_all(book, 1)
    assert sum(each.startswith("batch") for each in order) == 5


def test_a_batch_takes_turns_within_its_priority_only() -> None:
    book = ledger()
    for n in range(3):
        arrive(book, f"batch{n}", group="batch")
    for n in range(4):
        arrive(book, f"urgent{n}", at=1.0, priority=-1)
        assert admit_all(book, 1) == [f"urgent{n}"]
    arrive(book, "single", at=2.0)
    assert admit_all(book) == ["batch0", "single", "batch1", "batch2"]


@given(st.lists(st.one_of(st.sampled_from(["", "x", "y", "z"]), st.integers(0, 99)), max_size=80))
def test_turns_lose_nobody_and_keep_singles_in_order(steps: list[str | int]) -> None:
    book, queue = ledger(), {}
    served: list[tuple[int, str]] = []
    for n, step in enumerate(steps):
        if isinstance(step, str):
            arrive(book, f"r{n}", at=float(n), group=step)
            queue[f"r{n}"] = (n, step)
        elif step < 70:
            served += [queue.pop(each) for each in admit_all(book, 1)]
        elif queue:
            book.cancelled(sorted(queue)[step % len(queue)], 0.0)
            del queue[sorted(queue)[step % len(queue)]]
        assert sorted(queue_ids(book)) == sorted(queue)
    served += [queue.pop(each) for each in admit_all(book)]
    assert not queue
    assert not book.by_name["a"].queue._ranks
    for group in ("", "x", "y", "z"):
        own = [n for n, each in served if each == group]
        assert own == sorted(own)


def test_a_request_goes_through_its_places() -> None:
    book = ledger()
    arrive(book, "r")
    live, model = book.requests["r"], book.by_name["a"]
    prefill(book, "r")
    assert live.place is RequestPlace.PREFILLING
    assert book.share_used == WHOLE // 2
    assert model.outstanding == 20
    assert model.promised == (2 + 1) * 4
    assert book.handed_over("r", 1, 1, 0.1)
    book.stepped("a", Phase.PREFILL, StepsDone(1, 1, seconds=0.1, tokens=20, remaining=0), 0.1)
    assert live.place is RequestPlace.HANDED
    assert live.tokens == 21
    assert book.share_used == 0
    assert model.promised == 0
    assert not model.prefilling
    decode(book, "r")
    assert live.place is RequestPlace.DECODING
    book.stepped("a", Phase.DECODE, StepsDone(2, 7, seconds=0.01, tokens=1, remaining=1), 0.2)
    assert book.share_used == WHOLE // 2
    assert book.finished("r", Phase.DECODE, 2, 0.3)
    book.stepped("a", Phase.DECODE, StepsDone(2, 6, seconds=0.01, tokens=1, remaining=0), 0.3)
    assert not book.requests
    assert book.share_used == 0
    assert model.tally.finished == 1


def test_an_arrival_twice_or_for_nobody_is_refused() -> None:
    book = ledger()
    arrive(book, "r")
    with pytest.raises(ValueError, match="live already"):
        arrive(book, "r")
    with pytest.raises(KeyError):
        arrive(book, "s", model="nobody")


def test_words_of_an_earlier_life_are_not_believed() -> None:
    book = ledger()
    arrive(book, "r")
    prefill(book, "r", lease=5)
    assert not book.finished("r", Phase.PREFILL, 4, 0.1), "a report under a lease older than the admission"
    assert not book.finished("r", Phase.DECODE, 6, 0.1), "the other engine"
    assert not book.handed_over("r", 4, 1, 0.1)
    assert not book.returned("r", 4, 1, 0.1)
    book.stepped("a", Phase.PREFILL, StepsDone(4, 0, seconds=0.1, tokens=5, remaining=0), 0.1)
    assert book.by_name["a"].prefill.lease is not None, "the end of an older lease ends no newer one"
    assert book.handed_over("r", 5, 1, 0.1)
    assert not book.handed_over("r", 5, 1, 0.1)
    assert not book.finished("r", Phase.DECODE, 9, 0.1), "nobody has it yet"


def test_a_returned_request_goes_before_others_with_its_tokens() -> None:
    book = ledger()
    arrive(book, "r", prompt=30)
    prefill(book, "r")
    hand_over(book, "r")
    decode(book, "r")
    arrive(book, "s", at=0.05)
    assert book.returned("r", 2, 18, 0.2)
    book.stepped("a", Phase.DECODE, StepsDone(2, 7, seconds=0.01, tokens=0, remaining=0), 0.2)
    assert queue_ids(book) == ["r", "s"]
    assert book.requests["r"].tokens == 48
    assert book.requests["r"].blocks == 4
    assert book.by_name["a"].tally.returned == 1
    assert book.share_used == 0


def test_the_death_of_a_prefill_engine_spares_its_hand_overs() -> None:
    book = ledger()
    for request_id in ("handed", "inside", "queued"):
        arrive(book, request_id)
    prefill(book, "handed", "inside")
    book.handed_over("handed", 1, 1, 0.1)
    assert book.engine_down("a", Phase.PREFILL, 0.2) == ["inside"]
    assert set(book.requests) == {"handed", "queued"}
    assert book.share_used == 0
    assert book.by_name["a"].promised == 0
    assert admissible(book, book.by_name["a"]) is None, "nobody is there to prefill"
    assert book.engine_up("a", Phase.PREFILL, 0.3) == []
    assert admissible(book, book.by_name["a"]) is not None


def test_the_death_of_a_decode_engine_takes_what_waits_for_it() -> None:
    book = ledger()
    for request_id in ("waiting", "inside", "queued"):
        arrive(book, request_id)
    prefill(book, "waiting", "inside")
    hand_over(book, "inside")
    decode(book, "inside")
    hand_over(book, "waiting")
    assert sorted(book.engine_down("a", Phase.DECODE, 0.2)) == ["inside", "waiting"]
    assert set(book.requests) == {"queued"}
    assert book.share_used == 0
    assert book.by_name["a"].tally.lost == 2


def test_an_engine_that_comes_up_again_has_lost_what_it_held() -> None:
    book = ledger()
    arrive(book, "r")
    prefill(book, "r")
    assert book.engine_up("a", Phase.PREFILL, 0.1) == ["r"]
    assert book.by_name["a"].prefill.up
    assert book.share_used == 0


def test_a_lease_ends_when_used_up_timed_out_or_idle() -> None:
    book = ledger()
    engine = book.by_name["a"].decode
    arrive(book, "r")
    prefill(book, "r")
    hand_over(book, "r", now=0.0)
    decode(book, "r", lease=2, now=0.0)
    book.stepped("a", Phase.DECODE, StepsDone(2, 0, seconds=0.01, tokens=1, remaining=1), 0.1)
    assert engine.lease is None
    assert engine.wait_since == 0.1
    decode(book, lease=3, now=0.4)
    assert engine.waits == 1
    assert engine.wait_seconds == pytest.approx(0.3)
    book.stepped("a", Phase.DECODE, StepsDone(3, 5, seconds=0.01, tokens=1, remaining=1), 1.5)
    assert engine.lease is None, "its second is over"
    decode(book, lease=4, now=1.5)
    assert engine.waits == 1, "a grant in the same moment is no wait"
    book.cancelled("r", 1.6)
    assert engine.lease is not None, "it may be in the middle of a step"
    book.stepped("a", Phase.DECODE, StepsDone(4, 7, seconds=0.01, tokens=1, remaining=1), 1.7)
    assert engine.lease is not None, "it had not heard of it yet when that step ended"
    book.stepped("a", Phase.DECODE, StepsDone(4, 7, seconds=0.0, tokens=0, remaining=0), 1.8)
    assert engine.lease is None
    assert engine.wait_since is None
    assert book.share_used == 0


def test_a_lease_does_not_outlive_requests_that_the_engine_lost_itself() -> None:
    book = ledger()
    arrive(book, "r")
    prefill(book, "r")
    assert book.lost(["r", "nobody"], 0.1) == ["r"]
    assert book.by_name["a"].prefill.lease is None
    assert book.share_used == 0


def test_a_report_without_a_step_counts_nothing() -> None:
    book = ledger()
    arrive(book, "r")
    arrive(book, "s")
    prefill(book, "r", "s")
    book.finished("r", Phase.PREFILL, 1, 0.1)
    book.stepped("a", Phase.PREFILL, StepsDone(1, 2, seconds=0.0, tokens=0, remaining=0), 0.1)
    engine = book.by_name["a"].prefill
    assert engine.jobs == 0
    assert engine.lease is not None


def test_an_engine_without_pages_is_tried_again_later_or_when_pages_come_free() -> None:
    book = ledger()
    engine = book.by_name["a"].prefill
    arrive(book, "r")
    book.pages("a", 300, 0, 400)
    prefill(book, "r", steps=1)
    book.stepped("a", Phase.PREFILL, StepsDone(1, 0, seconds=0.001, tokens=0, remaining=1), 1.0)
    assert not engine.ready(1.0)
    assert 1.0 < book.next_retry() < 1.1
    assert engine.ready(book.next_retry())
    first = book.next_retry() - 1.0
    prefill(book, lease=2, steps=1, now=1.01)
    book.stepped("a", Phase.PREFILL, StepsDone(2, 0, seconds=0.001, tokens=0, remaining=1), 2.0)
    assert book.next_retry() - 2.0 == pytest.approx(2 * first)
    book.pages("a", 200, 0, 400)
    assert engine.ready(2.0)


def test_an_engine_that_says_it_is_empty_has_no_use_for_its_lease() -> None:
    book = ledger()
    arrive(book, "r")
    prefill(book, "r")
    book.stepped("a", Phase.PREFILL, StepsDone(1, 1, seconds=0.001, tokens=0, remaining=0), 1.0)
    assert book.by_name["a"].prefill.lease is None
    assert book.share_used == 0


def test_admission_stops_at_the_head_that_does_not_fit() -> None:
    book = ledger(max_num_batched_tokens=400)
    model = book.by_name["a"]
    arrive(book, "first", prompt=100, at=0.0)
    arrive(book, "large", prompt=300, at=1.0)
    arrive(book, "small", prompt=5, at=2.0)
    book.pages("a", 300, 0, 400)  # 25 blocks of 4 pages are left
    chosen = admissible(book, model)
    assert chosen is not None
    assert chosen.request_ids == ("first",)
    book.pages("a", 100, 0, 400)
    chosen = admissible(book, model)
    assert chosen is not None
    assert chosen.request_ids == ("first", "large")
    assert chosen.tokens == 400


def test_admission_leaves_room_for_what_runs_and_what_was_promised() -> None:
    book = ledger()
    model = book.by_name["a"]
    arrive(book, "r", prompt=40)
    prefill(book, "r")
    arrive(book, "s", prompt=15)  # one block
    book.pages("a", 400 - 4 * (4 + 1 + 1), 0, 400)  # 4 promised to r, 1 for r to grow, 1 for s
    assert admissible(book, model) is not None
    book.pages("a", 400 - 4 * (4 + 1), 0, 400)
    assert admissible(book, model) is None
    book.pool_pages("pool", 10, 0)
    book.pages("a", 0, 0, 400)
    assert admissible(book, model) is None, "the quota has room, the pool has not"
    book.pool_pages("pool", 10, 20)
    assert admissible(book, model) is not None, "cached pages can be evicted"


def test_a_model_that_runs_nothing_may_use_its_whole_quota_and_no_more_than_its_limit() -> None:
    book = ledger(quota_pages=80)
    model = book.by_name["a"]
    arrive(book, "r", prompt=310)
    book.pages("a", 4, 0, 80)  # counts lag behind
    chosen = admissible(book, model, limit=80)
    assert chosen is not None
    assert chosen.request_ids == ("r",)
    assert admissible(book, model, limit=79) is None, "others make room for somebody else"


def test_admission_needs_memory_and_both_engines_and_a_seat() -> None:
    book = ledger(max_num_seqs=1)
    model = book.by_name["a"]
    arrive(book, "r")
    arrive(book, "s")
    book.memory_up = False
    assert admissible(book, model) is None
    book.memory_up = True
    book.engine_down("a", Phase.DECODE, 0.0)
    assert admissible(book, model) is None
    book.engine_up("a", Phase.DECODE, 0.0)
    chosen = admissible(book, model)
    assert chosen is not None
    assert chosen.request_ids == ("r",)
    prefill(book, "r")
    hand_over(book, "r", now=0.0)
    assert admissible(book, model) is None


def test_a_long_prompt_takes_several_steps_alone() -> None:
    book = ledger()
    model = book.by_name["a"]
    arrive(book, "long", prompt=200)
    arrive(book, "next", prompt=10)
    chosen = admissible(book, model)
    assert chosen is not None
    assert chosen.request_ids == ("long",)
    assert prefill_steps(model, chosen.tokens) == 4 + 1
    prefill(book, "long")
    assert admissible(book, model, ahead=True) is None
    book.stepped("a", Phase.PREFILL, StepsDone(1, 4, seconds=0.01, tokens=64, remaining=1), 0.1)
    assert model.outstanding == 136
    book.stepped("a", Phase.PREFILL, StepsDone(1, 3, seconds=0.01, tokens=64, remaining=1), 0.2)
    chosen = admissible(book, model, ahead=True)
    assert chosen is not None
    assert chosen.request_ids == ("next",)


def test_what_a_step_computed_is_counted_once() -> None:
    """Also when prompts are done with it, whose tokens are among what it computed."""
    book = ledger()
    model = book.by_name["a"]
    for name, prompt in (("first", 40), ("second", 60), ("third", 30)):
        arrive(book, name, prompt=prompt)
    prefill(book, "first", "second", "third")
    assert model.outstanding == 130
    book.handed_over("first", 1, 1, 0.1)
    book.stepped("a", Phase.PREFILL, StepsDone(1, 4, seconds=0.01, tokens=64, remaining=2), 0.1)
    assert model.outstanding == 66, "36 of the second, and the third"
    # A client goes away: of what is left, nobody knows whose it was, but no more than all of the third's.
    book.cancelled("second", 0.15)
    assert model.outstanding == 30
    book.finished("third", Phase.PREFILL, 1, 0.2)
    book.stepped("a", Phase.PREFILL, StepsDone(1, 3, seconds=0.01, tokens=30, remaining=0), 0.2)
    assert (model.outstanding, model.prefill_tokens, model.promised, model.pool.promised) == (0, 0, 0, 0)


def test_a_cached_prefix_is_promised_no_longer_than_it_is_unknown() -> None:
    book = ledger()
    model = book.by_name["a"]
    arrive(book, "cached", prompt=100)
    arrive(book, "next", prompt=50)
    prefill(book, "cached", "next")
    book.handed_over("cached", 1, 1, 0.1)
    book.stepped("a", Phase.PREFILL, StepsDone(1, 4, seconds=0.01, tokens=4, remaining=1), 0.1)
    assert model.outstanding == 50


def test_an_unfinished_prefill_wants_to_go_on() -> None:
    book = ledger()
    model = book.by_name["a"]
    arrive(book, "r", prompt=200)
    prefill(book, "r", steps=1)
    assert not wants_prefill(book, model, 0.0)
    book.stepped("a", Phase.PREFILL, StepsDone(1, 0, seconds=0.01, tokens=64, remaining=1), 0.1)
    assert wants_prefill(book, model, 0.1)


@pytest.mark.parametrize("parts", [1, 2, 3, 6, 7, 10, 48])
def test_equal_shares_fit_together(parts: int) -> None:
    assert WHOLE - parts <= parts * share_units(1 / parts) <= WHOLE


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_is_a_fraction(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        share_units(share)


def test_models_and_pools_must_be_known() -> None:
    with pytest.raises(ValueError, match="two models"):
        UnitLedger([profile("a"), profile("a")], [PoolProfile("pool", 10)])
    with pytest.raises(ValueError, match="unknown pool"):
        UnitLedger([profile("a", pool="lake")], [PoolProfile("pool", 10)])


# ---------------------------------------------------------------- moves


def decoding(book: UnitLedger, request_id: str, lease: int = 2) -> None:
    arrive(book, request_id)
    prefill(book, request_id)
    hand_over(book, request_id)
    decode(book, request_id, lease=lease)


def test_a_request_that_moves_is_in_no_engine_and_still_counted() -> None:
    book = ledger()
    decoding(book, "r")
    model = book.by_name["a"]
    assert not book.detached("r", 1, 5, 1.0), "not that life of it"
    assert book.detached("r", 2, 5, 1.0)
    assert book.requests["r"].place is RequestPlace.MOVING
    assert (model.live, model.in_engines, model.levels) == (1, 1, {"normal": 1})
    assert model.decode.lease is None
    assert book.share_used == 0
    assert not book.finished("r", Phase.DECODE, 9, 1.0)
    assert not book.returned("r", 2, 5, 1.0)
    assert not book.detached("r", 2, 5, 1.0)
    assert book.moved("r", 2.0)
    assert not book.moved("r", 2.0)
    assert (model.live, model.levels, model.tally.moved_out) == (0, {}, 1)
    assert model.work_since is None


def test_the_lease_goes_on_with_those_that_stay() -> None:
    book = ledger()
    for request_id in "rs":
        arrive(book, request_id)
    prefill(book, "r", "s")
    for request_id in "rs":
        hand_over(book, request_id)
    decode(book, "r", "s")
    assert book.detached("r", 2, 5, 1.0)
    assert book.by_name["a"].decode.lease is not None


def test_a_request_that_stays_waits_for_its_engine_again() -> None:
    book = ledger()
    decoding(book, "r")
    assert not book.stays("r", 1.0)
    book.detached("r", 2, 5, 1.0)
    assert book.stays("r", 1.5)
    model = book.by_name["a"]
    assert list(model.handed) == ["r"]
    assert model.decode.wait_since == 1.5
    decode(book, "r", lease=7, now=2.0)
    assert book.finished("r", Phase.DECODE, 7, 3.0)


@pytest.mark.parametrize("reported", [2, 3])
def test_a_lease_stays_for_a_request_that_is_cancelled_on_its_way_in(reported: int) -> None:
    book = ledger()
    arrive(book, "first")
    prefill(book, "first", lease=1)
    arrive(book, "second", at=0.05)
    prefill(book, "second", lease=2, now=0.05)
    prefill(book, lease=3, now=0.06)
    book.cancelled("second", 0.07)
    # The engine has not yet seen the second one when it says that it has nothing left, and will take a step for it.
    hand_over(book, "first", lease=1)
    assert book.share_used == book.by_name["a"].prefill.share
    book.stepped("a", Phase.PREFILL, StepsDone(reported, 1, seconds=0.01, tokens=20, remaining=0), 0.2)
    assert book.share_used == 0


@pytest.mark.parametrize("way", ["cancelled", "lost", "engine dies"])
def test_the_end_of_a_moving_request(way: str) -> None:
    book = ledger()
    decoding(book, "r")
    book.detached("r", 2, 5, 1.0)
    if way == "cancelled":
        assert book.cancelled("r", 2.0) is RequestPlace.MOVING
    elif way == "lost":
        assert book.lost(["r"], 2.0) == ["r"]
    else:
        assert book.engine_down("a", Phase.DECODE, 2.0) == [], "it is not in the engine"
        assert book.by_name["a"].live == 1
        return
    assert book.by_name["a"].live == 0


def test_a_request_that_comes_waits_for_the_decode_engine_and_is_no_arrival() -> None:
    book = ledger()
    live = book.taken_over(
        QueuedRequest(
            "r",
            model="a",
            prompt_tokens=20,
            max_tokens=10,
            arrival=0.5,
            service=ServiceClass(execution="high"),
            output_tokens=4,
            resumed=True,
        ),
        1.0,
    )
    model = book.by_name["a"]
    assert live.place is RequestPlace.HANDED
    assert (model.tally.arrived, model.tally.moved_in, model.levels) == (0, 1, {"high": 1})
    assert model.decode.wait_since == 1.0
    assert model.work_since == 0.5
    with pytest.raises(ValueError, match="live already"):
        book.taken_over(QueuedRequest("r", "a", 20, 10, 0.5), 1.0)


def test_moving_requests_keep_their_seat() -> None:
    book = ledger(max_num_seqs=1)
    decoding(book, "r")
    book.detached("r", 2, 5, 1.0)
    arrive(book, "s")
    assert admissible(book, book.by_name["a"]) is None, "it may come back"
    book.moved("r", 2.0)
    assert admissible(book, book.by_name["a"]) is not None


def test_what_waits_can_be_given_back_and_nothing_else() -> None:
    book = ledger()
    decoding(book, "r")
    arrive(book, "s")
    assert not book.given_back("r", 1.0)
    assert book.given_back("s", 1.0)
    assert not book.given_back("s", 1.0)
    assert (book.by_name["a"].live, book.by_name["a"].tally.given_back) == (1, 1)


def test_tokens_are_estimated_from_the_steps_reported() -> None:
    book = ledger()
    decoding(book, "r")
    live, model = book.requests["r"], book.by_name["a"]
    assert model.tokens_of(live) == 21
    book.stepped("a", Phase.DECODE, StepsDone(2, 4, seconds=0.04, tokens=4, remaining=1, steps=4), 1.0)
    assert model.tokens_of(live) == 25
    book.stepped("a", Phase.DECODE, StepsDone(2, 2, seconds=0.9, tokens=90, remaining=1, steps=90), 2.0)
    assert model.tokens_of(live) == 30, "it asked for no more than 10"


@pytest.mark.parametrize("heads", [2, 0])
def test_a_prefill_finishes_what_a_pooling_model_is_asked_for(heads: int) -> None:
    book = ledger(pooling=True, kv_heads=heads, quota_pages=0 if not heads else 400)
    book.memory_up = True
    model = book.by_name["a"]
    assert [engine.phase for engine in model.engines] == [Phase.PREFILL]
    assert model in model.pool.models if heads else model not in model.pool.models
    # There is no decode engine to wait for.
    model.decode.up = False
    # As many tokens as blocks, of which none is kept for a token that follows.
    arrive(book, "r", prompt=32)
    assert book.requests["r"].blocks == 2
    assert wants_prefill(book, model, 0.0)
    admission = admissible(book, model)
    assert admission is not None
    prefill(book, *admission.request_ids)
    assert book.finished("r", Phase.PREFILL, 1, 0.1)
    book.stepped("a", Phase.PREFILL, StepsDone(1, 1, seconds=0.01, tokens=32, remaining=0), 0.1)
    assert not book.requests
    assert (model.tally.finished, model.promised, book.share_used) == (1, 0, 0)


def test_a_model_without_pages_is_bounded_by_its_seats_alone() -> None:
    book = ledger(pooling=True, kv_heads=0, quota_pages=0, max_num_seqs=2)
    book.pool_pages("pool", 0, 0)
    for number in range(3):
        arrive(book, f"r{number}")
    admission = admissible(book, book.by_name["a"])
    assert admission is not None
    assert admission.request_ids == ("r0", "r1")
    load = load_of("u", book.by_name["a"], Adbs())
    assert (load.capacity, load.used, load.waiting) == (32, 0, 3)
    prefill(book, *admission.request_ids)
    assert load_of("u", book.by_name["a"], Adbs()).used == 32
    assert load_of("u", book.by_name["a"], Adbs()).pages == 0


def test_a_load_has_the_pages_that_the_model_itself_asks_for() -> None:
    book = ledger()
    model = book.by_name["a"]
    arrive(book, "r")
    arrive(book, "s")
    queued = 2 * model.blocks_of(20) * model.pages_per_block
    assert load_of("u", model, Adbs()).pages == queued
    # What others hold makes it less free, and asks for nothing in its name.
    assert load_of("u", model, Adbs(), used=12, available=0).pages == queued + 12


def test_states_are_counted_with_every_sequence() -> None:
    book = ledger(state_blocks=3)
    model = book.by_name["a"]
    assert model.blocks_of(20) == 20 // model.block_tokens + 1 + 3
    arrive(book, "r")
    arrive(book, "s")
    assert model.queue.blocks == 2 * model.blocks_of(20)
    prefill(book, "r", "s")
    # Both prompts, a block for the token after each, and their states.
    assert model.promised == (-(-40 // model.block_tokens) + 2 * (1 + 3)) * model.pages_per_block


def test_what_is_behind_a_window_is_not_promised() -> None:
    """One layer of two has a window of 40 tokens: of it a sequence keeps 4 blocks of 16, and 8 while a prompt is
    computed 64 tokens at a time."""
    book = ledger(window=40, windowed_layers=1, max_num_batched_tokens=64, quota_pages=1000)
    model = book.by_name["a"]
    assert model.block_tokens == 16
    # As many pages as whole blocks have.
    assert model.blocks_of(63) == 4
    assert model.blocks_of(16 * 99) == 100 - 96 // 2
    arrive(book, "r", prompt=16 * 99)
    assert model.queue.blocks == 100 - 92 // 2 == model.blocks_of_prompt(16 * 99)
    prefill(book, "r")
    assert model.promised == (99 + 1) * 4 - (99 - 8) * 2
