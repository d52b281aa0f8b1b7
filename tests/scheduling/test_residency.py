"""Which models are awake: single decisions, and properties over random loads on a virtual clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muxserve.scheduling.arrival_rates import ArrivalRates
from muxserve.scheduling.residency import Residency
from muxserve.scheduling.residency_types import (
    Change,
    Refuse,
    Residence,
    ResidencyRules,
    Sleep,
    Standing,
    Stay,
    Wake,
    WakeCosts,
    WakeRules,
)
from muxserve.scheduling.wake_order import TimedJob, moore_hodgson
from tests.support.thoroughness import examples

ROUND = 0.1
# Rounds from one measurement of memory to the next.
MEASURED = 7
STOP_SECONDS = 0.1
ASLEEP, WAKING, AWAKE, LEAVING = Residence.ASLEEP, Residence.WAKING, Residence.AWAKE, Residence.LEAVING


def residency(limit: int, **models: WakeCosts) -> Residency:
    return Residency(ResidencyRules(limit, min_residence=2.0, residence_factor=1.0), models)


# ---------------------------------------------------------------- deadlines


def test_moore_hodgson_leaves_out_what_takes_longest() -> None:
    jobs = [TimedJob("long", 5.0, 6.0), TimedJob("a", 2.0, 7.0), TimedJob("b", 2.0, 8.0)]
    in_time, late = moore_hodgson(jobs, 0.0)
    assert [job.name for job in in_time] == ["a", "b"]
    assert [job.name for job in late] == ["long"]


def test_a_wake_that_serves_many_is_not_left_out() -> None:
    jobs = [TimedJob("many", 5.0, 6.0, weight=10), TimedJob("a", 2.0, 6.5)]
    assert [job.name for job in moore_hodgson(jobs, 0.0)[0]] == ["many"]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 12)), max_size=6))
def test_moore_hodgson_leaves_the_fewest_late_jobs(drawn: list[tuple[int, int]]) -> None:
    jobs = [TimedJob(str(n), float(p), float(d)) for n, (p, d) in enumerate(drawn)]
    in_time, late = moore_hodgson(jobs, 0.0)
    ends = list(itertools.accumulate(job.seconds for job in in_time))
    assert all(end <= job.deadline for end, job in zip(ends, in_time, strict=True))
    assert {job.name for job in in_time} | {job.name for job in late} == {job.name for job in jobs}

    def met(order: tuple[TimedJob, ...]) -> int:
        return sum(
            end <= job.deadline for end, job in zip(itertools.accumulate(j.seconds for j in order), order, strict=True)
        )

    assert len(in_time) == max(map(met, itertools.permutations(jobs)))


# ---------------------------------------------------------------- single decisions


def test_rates_count_a_burst_at_once_and_remember_what_comes_rarely() -> None:
    burst, rare = ArrivalRates((5.0, 600.0)), ArrivalRates((5.0, 600.0))
    for n in range(10):
        burst.add(100 + 0.1 * n)
        rare.add(10.0 * n)
    assert burst.most(101) > 1.5
    assert burst.most(140) < rare.most(140) * 1.5
    assert ArrivalRates((5.0,)).most(0.0) == 0.0


def test_with_room_a_model_is_woken_and_nobody_sleeps() -> None:
    policy = residency(100, a=WakeCosts(40), b=WakeCosts(40))
    standings = [Standing("a", AWAKE, 0.0), Standing("b", ASLEEP, 0.0, waiting=[9.9])]
    assert policy.decide(10.0, 10, standings) == [Wake("b")]


def test_what_is_loaded_needs_more_room_than_what_stays() -> None:
    policy = residency(100, a=WakeCosts(40), b=WakeCosts(40, load_bytes=15))
    standings = [Standing("a", AWAKE, 0.0), Standing("b", ASLEEP, 0.0, waiting=[9.9])]
    assert policy.decide(10.0, 10, standings) == [Sleep("a", "memory for b")]


def test_the_model_sleeps_whose_absence_costs_least() -> None:
    policy = residency(100, a=WakeCosts(40), b=WakeCosts(40), c=WakeCosts(40))
    for n in range(20):
        policy.arrived("a", n)
    policy.arrived("b", 0.0)
    standings = [Standing("a", AWAKE, 0.0), Standing("b", AWAKE, 0.0), Standing("c", ASLEEP, 0.0, waiting=[20.0])]
    assert policy.decide(20.0, 10, standings) == [Sleep("b", "memory for c")]
    policy.woke("b", 60.0)  # as it turns out, b takes very long to come back
    assert policy.decide(20.0, 10, standings) == [Sleep("a", "memory for c")]


def test_a_busy_model_sleeps_only_for_one_that_has_waited() -> None:
    policy = residency(100, a=WakeCosts(60), b=WakeCosts(60))
    standings = [Standing("a", AWAKE, 0.0, running=1), Standing("b", ASLEEP, 0.0, waiting=[10.0])]
    assert policy.decide(10.0, 10, standings) == []
    assert policy.decide(10.5, 10, standings) == [Sleep("a", "memory for b")]


def test_pinned_and_lately_woken_models_stay() -> None:
    policy = residency(100, a=WakeCosts(60, pinned=True), b=WakeCosts(60))
    assert policy.decide(99.0, 10, [Standing("a", AWAKE, 0.0), Standing("b", ASLEEP, 0.0, waiting=[98.0])]) == []
    policy = residency(100, a=WakeCosts(60), b=WakeCosts(60))
    standings = [Standing("a", AWAKE, 9.0), Standing("b", ASLEEP, 0.0, waiting=[0.0])]
    assert policy.decide(10.0, 10, standings) == []
    assert policy.decide(11.0, 10, standings) == [Sleep("a", "memory for b")]


def test_a_leaving_model_stays_when_nobody_needs_its_memory() -> None:
    policy = residency(100, a=WakeCosts(60), b=WakeCosts(60))
    leaving = Standing("a", LEAVING, 9.0, running=1, waiting=[9.5])
    assert policy.decide(10.0, 10, [leaving, Standing("b", ASLEEP, 0.0, waiting=[9.0])]) == []
    assert policy.decide(10.0, 10, [leaving, Standing("b", ASLEEP, 0.0)]) == [Stay("a")]


def test_more_than_the_limit_puts_models_to_sleep_at_once() -> None:
    policy = residency(100, a=WakeCosts(40), b=WakeCosts(40))
    standings = [Standing("a", AWAKE, 9.9, held=55), Standing("b", AWAKE, 9.9, held=40)]
    policy.arrived("a", 9.9)
    (change,) = policy.decide(10.0, 10, standings)
    assert change == Sleep("b", "more memory is taken than there is")


def test_what_a_model_may_come_to_take_is_given_to_nobody_else() -> None:
    policy = residency(100, a=WakeCosts(40), b=WakeCosts(40))
    policy.sizes.measured("a", 20)  # perhaps it has not served anybody yet
    asked = Standing("b", ASLEEP, 0.0, waiting=[10.0])
    idle = [Standing("a", AWAKE, 0.0, held=20), asked]
    assert policy.decide(10.0, 30, idle) == [Sleep("a", "memory for b")]
    assert policy.decide(10.0, 20, idle) == [Wake("b")]
    policy.sizes.measured("a", 45)  # more than was declared
    assert policy.decide(10.0, 20, idle) == [Sleep("a", "memory for b")]


def test_what_is_set_aside_is_learnt_from_the_last_residences() -> None:
    policy = residency(1000, a=WakeCosts(100, load_bytes=10, margin=8))
    policy.sizes.measured("a", 60)
    assert policy.sizes.expected("a") == 100
    policy.sizes.measured("a", 50)
    assert (policy.sizes.expected("a"), policy.sizes.needs("a")) == (68, 78)
    for most in (55, 52, 51, 50):
        policy.woke("a", 1.0)
        policy.sizes.measured("a", most)
        policy.sizes.measured("a", most)
    assert policy.sizes.expected("a") == 63  # of the last three and this one the most is 55
    policy.sizes.measured("a", 97)
    assert policy.sizes.expected("a") == 100  # no more than declared, before it was measured
    policy.sizes.measured("a", 130)
    assert policy.sizes.expected("a") == 130


def test_a_residence_in_which_it_was_hardly_measured_teaches_nothing() -> None:
    policy = residency(1000, a=WakeCosts(100, margin=5))
    policy.sizes.measured("a", 20)
    policy.woke("a", 1.0)
    assert policy.sizes.expected("a") == 100
    policy.sizes.measured("a", 60)
    assert policy.sizes.expected("a") == 65


def test_a_model_never_awake_is_expected_to_be_as_sparing_as_those_that_are_as_large() -> None:
    policy = residency(1000, large=WakeCosts(100), other=WakeCosts(90), small=WakeCosts(50), huge=WakeCosts(200))
    for name, most in (("large", 70), ("other", 80)):
        for _ in range(2):
            policy.sizes.measured(name, most)
    assert policy.sizes.expected("small") == 40  # the other one took 10 less than declared, the large one 30
    assert policy.sizes.expected("huge") == 200
    for _ in range(2):
        policy.sizes.measured("small", 49)
    assert policy.sizes.expected("small") == 49


def test_what_is_no_model_counts_as_declared_until_it_was_measured() -> None:
    policy = Residency(ResidencyRules(100, fixed=30, fixed_margin=5), {"a": WakeCosts(71)})
    asked = [Standing("a", ASLEEP, 0.0, waiting=[10.0])]
    assert policy.decide(10.0, None, asked) == []
    assert policy.decide(10.0, 24, asked) == [Wake("a")]
    assert policy.decide(10.0, 25, asked) == []


def test_who_can_still_be_in_time_goes_first_and_who_has_starved_before_all() -> None:
    costs = WakeCosts(40, seconds=1.0, ttft=3.0)
    policy = residency(1000, hopeless=costs, good=costs, starved=costs)
    waiting = {"hopeless": [93.0], "good": [98.0], "starved": [80.0]}
    standings = [Standing(model, ASLEEP, 0.0, waiting=since) for model, since in waiting.items()]
    assert policy.queue(100.0, standings) == ["starved", "good", "hopeless"]


def ahead(limit: int, sleep_seconds: float = 0.3, wakes: int = 1, **models: WakeCosts) -> Residency:
    rules = ResidencyRules(limit, residence_factor=1.0, sleep_seconds=sleep_seconds, wakes=WakeRules(wakes))
    return Residency(rules, models)


def test_the_cheapest_idle_model_sleeps_before_the_next_one_is_asked_for() -> None:
    costs = WakeCosts(40, seconds=0.6, ttft=2.0)
    policy = ahead(100, a=costs, b=costs, c=costs, d=costs)
    for n in range(10):
        policy.arrived("a", 90.0 + n)
        policy.arrived("c", 90.0 + n)
    policy.arrived("b", 60.0)
    standings = [Standing("a", AWAKE, 0.0), Standing("b", AWAKE, 0.0), Standing("c", ASLEEP, 0.0)]
    standings.append(Standing("d", ASLEEP, 0.0))
    assert policy.decide(100.0, 10, standings) == [Sleep("b", "memory for the next wake", ahead=True)]
    leaving = [standings[0], Standing("b", LEAVING, 100.0), *standings[2:]]
    assert policy.decide(100.1, 10, leaving) == []  # its memory is what the next wake takes


def test_no_model_sleeps_ahead_that_is_asked_for_more_than_the_others() -> None:
    costs = WakeCosts(40, seconds=0.6, ttft=2.0)
    policy = ahead(100, a=costs, b=costs, c=costs)
    for n in range(10):
        policy.arrived("a", 90.0 + n)
        policy.arrived("b", 90.0 + n)
    policy.arrived("c", 90.0)
    standings = [Standing("a", AWAKE, 0.0), Standing("b", AWAKE, 0.0), Standing("c", ASLEEP, 0.0)]
    assert policy.decide(100.0, 10, standings) == []
    assert policy.restless  # it may fall silent
    assert ahead(100, 0.0, a=costs, b=costs, c=costs).decide(100.0, 10, standings) == []


@pytest.mark.parametrize("how", [{"running": 1}, {"since": 99.0}])
def test_busy_models_and_those_lately_woken_do_not_sleep_ahead(how: dict[str, float]) -> None:
    costs = WakeCosts(40, seconds=0.6, ttft=2.0)
    policy = ahead(60, a=costs, b=costs)
    policy.arrived("b", 99.0)
    awake = Standing("a", AWAKE, how.get("since", 0.0), running=int(how.get("running", 0)))
    assert policy.decide(100.0, 10, [awake, Standing("b", ASLEEP, 0.0)]) == []
    assert policy.restless


def test_what_putting_to_sleep_takes_is_learnt_and_makes_room_ahead_worth_more() -> None:
    costs = WakeCosts(40, seconds=0.6, ttft=2.0)
    policy = ahead(60, 0.0, a=costs, b=costs)
    policy.arrived("b", 99.0)
    standings = [Standing("a", AWAKE, 0.0), Standing("b", ASLEEP, 0.0)]
    assert policy.decide(100.0, 10, standings) == []
    policy.times.slept(0.5)
    assert policy.times.sleep_seconds == pytest.approx(0.15)
    assert policy.decide(100.0, 10, standings) == [Sleep("a", "memory for the next wake", ahead=True)]


def test_of_two_wakes_one_after_the_other_comes_first_where_that_serves_more_in_time() -> None:
    costs = WakeCosts(10, seconds=1.0, ttft=1.7)
    policy = Residency(ResidencyRules(1000, wakes=WakeRules(2, cores=2)), {"a": costs, "b": costs})
    policy.times.pace.drag = 1.0
    both = [Standing("a", ASLEEP, 0.0, waiting=[10.0]), Standing("b", ASLEEP, 0.0, waiting=[10.0])]
    assert policy.decide(10.0, 10, both) == [Wake("a"), Wake("b")]  # both after 1.5 s
    policy.times.pace.drag = 1.8
    assert len(policy.decide(10.0, 10, both)) == 1  # both after 1.9 s, or one after 1.0 s
    # The one that is under way is not made late either.
    going = [Standing("a", WAKING, 10.0, waiting=[10.0]), Standing("b", ASLEEP, 0.0, waiting=[10.2])]
    assert policy.decide(10.2, 10, going) == []
    idle = [Standing("a", AWAKE, 0.0), going[1]]
    assert policy.decide(10.2, 10, idle) == [Wake("b")]


def test_what_runs_beside_a_wake_is_not_held_against_its_model() -> None:
    costs = WakeCosts(10, seconds=1.0)
    alone, beside = (
        Residency(ResidencyRules(1000, wakes=WakeRules(2, cores=2)), {"a": costs, "b": costs}) for _ in range(2)
    )
    waking = Standing("a", WAKING, 0.0)
    alone.decide(0.0, 0, [waking])
    alone.decide(1.0, 0, [waking])
    alone.woke("a", 1.0)
    others = [waking, Standing("b", AWAKE, 0.0, running=1)]
    beside.decide(0.0, 0, others)
    beside.decide(1.5, 0, others)
    beside.woke("a", 1.5)
    assert alone.times.seconds("a") == pytest.approx(beside.times.seconds("a")) == pytest.approx(1.0)


def test_a_model_never_woken_is_expected_to_take_as_much_longer_than_declared_as_the_others() -> None:
    policy = residency(1000, a=WakeCosts(10, seconds=1.0), b=WakeCosts(10, seconds=2.0))
    for _ in range(50):
        policy.woke("a", 1.5)
    assert policy.times.seconds("b") == pytest.approx(3.0, rel=0.1)


def test_what_a_wake_needs_is_what_its_last_wakes_took_at_most() -> None:
    costs = WakeCosts(100, load_bytes=40, margin=5)
    policy = residency(1000, a=costs, b=costs)
    for _ in range(2):
        policy.sizes.measured("a", 70, wake_peak=85)
    assert (policy.sizes.expected("a"), policy.sizes.needs("a")) == (75, 90)
    assert policy.sizes.needs("b") == 90  # as large, and never woken
    policy.woke("a", 1.0)
    policy.sizes.measured("a", 70, wake_peak=60)
    assert policy.sizes.needs("a") == 90  # the most of the last three
    for _ in range(3):
        policy.woke("a", 1.0)
        policy.sizes.measured("a", 70, wake_peak=60)
    assert policy.sizes.needs("a") == 75  # it takes more when it is awake


# ---------------------------------------------------------------- less memory than was declared


def test_a_model_without_room_is_woken_beyond_the_limit_when_nobody_else_is_awake() -> None:
    policy = residency(100, a=WakeCosts(40), b=WakeCosts(40))
    asleep = [Standing("a", ASLEEP, 0.0, waiting=[10.0]), Standing("b", ASLEEP, 0.0, waiting=[11.0])]
    assert policy.decide(19.9, 85, asleep) == []
    assert policy.waits_for["a"] == "25 bytes of memory, until others may sleep"
    assert policy.restless
    assert policy.decide(20.0, 85, asleep) == [Wake("a", beyond=25)]
    waking = [Standing("a", WAKING, 20.0, waiting=[10.0]), asleep[1]]
    assert policy.decide(21.0, 85, waking) == []
    assert policy.waits_for == {
        "a": "its wake, which has begun",
        "b": "its wake beyond the limit: 25 bytes are missing although all others sleep",
    }
    # It is not put to sleep again before it has served; it stops for the other one when it has had its time.
    for running in (0, 1):
        assert policy.decide(22.0, 85, [Standing("a", AWAKE, 21.0, running), asleep[1]]) == []
    assert policy.decide(24.0, 85, [Standing("a", AWAKE, 21.0, 1), asleep[1]]) == [
        Sleep("a", "memory for b, which exceeds the limit by itself")
    ]
    assert policy.decide(24.1, 85, [Standing("a", LEAVING, 24.0, 1, waiting=[24.0]), asleep[1]]) == []
    assert policy.decide(24.2, 85, [Standing("a", ASLEEP, 24.2), asleep[1]]) == [Wake("b", beyond=25)]
    # When nobody is served, the limit holds again.
    idle = [Standing("a", ASLEEP, 24.2), Standing("b", AWAKE, 25.0)]
    assert policy.decide(26.0, 85, idle) == []
    assert policy.decide(27.0, 85, idle) == [Sleep("b", "more memory is taken than there is")]


def test_of_several_that_have_no_room_the_last_serves_on() -> None:
    policy = residency(100, a=WakeCosts(40), b=WakeCosts(40))
    policy.arrived("b", 9.0)
    busy = [Standing("a", AWAKE, 0.0, running=1), Standing("b", AWAKE, 0.0, running=1)]
    assert policy.decide(10.0, 500, busy) == [Sleep("a", "more memory is taken than there is")]
    assert policy.decide(10.0, 500, [Standing("a", ASLEEP, 10.0), busy[1]]) == []
    # Nor while it is being woken, or waits for its engines.
    assert policy.decide(10.0, 500, [Standing("b", WAKING, 9.0)]) == []
    assert policy.decide(10.0, 500, [Standing("b", AWAKE, 0.0, waiting=[9.0])]) == []
    assert policy.waits_for == {"b": "its engines, which are being started again"}


def test_beyond_what_there_can_be_requests_are_refused_and_others_go_on() -> None:
    policy = Residency(ResidencyRules(100, ceiling=120), {"a": WakeCosts(40), "b": WakeCosts(10)})
    standings = [Standing("a", ASLEEP, 0.0, waiting=[10.0]), Standing("b", ASLEEP, 0.0, waiting=[12.0])]
    assert policy.decide(20.0, 85, standings) == [Refuse("a", 25), Wake("b")]
    assert policy.decide(20.0, 80, standings)[0] == Wake("a", beyond=20)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ResidencyRules(0),
        lambda: ResidencyRules(1, max_wait=-1.0),
        lambda: WakeRules(most=0),
        lambda: WakeRules(cores=0),
    ],
)
def test_rules_that_make_no_sense(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must"):
        wrong()


# ---------------------------------------------------------------- properties


@dataclass
class Place:
    """A model of the virtual machine."""

    costs: WakeCosts
    most: int
    idle: int
    residence: Residence = ASLEEP
    served: int = 0
    held: int = 0
    since: float = 0.0
    until: float = 0.0
    running: list[float] = field(default_factory=list)
    waiting: list[tuple[float, float]] = field(default_factory=list)

    @property
    def taken(self) -> int:
        if self.residence is ASLEEP:
            return 0
        if self.residence is WAKING:
            return self.most + self.costs.load_bytes
        return self.most if self.served > 1 else self.idle


class Memory:
    """Models on one machine: all running requests of a model at once, wakes and stops take their time. A model takes
    `spared` bytes less than declared from the second request of a residence on, and before that its margin less. They
    are measured every `MEASURED` rounds."""

    def __init__(self, rules: ResidencyRules, fixed: int, costs: dict[str, WakeCosts], spared: int = 0) -> None:
        self.policy = Residency(rules, costs)
        self.rules, self.fixed = rules, fixed
        self.places = {
            name: Place(each, each.bytes - spared, each.bytes - spared - each.margin) for name, each in costs.items()
        }
        self.rounds = 0
        self.waits: list[float] = []
        self.wakes = 0
        self.woken: dict[str, list[float]] = {name: [] for name in costs}
        self.short: list[str] = []
        # Models that slept since more was taken than there is: measurements of others have raised what they count as.
        self.beyond: set[str] = set()

    @property
    def taken(self) -> int:
        return self.fixed + sum(place.taken for place in self.places.values())

    def arrive(self, now: float, model: str, seconds: float) -> None:
        self.policy.arrived(model, now)
        self.places[model].waiting.append((now, seconds))

    def step(self, now: float) -> None:
        for name, place in self.places.items():
            place.running = [end for end in place.running if end > now]
            if place.residence is WAKING and now >= place.until:
                place.residence, place.since, place.served, place.held = AWAKE, now, 0, 0
                self.policy.woke(name, place.costs.seconds)
            if place.residence is LEAVING and not place.running and now >= place.until:
                place.residence, place.held = ASLEEP, 0
                self.policy.times.slept(STOP_SECONDS)
            if place.residence is AWAKE:
                for arrived, seconds in place.waiting:
                    self.waits.append(now - arrived)
                    place.running.append(now + seconds)
                    place.served += 1
                place.waiting.clear()
        self.rounds += 1
        if self.rounds % MEASURED == 0:
            for name, place in self.places.items():
                if place.residence is AWAKE:
                    place.held = place.taken
                    self.policy.sizes.measured(name, place.held)
        for change in self.policy.decide(now, self.fixed, self.standings()):
            self.carry_out(change, now)

    def standings(self) -> list[Standing]:
        return [
            Standing(
                name,
                place.residence,
                place.since,
                len(place.running),
                [since for since, _ in place.waiting],
                0 if place.residence is WAKING else place.held,
            )
            for name, place in self.places.items()
        ]

    def carry_out(self, change: Change, now: float) -> None:
        place = self.places[change.model]
        if isinstance(change, Wake):
            assert place.residence is ASLEEP
            place.residence, place.until = WAKING, now + place.costs.seconds
            self.wakes += 1
            self.woken[change.model].append(now)
        elif isinstance(change, Sleep):
            assert place.residence is AWAKE
            assert not place.costs.pinned
            if change.reason == "more memory is taken than there is":
                self.beyond.add(change.model)
            elif now - place.since < self.rules.min_residence:
                self.short.append(change.model)
            place.residence, place.until = LEAVING, now + STOP_SECONDS
        else:
            assert place.residence is LEAVING
            place.residence = AWAKE


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Memory, list[tuple[float, str, float]]]:
    count = draw(st.integers(2, 7))
    margin, spared = draw(st.sampled_from([0, 4])), draw(st.sampled_from([0, 3, 6]))
    costs = {
        f"m{n}": WakeCosts(
            draw(st.integers(10, 60)),
            draw(st.integers(0, 20)),
            draw(st.sampled_from([0.2, 0.6, 1.5])),
            draw(st.sampled_from([0.5, 2.0, 8.0])),
            margin=margin,
        )
        for n in range(count)
    }
    largest = max(each.bytes + each.load_bytes for each in costs.values())
    fixed = draw(st.integers(0, 30))
    limit = fixed + largest + draw(st.integers(0, 120))
    rules = ResidencyRules(
        limit,
        min_residence=draw(st.sampled_from([0.5, 2.0])),
        max_wait=6.0,
        wakes=WakeRules(draw(st.integers(1, 2)), cores=2, ahead=draw(st.booleans())),
        sleep_seconds=draw(st.sampled_from([0.0, 0.1, 1.0])),
    )
    arrivals = draw(
        st.lists(
            st.tuples(st.floats(0.0, 30.0), st.sampled_from(sorted(costs)), st.sampled_from([0.1, 1.0, 4.0])),
            max_size=60,
        )
    )
    return Memory(rules, fixed, costs, spared), sorted(arrivals)


@settings(max_examples=examples(150), deadline=None)
@given(worlds())
def test_memory_is_kept_everybody_is_served_and_nobody_thrashes(
    world: tuple[Memory, list[tuple[float, str, float]]],
) -> None:
    memory, arrivals = world
    models = len(memory.places)
    # Each turn: a model stays its time, finishes its longest request, stops, and the next one is woken.
    stay = max(memory.rules.min_residence, memory.rules.residence_factor * 1.5)
    turn = stay + 4.0 + STOP_SECONDS + 1.5 + 3 * ROUND
    bound = memory.rules.max_wait + 2 * models * turn
    left = list(arrivals)
    now = 0.0
    while left or any(place.waiting for place in memory.places.values()):
        while left and left[0][0] <= now:
            _, model, seconds = left.pop(0)
            memory.arrive(now, model, seconds)
        memory.step(now)
        assert memory.taken <= memory.rules.limit
        oldest = min((since for place in memory.places.values() for since, _ in place.waiting), default=now)
        assert now - oldest <= bound, "somebody starves"
        now += ROUND
    assert len(memory.waits) == len(arrivals)
    assert not memory.short, "a model was put to sleep before it had its time"
    ahead = models if memory.rules.wakes.ahead else 0
    assert memory.wakes <= len(arrivals) + ahead, "a wake that served nobody"
    for name, at in memory.woken.items():
        if name in memory.beyond:
            continue
        # However memory is kept free ahead: a wake, its residence, and a stop lie between two wakes of a model.
        least = memory.places[name].costs.seconds + memory.rules.min_residence + STOP_SECONDS - 2 * ROUND
        assert all(later - earlier >= least for earlier, later in itertools.pairwise(at)), "thrash"


class Mismeasured(Memory):
    """The same, whose measurements may be of anything, and whose policy may be lost."""

    def __init__(self, rules: ResidencyRules, costs: dict[str, WakeCosts], draw: st.DrawFn) -> None:
        super().__init__(rules, 0, costs)
        self._draw = draw
        self.refused = 0
        for place in self.places.values():
            if place.costs.pinned:
                place.residence = AWAKE

    def bytes(self) -> int:
        return self._draw(st.one_of(st.integers(0, 3 * self.rules.limit), st.just(0), st.just(1 << 62)))

    def measure(self) -> None:
        self.fixed = self.bytes()
        for name, place in self.places.items():
            place.held = self.bytes() if self._draw(st.booleans()) else place.held
            if self._draw(st.booleans()):
                self.policy.sizes.measured(name, self.bytes(), self.bytes())

    def lose(self) -> None:
        self.policy = Residency(self.rules, {name: place.costs for name, place in self.places.items()})
        for place in self.places.values():
            place.since = float("-inf") if place.residence is AWAKE else place.since

    def carry_out(self, change: Change, now: float) -> None:
        if isinstance(change, Refuse):
            assert self.rules.ceiling is not None
            self.refused += len(self.places[change.model].waiting)
            self.places[change.model].waiting.clear()
        else:
            super().carry_out(change, now)
            self.places[change.model].since = now


@st.composite
def mismeasured(draw: st.DrawFn) -> tuple[Mismeasured, list[tuple[float, str, float]], list[float], list[float]]:
    """Such a machine, requests, and when it is measured and when the policy is lost."""
    costs = {
        f"m{n}": WakeCosts(
            draw(st.integers(1, 60)), draw(st.integers(0, 20)), 0.5, pinned=draw(st.sampled_from([n < 1, False]))
        )
        for n in range(draw(st.integers(1, 4)))
    }
    limit = draw(st.integers(1, 200))
    rules = ResidencyRules(
        limit,
        min_residence=0.5,
        residence_factor=1.0,
        max_wait=3.0,
        wakes=WakeRules(draw(st.integers(1, 2)), cores=2, ahead=draw(st.booleans())),
        sleep_seconds=draw(st.sampled_from([0.0, 0.3])),
        ceiling=draw(st.sampled_from([None, limit, 2 * limit])),
    )
    asked = st.tuples(st.floats(0.0, 10.0), st.sampled_from(sorted(costs)), st.sampled_from([0.1, 1.0, 3.0]))
    arrivals = draw(st.lists(asked, min_size=1, max_size=25))
    measured, lost = (sorted(draw(st.lists(st.floats(0.0, 20.0), max_size=size))) for size in (12, 3))
    return Mismeasured(rules, costs, draw), sorted(arrivals), measured, lost


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.data_too_large])
@given(mismeasured())
def test_whatever_is_measured_nobody_waits_for_ever(
    world: tuple[Mismeasured, list[tuple[float, str, float]], list[float], list[float]],
) -> None:
    memory, arrivals, measured, lost = world
    turn = 0.5 + 3.0 + STOP_SECONDS + 0.5 + 4 * ROUND
    bound = 2 * memory.rules.max_wait + 2 * len(memory.places) * turn
    asked, now = len(arrivals), 0.0
    while arrivals or any(place.waiting for place in memory.places.values()):
        while arrivals and arrivals[0][0] <= now:
            _, model, seconds = arrivals.pop(0)
            memory.arrive(now, model, seconds)
        if measured and measured[0] <= now:
            measured.pop(0)
            memory.measure()
        if lost and lost[0] <= now:
            lost.pop(0)
            memory.lose()
        memory.step(now)
        for name, place in memory.places.items():
            assert not place.waiting or memory.policy.waits_for.get(name) or place.residence is AWAKE
        oldest = min((since for place in memory.places.values() for since, _ in place.waiting), default=now)
        assert now - oldest <= bound, "somebody waits for ever"
        now += ROUND
    assert len(memory.waits) + memory.refused == asked


@pytest.mark.parametrize("limit", [130, 150, 400])
def test_every_model_is_woken_once_before_it_is_asked_for(limit: int) -> None:
    rules = ResidencyRules(limit, min_residence=0.5, residence_factor=1.0, wakes=WakeRules(cores=2, ahead=True))
    memory = Memory(rules, 10, {f"m{n}": WakeCosts(30, 5, seconds=0.6) for n in range(8)})
    memory.arrive(0.0, "m5", 0.3)
    for step in range(round(15.0 / ROUND)):
        memory.step(step * ROUND)
        room = memory.rules.limit - memory.taken
        assert room >= (0 if any(p.residence is WAKING for p in memory.places.values()) else 35)
    assert memory.places["m5"].residence is AWAKE, "the one that was asked for makes room for no other"
    assert {name: len(at) for name, at in memory.woken.items()} == dict.fromkeys(memory.places, 1)
    asleep = [place for place in memory.places.values() if place.residence is not AWAKE]
    assert (memory.rules.limit - memory.taken < 35 + 35) or not asleep
    assert not memory.short


@pytest.mark.parametrize(
    "other",
    [
        Standing("b", ASLEEP, 0.0, waiting=[9.0]),
        Standing("b", WAKING, 9.0),
        Standing("b", LEAVING, 9.0),
        Standing("b", AWAKE, 0.0, running=1),
    ],
)
def test_nothing_is_woken_ahead_beside_other_work(other: Standing) -> None:
    costs = WakeCosts(40)
    policy = Residency(ResidencyRules(200, wakes=WakeRules(ahead=True)), {"a": costs, "b": costs})
    assert policy.preparing
    assert Wake("a") not in policy.decide(10.0, 10, [Standing("a", ASLEEP, 0.0), other])
    idle = [Standing("a", ASLEEP, 0.0), Standing("b", AWAKE, 0.0)]
    assert policy.decide(11.0, 10, idle) == [Wake("a")]
    # Once: whatever became of it.
    assert policy.decide(12.0, 10, idle) == []
    assert not policy.preparing
    without = Residency(ResidencyRules(200), {"a": costs, "b": costs})
    assert without.decide(11.0, 10, idle) == []
    assert not without.preparing


def test_a_model_that_nobody_asked_for_sleeps_while_another_is_woken_ahead() -> None:
    rules = ResidencyRules(100, min_residence=2.0, residence_factor=1.0, wakes=WakeRules(ahead=True))
    policy = Residency(rules, {name: WakeCosts(40) for name in "abc"})
    policy.arrived("b", 0.0)
    awake = [Standing("a", AWAKE, 0.0), Standing("b", AWAKE, 0.0), Standing("c", ASLEEP, 0.0)]
    assert policy.decide(1.0, 10, awake) == []
    assert policy.preparing, "its residence ends without any message"
    assert policy.decide(2.0, 10, awake) == [Sleep("a", "memory to wake c ahead", ahead=True)]
    asleep = [Standing("a", ASLEEP, 2.0), *awake[1:]]
    assert policy.decide(3.0, 10, asleep) == [], "memory for another wake stays free"
    assert not policy.preparing


def test_where_all_have_room_all_are_awake_before_anybody_asks() -> None:
    rules = ResidencyRules(200, min_residence=0.5, residence_factor=1.0, wakes=WakeRules(cores=2, ahead=True))
    memory = Memory(rules, 10, {f"m{n}": WakeCosts(40, seconds=0.6) for n in range(4)})
    for step in range(round(5.0 / ROUND)):
        memory.step(step * ROUND)
    assert {place.residence for place in memory.places.values()} == {AWAKE}
    assert {name: len(at) for name, at in memory.woken.items()} == dict.fromkeys(memory.places, 1)


def test_two_that_never_fit_together_take_turns_under_endless_load() -> None:
    costs = {"a": WakeCosts(60, seconds=0.5), "b": WakeCosts(60, seconds=0.5)}
    memory = Memory(ResidencyRules(100, max_wait=5.0), 10, costs)
    for step in range(600):
        for model in costs:
            memory.arrive(step * ROUND, model, 0.5)
        memory.step(step * ROUND)
    assert 10 <= memory.wakes <= 60 / memory.rules.min_residence
    assert max(memory.waits) <= memory.rules.max_wait
