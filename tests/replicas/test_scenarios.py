"""Four purposes, one rule: what Llumnix's figure 3 shows comes out of virtual usage and pairing alone."""

from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import DEFAULT_LEVELS
from muxserve.replicas.views import InstanceView, RequestView
from tests.replicas.support import CAPACITY, freeness_of, rebalance, request, waiting

RULES = MigrationRules(source_below=100, destination_above=200)


def instance(name: str, *running: RequestView, queue: tuple[RequestView, ...] = ()) -> InstanceView:
    return InstanceView(name, CAPACITY, running=list(running), waiting=list(queue))


def total(view: InstanceView) -> int:
    return sum(each.usage for each in view.running)


def test_load_balancing() -> None:
    full = instance("full", *(request(f"f{n}", 990) for n in range(10)))
    half = instance("half", *(request(f"h{n}", 500) for n in range(4)))
    assert rebalance([full, half], RULES, DEFAULT_LEVELS) > 0
    assert freeness_of(full, DEFAULT_LEVELS) >= RULES.source_below
    assert freeness_of(half, DEFAULT_LEVELS) >= RULES.source_below
    assert total(full) < 9_900
    assert total(half) > 2_000


def test_defragmentation_a_long_prompt_gets_room_that_no_instance_had() -> None:
    # 3,000 tokens are free on each of three instances; the prompt needs 6,000.
    views = [instance(name, *(request(f"{name}{n}", 1_000) for n in range(7))) for name in "abc"]
    views[0].waiting = [waiting("long", 6_000)]
    assert all(view.capacity - total(view) < 6_000 for view in views)
    rebalance(views, RULES, DEFAULT_LEVELS)
    assert "long" in [each.request_id for each in views[0].running]
    assert all(total(view) <= CAPACITY for view in views)


def test_a_high_priority_request_gets_its_instance_to_itself_as_far_as_its_target_load_says() -> None:
    mixed = instance("mixed", request("vip", 800, "high"), *(request(f"m{n}", 900) for n in range(6)))
    other = instance("other", request("o", 500))
    rebalance([mixed, other], RULES, DEFAULT_LEVELS)
    assert "vip" in [each.request_id for each in mixed.running]
    # Its target load is 1,600 tokens; what is left of the others keeps its freeness above the threshold.
    assert total(mixed) <= 1_600
    assert len(other.running) > 4


def test_draining_empties_an_instance_whatever_runs_on_it() -> None:
    going = instance("going", request("vip", 800, "high"), request("long", 6_000), request("short", 100))
    going.terminating = True
    others = [instance("a", request("x", 3_900)), instance("b", request("y", 5_000))]
    rebalance([going, *others], RULES, DEFAULT_LEVELS)
    assert not going.running
    assert sorted(each.request_id for view in others for each in view.running) == ["long", "short", "vip", "x", "y"]


def test_draining_leaves_what_nobody_can_hold() -> None:
    going = instance("going", request("long", 6_000), request("short", 100))
    going.terminating = True
    other = instance("a", request("x", 4_100))
    rebalance([going, other], RULES, DEFAULT_LEVELS)
    assert [each.request_id for each in going.running] == ["long"]


def test_nothing_moves_in_balance() -> None:
    views = [instance(name, *(request(f"{name}{n}", 700) for n in range(8))) for name in "abcd"]
    assert rebalance(views, RULES, DEFAULT_LEVELS) == 0
