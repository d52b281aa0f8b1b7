"""When instances come and go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.replicas.decisions import Drain, Resume, Start, StopInstance
from muxserve.replicas.priorities import DEFAULT_LEVELS
from muxserve.replicas.scaling import Scaler, ScalingRules
from muxserve.replicas.views import InstanceLoad
from muxserve.replicas.virtual_usage import score
from tests.replicas.support import CAPACITY, load

RULES = ScalingRules(minimum=1, maximum=4, low=100, high=1_000, hold=10)
FULL, FINE, FREE = 9_950, 9_500, 1_000


def draining(name: str, used: int = 0, running: int = 0) -> InstanceLoad:
    return score(InstanceLoad(name, CAPACITY, used=used, running=running, terminating=True), DEFAULT_LEVELS)


def test_scales_out_only_after_the_load_has_been_high_all_the_time() -> None:
    scaler = Scaler(RULES)
    full, fine = [load("a", FULL, 1)], [load("a", FINE, 1)]
    assert scaler.decide(0, full, 0, 0) == []
    assert scaler.decide(9, full, 0, 0) == []
    assert scaler.decide(9.5, fine, 0, 0) == []
    assert scaler.decide(10, full, 0, 0) == []
    assert scaler.decide(19.9, full, 0, 0) == []
    assert scaler.decide(20, full, 0, 0) == [Start(1)]
    # The next one needs another ten seconds.
    assert scaler.decide(20.1, full, 1, 0) == []
    assert scaler.decide(30.2, full, 1, 0) == [Start(1)]


def test_never_more_than_the_maximum_with_those_that_are_starting() -> None:
    scaler = Scaler(RULES)
    full = [load(name, FULL, 1) for name in "ab"]
    assert [scaler.decide(now, full, 2, 0) for now in (0, 10, 20)] == [[], [], []]


def test_scales_in_the_one_with_the_fewest_requests_down_to_the_minimum() -> None:
    scaler = Scaler(RULES)
    free = [load("a", 2_000, 3), load("b", 1_000, 2), load("c", 1_000, 2)]
    assert scaler.decide(0, free, 0, 0) == []
    assert scaler.decide(10, free, 0, 0) == [Drain("b")]
    one = [load("a", 2_000, 1), draining("b", 1_000, 2)]
    assert [scaler.decide(now, one, 0, 0) for now in (11, 30, 60)] == [[], [], []]


def test_does_not_drain_while_one_is_starting() -> None:
    scaler = Scaler(RULES)
    free = [load(name, FREE, 1) for name in "ab"]
    assert [scaler.decide(now, free, 1, 0) for now in (0, 10)] == [[], []]


def test_a_drained_instance_is_stopped_once_it_is_empty() -> None:
    scaler = Scaler(RULES)
    assert scaler.decide(0, [load("a", FINE, 1), draining("b", 100, 1)], 0, 0) == []
    assert scaler.decide(1, [load("a", FINE, 1), draining("b")], 0, 0) == [StopInstance("b")]


def test_a_draining_instance_stays_rather_than_that_another_starts() -> None:
    scaler = Scaler(RULES)
    loads = [load("a", FULL, 1), draining("b", 100, 1), draining("c", 500, 3)]
    assert scaler.decide(0, loads, 0, 0) == []
    assert scaler.decide(10, loads, 0, 0) == [Resume("c")]


def test_missing_instances_are_started_at_once() -> None:
    rules = ScalingRules(minimum=3, maximum=4, low=100, high=1_000)
    assert Scaler(rules).decide(0, [load("a", FINE, 1)], 0, 0) == [Start(2)]
    assert Scaler(rules).decide(0, [load("a", FINE, 1)], 1, 0) == [Start(1)]
    assert Scaler(rules).decide(0, [load("a", FINE, 1), draining("b", 9, 1)], 0, 0) == [Resume("b"), Start(1)]


def test_scales_to_zero_after_a_while_and_wakes_for_a_request() -> None:
    rules = ScalingRules(minimum=0, maximum=2, low=100, high=1_000, hold=1, idle_seconds=60)
    scaler = Scaler(rules)
    idle = [load("a")]
    assert scaler.decide(0, idle, 0, 0) == []
    assert scaler.decide(30, [load("a", 100, 1)], 0, 0) == []
    assert scaler.decide(31, idle, 0, 0) == []
    assert scaler.decide(90, idle, 0, 0) == []
    assert scaler.decide(91, idle, 0, 0) == [Drain("a")]
    assert scaler.decide(92, [draining("a")], 0, 0) == [StopInstance("a")]
    assert scaler.decide(500, [], 0, 0) == []
    assert scaler.decide(501, [], 0, 1) == [Start(1)]
    assert scaler.decide(502, [], 1, 3) == []


@pytest.mark.parametrize(
    "wrong",
    [{"minimum": 3, "maximum": 2}, {"maximum": 0, "minimum": 0}, {"low": 5.0, "high": 5.0}, {"hold": -1.0}],
)
def test_rules_that_contradict_each_other(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"need|must"):
        ScalingRules(**wrong)  # type: ignore[arg-type]


@given(
    st.integers(0, 2),
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 30), st.integers(-500, 9_000), st.integers(0, 2)), max_size=40),
)
def test_bounds_hold_whatever_happens(minimum: int, more: int, steps: list[tuple[float, int, int]]) -> None:
    rules = ScalingRules(minimum, minimum + more, low=100, high=1_000, hold=5, idle_seconds=20)
    scaler = Scaler(rules)
    up: dict[str, bool] = {}
    names = starting = 0
    now = 0.0
    for pause, freeness, waits in steps:
        now += pause
        running = 0 if freeness > 8_000 else 1
        loads = [
            draining(n, 0 if not running else 10, running) if going else load(n, CAPACITY - freeness, running)
            for n, going in up.items()
        ]
        for change in scaler.decide(now, loads, starting, waits):
            match change:
                case Start(count):
                    starting += count
                case Drain(name):
                    up[name] = True
                case Resume(name):
                    up[name] = False
                case StopInstance(name):
                    assert up.pop(name)
        serving = sum(not going for going in up.values())
        assert serving + starting <= rules.maximum
        assert serving + starting >= rules.minimum
        if waits:
            assert serving + starting
        if starting and pause > 3:
            names, starting = names + 1, starting - 1
            up[f"i{names}"] = False
