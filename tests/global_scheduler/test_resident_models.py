"""Models that memory wakes and puts to sleep: the core with a controller and a unit that the test plays. Their starts
and stops take their time, and the global scheduler may die."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from muxserve.global_scheduler.outbox import ToUnit
from muxserve.replicas.scaling import ScalingRules
from muxserve.scheduling.residency_types import KvRules, ResidencyRules, WakeCosts, WakeRules
from muxserve.scheduling.turns import TurnRules
from muxserve.spec import FleetSpec, ResidencySpec
from muxserve.wire import (
    Loads,
    MemoryReport,
    NotPlaced,
    Placed,
    PoolsLoad,
    ReplicaEnded,
    ServedBefore,
    SetRoom,
    StartFailed,
    StartReplicas,
    StopReplica,
    Terminating,
    Unplace,
    Waits,
)
from tests.global_scheduler.support import CONTROLLER, G0, World, entry, fleet, load, place
from tests.support.thoroughness import cases

MODEL, LOADING, FIXED = 100, 20, 50
WAKE_SECONDS, STOP_SECONDS, STEP = 0.4, 0.1, 0.05
WAKES = 2


def balance(names: list[str], limit: int) -> ResidencySpec:
    return ResidencySpec(
        ResidencyRules(limit, min_residence=0.5, residence_factor=1.0, wakes=WakeRules(WAKES)),
        {name: WakeCosts(MODEL, LOADING, WAKE_SECONDS) for name in names},
    )


def deployed(names: list[str], limit: int, serves: list[str] | None = None, wake_limit: float = 600.0) -> FleetSpec:
    made = fleet({"u0": names}, scaling={name: ScalingRules(0, 1, wake_limit=wake_limit) for name in names})
    unit = entry("u0", names)
    return made.__class__(
        **{
            **{field: getattr(made, field) for field in made.__struct_fields__},
            "units": [unit.__class__(unit.unit_spec, unit.unit_address, unit.migrator_address, serves or [])],
            "residency": {"u0": balance(names, limit)},
        }
    )


class Machine(World):
    """One unit whose models start and stop beside each other, as the controller does it, and serve each request for a
    while."""

    def __init__(self, names: list[str], limit: int, service: float = 0.2) -> None:
        self.names, self.limit, self.service = names, limit, service
        self.serves: set[str] = set()
        self.terminating: set[str] = set()
        self.running: dict[str, list[float]] = {name: [] for name in names}
        # What the controller is to do, for each model one after the other; and what it does: by model, what, and when
        # it has ended.
        self.orders: list[tuple[str, str]] = []
        self.doing: dict[str, tuple[str, float]] = {}
        self.waiting: dict[str, str] = {}
        self.served: list[str] = []
        self.refused: list[str] = []
        super().__init__(deployed(names, limit))
        self.measure()
        self.controller()

    @property
    def starting(self) -> list[str]:
        return [name for name, (what, _) in self.doing.items() if what == "start"]

    @property
    def taken(self) -> int:
        return FIXED + MODEL * len(self.serves) + (MODEL + LOADING) * len(self.starting)

    def measure(self) -> None:
        models = dict.fromkeys(self.serves, MODEL)
        starting = self.starting
        self.say(CONTROLLER, MemoryReport("u0", FIXED + sum(models.values()), models, starting=starting))

    def ask(self, request_id: str, model: str) -> None:
        self.waiting[request_id] = model
        self.say(G0, place(request_id, model))

    def restart(self) -> None:
        """The global scheduler dies, and another one takes its place."""
        World.__init__(self, deployed(self.names, self.limit, sorted(self.serves)), self.now)
        self.orders.clear()  # they are void
        self.controller()
        self.measure()
        self.report_all()
        for request_id, model in list(self.waiting.items()):
            self.say(G0, place(request_id, model))

    def report_all(self) -> None:
        loads = [
            load(name, running=len(self.running[name]), terminating=name in self.terminating)
            for name in sorted(self.serves)
        ]
        self.report("u0", *loads)

    def step(self) -> None:
        """A moment passes."""
        self.wait(STEP)
        self.hear()
        for name, (what, _) in [(name, each) for name, each in self.doing.items() if self.now >= each[1]]:
            del self.doing[name]
            (self.serves.add if what == "start" else self.serves.discard)(name)
            self.terminating.discard(name)
            self.change(deployed(self.names, self.limit, sorted(self.serves)))
            if what == "stop":
                self.say(CONTROLLER, ReplicaEnded(name, "u0"))
        for what, name in list(self.orders):
            if name not in self.doing:
                self.orders.remove((what, name))
                if (what == "stop") == (name in self.serves):
                    self.doing[name] = what, self.now + (WAKE_SECONDS if what == "start" else STOP_SECONDS)
        assert len(self.starting) <= WAKES
        for name in self.names:
            self.running[name] = [end for end in self.running[name] if end > self.now]
        self.report_all()
        self.hear()
        assert self.taken <= self.limit

    def hear(self) -> None:
        sent, self.sent = self.sent, []
        for peer, message in sent:
            match message:
                case StartReplicas(model, _):
                    self.orders.append(("start", model))
                case StopReplica(model, _):
                    self.orders.append(("stop", model))
                case Terminating(model, on) if peer == ToUnit("u0"):
                    (self.terminating.add if on else self.terminating.discard)(model)
                case Placed(request_id, _):
                    name = self.waiting.pop(request_id)
                    assert name in self.serves
                    self.served.append(request_id)
                    self.running[name].append(self.now + self.service)
                case NotPlaced(request_id, text, _):
                    self.waiting.pop(request_id)
                    self.refused.append(text)


def test_a_request_waits_while_its_model_is_woken() -> None:
    machine = Machine(["a"], 1000)
    machine.ask("r", "a")
    assert (G0, Waits("r", asleep=True)) in machine.sent
    machine.say(G0, Unplace(["r"]))
    machine.ask("s", "a")
    del machine.waiting["r"]
    for _ in range(20):
        machine.step()
    assert machine.served == ["s"]
    state = machine.state()["memory"]["models"]["a"]
    assert state["residence"] == "awake"
    assert (state["wakes"], state["waited"], state["evictions"]) == (1, 1, 0)
    assert state["last_wake_seconds"] >= WAKE_SECONDS


def test_nothing_is_woken_before_memory_was_measured() -> None:
    world = World(deployed(["a"], 1000))
    world.controller()
    world.say(G0, place("r", "a"))
    world.wait(1.0)
    assert world.heard(StartReplicas) == []
    world.say(CONTROLLER, MemoryReport("u0", FIXED, {}))
    assert world.heard(StartReplicas) == [StartReplicas("a", 1)]


def test_a_herd_is_served_by_one_wake_of_each_model() -> None:
    names = [f"m{number}" for number in range(24)]
    machine = Machine(names, FIXED + 4 * (MODEL + LOADING))
    for number in range(200):
        machine.ask(str(number), names[number % 24])
    for _ in range(int(120 / STEP)):
        machine.step()
        if not machine.waiting:
            break
    assert len(machine.served) == 200
    models = machine.state()["memory"]["models"]
    assert [models[name]["wakes"] for name in names] == [1] * 24
    assert not machine.refused


def test_a_model_that_waits_is_woken_when_another_has_had_its_time_though_nothing_is_said() -> None:
    machine = Machine(["a", "b"], FIXED + MODEL + LOADING, service=0.0)
    machine.ask("r", "a")
    while "r" not in machine.served:
        machine.step()
    machine.ask("s", "b")
    for _ in range(int(3 / STEP)):
        machine.step()
    assert machine.served == ["r", "s"]


def test_an_idle_model_sleeps_ahead_of_the_next_request() -> None:
    machine = Machine(["a", "b"], FIXED + MODEL + LOADING)
    balance = machine.core._balances["u0"]
    balance.policy.times.sleep_seconds = 0.5
    for request, model in (("r", "a"), ("s", "b")):
        machine.ask(request, model)
        while request not in machine.served:
            machine.step()
    for _ in range(int(3 / STEP)):
        machine.step()
    state = machine.state()["memory"]
    assert [state["models"][name]["residence"] for name in "ab"] == ["asleep", "asleep"]
    assert [state["models"][name]["evictions"] for name in "ab"] == [1, 1]
    assert [state["models"][name]["evictions_ahead"] for name in "ab"] == [0, 1]
    assert 0.0 < state["sleep_seconds"] < 0.5
    # The next wake does not wait for another model to end.
    since = machine.now
    machine.ask("t", "a")
    while "t" not in machine.served:
        machine.step()
    assert machine.now - since < WAKE_SECONDS + 3 * STEP


def test_what_was_read_of_a_model_before_it_was_awake_is_not_believed() -> None:
    machine = Machine(["a"], 1000)
    machine.ask("r", "a")
    while "r" not in machine.served:
        machine.step()
    for _ in range(3):
        machine.say(CONTROLLER, MemoryReport("u0", FIXED + 30, {"a": 30}, wake_peaks={"a": 30}, seconds=1.0))
    assert machine.state()["memory"]["models"]["a"]["needs_bytes"] == MODEL + LOADING
    for _ in range(30):
        machine.step()
    for _ in range(3):
        machine.say(CONTROLLER, MemoryReport("u0", FIXED + 80, {"a": 80}, wake_peaks={"a": 90}, seconds=1.0))
    assert machine.state()["memory"]["models"]["a"]["needs_bytes"] == 90


def test_how_long_an_idle_model_takes_to_sleep_is_measured() -> None:
    machine = Machine(["a", "b"], FIXED + MODEL + LOADING)
    machine.ask("r", "a")
    machine.say(G0, Unplace(["r"]))
    del machine.waiting["r"]
    for _ in range(20):
        machine.step()
    machine.ask("s", "b")
    for _ in range(int(3 / STEP)):
        machine.step()
    assert machine.served == ["s"]
    balance = machine.core._balances["u0"]
    assert balance.policy.times.sleep_seconds > 0.0


class Turns(Machine):
    """Requests take a long time; of a model that is ended they go on when it is awake again."""

    def __init__(self, names: list[str], limit: int, turns: TurnRules | None, service: float) -> None:
        self.turns = turns
        self.ends: dict[str, tuple[str, float]] = {}
        super().__init__(names, limit, service)
        self.change(deployed(names, limit))

    def change(self, fleet: FleetSpec) -> None:
        fields = {field: getattr(fleet, field) for field in fleet.__struct_fields__}
        (spec,) = fleet.residency.values()
        residency = {"u0": ResidencySpec(spec.rules, spec.models, self.turns)}
        super().change(fleet.__class__(**{**fields, "residency": residency}))

    def step(self) -> None:
        before = {name: list(ends) for name, ends in self.running.items()}
        there = set(self.serves)
        super().step()
        for name in there - self.serves:
            self.running[name] = []
            for end in before[name]:
                if end > self.now:
                    self.left += 1
                    self.ask(f"{name} again {self.left}", name)

    left = 0


@pytest.mark.parametrize("turns", [None, TurnRules()])
def test_with_turns_a_busy_model_stops_for_another_and_goes_on_later(turns: TurnRules | None) -> None:
    names = ["a", "b", "c"]
    machine = Turns(names, FIXED + MODEL + LOADING, turns, service=8.0)
    for name in names:
        machine.ask(name, name)
    for _ in range(int(9 / STEP)):
        machine.step()
    state = machine.state()["memory"]["models"]
    stopped = sum(state[name]["turns"] for name in names)
    if turns is None:
        assert stopped == machine.left == 0
        assert len(machine.served) <= 2
        return
    assert stopped == machine.left >= 2
    # Everybody had a turn by then.
    assert {request.split()[0] for request in machine.served} == set(names)
    assert not machine.refused


def test_it_is_told_whose_turn_it_is_for_how_long_and_who_is_next() -> None:
    names = ["a", "b", "c"]
    machine = Turns(names, FIXED + MODEL + LOADING, TurnRules(), service=8.0)
    assert machine.state()["memory"]["turns"] == {
        "now": {}, "next": [], "round_seconds": 0.0, "in_time": 1.0, "ended": 0
    }  # fmt: skip
    for name in names:
        machine.ask(name, name)
    told = []
    for _ in range(int(9 / STEP)):
        machine.step()
        told.append(machine.state()["memory"]["turns"])
    seen = [turns for turns in told if turns["now"]]
    assert {name for turns in seen for name in turns["now"]} == set(names)
    for turns in seen:
        # One has room at a time, and the others wait, but for one that is being woken.
        [(name, turn)] = turns["now"].items()
        assert turn["running"] >= 1
        assert set(turns["next"]) <= {*names} - {name}
    waited_for = [turns for turns in seen if turns["next"]]
    for turns in waited_for:
        [turn] = turns["now"].values()
        assert 0.0 < turn["length_seconds"] < turns["round_seconds"]
    assert any(turn["leaving"] for turns in waited_for for turn in turns["now"].values())
    assert told[-1]["ended"] == machine.left


def test_a_question_that_is_repeated_waits_since_it_was_asked_first() -> None:
    """A gateway repeats it every two seconds. Who has waited for too long goes first all the same."""
    machine = Machine(["long", "urgent"], FIXED + MODEL + LOADING, service=5.0)
    machine.ask("urgent-0", "urgent")
    while "urgent-0" not in machine.served:
        machine.step()
    machine.ask("long-0", "long")
    asked = machine.now
    while "long-0" not in machine.served:
        machine.step()
        if "long-0" in machine.waiting:
            machine.say(G0, place("long-0", "long"))
    assert machine.now - asked > 3.0
    assert machine.state()["memory"]["models"]["long"]["waited_seconds"] > 3.0


@pytest.mark.parametrize(("made", "first"), [(400, "new"), (1, "new"), (0, "old")])
def test_who_has_had_a_turn_gives_the_next_one_to_somebody_new(made: int, first: str) -> None:
    """One of two models has room. Requests for both have waited since before memory was measured, the older ones for
    one that has been served before."""
    world = World(deployed(names := ["old", "new"], FIXED + MODEL + LOADING))
    spec = world.core.fleet.residency["u0"]
    fields = {field: getattr(world.core.fleet, field) for field in world.core.fleet.__struct_fields__}
    world.change(FleetSpec(**{**fields, "residency": {"u0": ResidencySpec(spec.rules, spec.models, TurnRules())}}))
    world.controller()
    for name in names:
        more = {"before": ServedBefore(world.now - 3.0, made)} if name == "old" and made else {}
        world.say(G0, place(f"{name}-0", name, **more))
        world.wait(0.1)
    world.say(CONTROLLER, MemoryReport("u0", FIXED, {}))
    world.wait(0.1)
    assert [message.model for _, message in world.sent if isinstance(message, StartReplicas)] == [first]
    # What goes on is no new demand.
    rates = {name: model["rate"] for name, model in world.state()["memory"]["models"].items()}
    assert (rates["old"] > 0.0) is (made == 0)


@pytest.mark.parametrize("seed", cases(range(8), [0, 5]))
def test_everybody_is_served_although_the_global_scheduler_dies(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"m{number}" for number in range(6)]
    machine = Machine(names, FIXED + 2 * MODEL + LOADING, service=1.0)
    asked = 0
    for step in range(int(120 / STEP)):
        if step < 400 and chance.random() < 0.3:
            machine.ask(str(asked), chance.choice(names))
            asked += 1
        if step < 400 and chance.random() < 0.01:
            machine.restart()
        machine.step()
        if chance.random() < 0.02:
            machine.measure()
    assert len(machine.served) == asked
    assert not machine.refused


def test_a_model_that_fits_never_is_refused_with_the_reason() -> None:
    machine = Machine(["a"], 60 + MODEL)
    machine.change(deployed(["a"], 60 + MODEL, wake_limit=5.0))
    machine.ask("r", "a")
    for _ in range(int(6 / STEP)):
        machine.step()
    assert machine.served == []
    assert "was not ready within 5 s" in machine.refused[0]
    assert "it waited for 10 bytes of memory" in machine.refused[0]
    memory = machine.state()["memory"]["models"]["a"]
    assert memory["trouble"] == machine.refused[0]
    assert memory["waits_for"] is None
    assert machine.state()["memory"]["models"]["a"]["refused"] == 1


class Crowded(Machine):
    """A machine on which what is no model takes more than anybody foresaw."""

    def __init__(self, names: list[str], limit: int, fixed: int, ceiling: int | None = None) -> None:
        self.fixed, self.ceiling = fixed, ceiling
        super().__init__(names, limit)
        self.change(deployed(names, limit))

    @property
    def taken(self) -> int:
        return 0  # nobody can hold the limit

    def measure(self) -> None:
        models = dict.fromkeys(self.serves, MODEL)
        self.say(CONTROLLER, MemoryReport("u0", self.fixed + sum(models.values()), models, starting=self.starting))

    def change(self, fleet: FleetSpec) -> None:
        fields = {field: getattr(fleet, field) for field in fleet.__struct_fields__}
        (spec,) = fleet.residency.values()
        rules = replace(spec.rules, max_wait=2.0, ceiling=self.ceiling)
        residency = {"u0": ResidencySpec(rules, spec.models)}
        super().change(fleet.__class__(**{**fields, "residency": residency}))


def test_where_nobody_has_room_models_are_woken_in_turn_beyond_the_limit_and_it_is_said() -> None:
    machine = Crowded(["a", "b"], FIXED + MODEL + LOADING, fixed=FIXED + 30)
    machine.ask("r", "a")
    machine.step()
    said = machine.state()["memory"]["models"]["a"]
    assert said["waits_for"] == "30 bytes of memory, until others may sleep"
    machine.ask("s", "b")
    while len(machine.served) < 1:
        machine.step()
    memory = machine.state()["memory"]
    assert memory["models"]["a"]["trouble"] == "it was woken although that exceeds memory.limit by 30 bytes"
    assert memory["excess_bytes"] == 10  # when it is awake, what loading it took is free again
    for _ in range(int(10 / STEP)):
        machine.step()
    assert machine.served == ["r", "s"]
    assert not machine.refused
    # When the rest has shrunk, nothing is said any more.
    machine.fixed = FIXED
    machine.wait(40.0)
    machine.measure()
    machine.wait(40.0)
    machine.measure()
    memory = machine.state()["memory"]
    assert memory["excess_bytes"] == 0
    assert [memory["models"][name]["trouble"] for name in "ab"] == [None, None]


def test_beyond_what_there_can_be_requests_are_refused_with_the_reason() -> None:
    limit = FIXED + MODEL + LOADING
    machine = Crowded(["a"], limit, fixed=FIXED + 30, ceiling=limit)
    machine.ask("r", "a")
    for _ in range(int(3 / STEP)):
        machine.step()
    words = "a cannot be woken: that needs 120 bytes, and 30 of them are missing although all others sleep"
    assert machine.refused == [words]
    assert machine.state()["memory"]["models"]["a"]["trouble"] == words
    machine.wait(61.0)
    assert machine.state()["memory"]["models"]["a"]["trouble"] is None


def test_an_order_that_was_lost_is_given_again() -> None:
    world = World(deployed(["a"], 1000))
    world.controller()
    world.say(CONTROLLER, MemoryReport("u0", FIXED, {}))
    world.say(G0, place("r", "a"))
    assert world.heard(StartReplicas) == [StartReplicas("a", 1)]
    world.wait(4.0)
    world.say(CONTROLLER, MemoryReport("u0", FIXED, {}))  # its order may be on the way
    world.wait(4.0)
    world.say(CONTROLLER, MemoryReport("u0", FIXED, {}, starting=["a"]))  # or waits for another change
    world.wait(4.0)
    assert world.heard(StartReplicas) == []
    world.say(CONTROLLER, MemoryReport("u0", FIXED, {}))
    world.wait(3.0)
    assert world.heard(StartReplicas) == [StartReplicas("a", 1)]


def test_a_model_that_does_not_end_is_ended_again() -> None:
    machine = Machine(["a", "b"], FIXED + MODEL + LOADING)
    machine.ask("r", "a")
    while "r" not in machine.served:
        machine.step()
    machine.ask("s", "b")
    while not machine.orders and not machine.doing:
        machine.step()
    assert machine.doing.pop("a")[0] == "stop"  # nobody does it
    for seconds, served in ((29, ["r"]), (3, ["r", "s"])):
        machine.measure()
        for _ in range(int(seconds / STEP)):
            machine.step()
        machine.measure()
        for _ in range(int(1 / STEP)):
            machine.step()
        assert machine.served == served


@pytest.mark.parametrize("seed", cases(range(20), range(3)))
def test_whatever_is_measured_and_however_often_the_scheduler_dies_all_are_answered(seed: int) -> None:
    chance = random.Random(seed)
    names = ["a", "b", "c"]
    limit = FIXED + 2 * MODEL + LOADING
    machine = Crowded(names, limit, FIXED, ceiling=chance.choice([None, 2 * limit]))
    asked = 0
    for step in range(int(150 / STEP)):
        if step < int(30 / STEP):
            if chance.random() < 0.1:
                machine.ask(str(asked), chance.choice(names))
                asked += 1
            if chance.random() < 0.05:
                machine.fixed = chance.choice([0, FIXED, chance.randrange(limit), 10 * limit])
                machine.measure()
            if chance.random() < 0.005:
                machine.restart()
        machine.step()
        if step % 40 == 0:
            machine.measure()
        for name, model in machine.state()["memory"]["models"].items():
            assert not model["waiting"] or model["waits_for"], f"{name} waits for nothing"
    assert not machine.waiting
    assert len(machine.served) + len(machine.refused) == asked


def test_a_wake_that_fails_is_tried_again_later() -> None:
    world = World(deployed(["a"], 1000))
    world.controller()
    world.say(CONTROLLER, MemoryReport("u0", FIXED, {}))
    world.say(G0, place("r", "a"))
    assert world.heard(StartReplicas) == [StartReplicas("a", 1)]
    world.say(CONTROLLER, StartFailed("a", "no weights"))
    world.wait(1.0)
    assert world.heard(StartReplicas) == []
    world.wait(1.5)
    assert world.heard(StartReplicas) == [StartReplicas("a", 1)]
    assert world.state()["memory"]["models"]["a"]["failed_wakes"] == 1


def test_nobody_waits_for_a_model_whose_engines_fail_at_each_start() -> None:
    world = World(deployed(["a", "b"], 1000))
    world.controller()
    world.say(CONTROLLER, MemoryReport("u0", FIXED, {}))
    world.say(G0, place("r", "a"))
    for wait in (0.0, 2.5, 4.5):
        world.wait(wait)
        assert world.heard(StartReplicas) == [StartReplicas("a", 1)]
        assert world.heard(NotPlaced) == []
        world.say(CONTROLLER, StartFailed("a", "its weights are of cheese", broken=True))
    (told,) = world.heard(NotPlaced)
    assert told.message == "a is degraded (the last start failed: its weights are of cheese)"
    # Who comes before the next try is told at once, and who comes then asks for it.
    world.say(G0, place("s", "a"))
    assert [each.request_id for each in world.heard(NotPlaced)] == ["s"]
    world.wait(9)
    world.say(G0, place("t", "a"))
    assert world.heard(StartReplicas) == [StartReplicas("a", 1)]
    assert world.heard(NotPlaced) == []


def test_a_model_that_dies_is_awake_for_memory_and_sleeps_without_it() -> None:
    machine = Machine(["a", "b"], FIXED + MODEL + LOADING)
    machine.ask("r", "a")
    for _ in range(40):
        machine.step()
    machine.report("u0")  # its engines are gone, and being started again
    assert machine.state()["memory"]["models"]["a"]["residence"] == "awake"
    machine.say(G0, place("s", "b"))
    machine.wait(3.0)
    assert StopReplica("a", "u0") in machine.heard(StopReplica)


def test_each_unit_has_a_memory_of_its_own() -> None:
    """Two units, each with memory for one of its two models: what is taken in one makes nobody sleep in the other."""
    units = {"u0": ["a", "b"], "u1": ["c", "d"]}
    made = fleet(units, scaling={name: ScalingRules(0, 1, wake_limit=600.0) for name in "abcd"})
    entries = [
        each.__class__(each.unit_spec, each.unit_address, each.migrator_address, [])
        for each in (entry(unit, names) for unit, names in units.items())
    ]
    room = FIXED + MODEL + LOADING
    world = World(
        made.__class__(
            **{
                **{field: getattr(made, field) for field in made.__struct_fields__},
                "units": entries,
                "residency": {unit: balance(names, room) for unit, names in units.items()},
            }
        )
    )
    world.controller()
    world.say(CONTROLLER, MemoryReport("u0", FIXED, {}))
    for number, name in enumerate("acbd"):
        world.say(G0, place(f"r{number}", name))
    woken = [message.model for _, message in world.sent if isinstance(message, StartReplicas)]
    assert woken == ["a"], "nothing was measured of the other unit"
    world.say(CONTROLLER, MemoryReport("u1", FIXED, {}, copies={"c": 7, "d": 9}, resting=["d"]))
    woken = [message.model for _, message in world.sent if isinstance(message, StartReplicas)]
    assert woken == ["a", "c"], "each has room for one"
    state = world.core.state(world.now)["memory"]
    assert isinstance(state, dict)
    assert (state["limit_bytes"], state["used_bytes"]) == (2 * room, 2 * FIXED)
    assert {name: (each["unit"], each["residence"]) for name, each in state["models"].items()} == {
        "a": ("u0", "waking"),
        "b": ("u0", "asleep"),
        "c": ("u1", "waking"),
        "d": ("u1", "asleep"),
    }
    assert state["units"]["u1"]["limit_bytes"] == room
    assert {name: each["copy_bytes"] for name, each in state["models"].items()} == {"a": 0, "b": 0, "c": 7, "d": 9}
    assert [name for name, each in state["models"].items() if each["engines_rest"]] == ["d"]


# ---------------------------------------------------------------- KV pools that share the memory


def sharing() -> World:
    """There are 140 bytes, and 50 are nobody's; pools of at most 60 and models of 40 share the others."""
    rules = ResidencyRules(140, min_residence=0.5, residence_factor=1.0, kv=KvRules(5, 60))
    spec = ResidencySpec(rules, {name: WakeCosts(40, seconds=WAKE_SECONDS) for name in ("a", "b")})
    world = World(msgspec.structs.replace(deployed(["a", "b"], 140), residency={"u0": spec}))
    world.controller()
    world.say(CONTROLLER, MemoryReport("u0", FIXED, {}))
    return world


def say_pools(world: World, size: int, elastic: bool = True) -> None:
    """They have what they are to have."""
    pools = PoolsLoad(target=size, backed=size, elastic=elastic)
    world.say(ToUnit("u0"), Loads("u0", "e1", [], pools=pools))


def told(world: World) -> tuple[list[int], list[str]]:
    """What the pools were told to take, and which models were woken, since the last call."""
    sent, world.sent = world.sent, []
    rooms = [message.bytes for _, message in sent if isinstance(message, SetRoom)]
    return rooms, [message.model for _, message in sent if isinstance(message, StartReplicas)]


def test_pools_are_told_to_make_room_until_they_have() -> None:
    world = sharing()
    say_pools(world, 60)
    told(world)
    world.say(G0, place("r", "a"))
    assert told(world) == ([50], []), "the memory is not there yet"
    world.wait(0.15)
    assert told(world) == ([], [])
    world.wait(0.15)
    assert told(world) == ([50], []), "the order may have been lost"
    say_pools(world, 50)
    assert told(world) == ([], ["a"])
    world.wait(2.0)
    assert told(world)[0] == []


def test_a_scheduler_that_is_started_again_begins_with_what_pools_have() -> None:
    world = sharing()
    say_pools(world, 20)
    world.say(G0, place("r", "a"))
    assert told(world)[1] == ["a"]
    assert world.state()["memory"]["pools_bytes"] >= 20


def test_pools_that_have_not_reported_count_whole() -> None:
    world = sharing()
    world.say(G0, place("r", "a"))
    assert told(world) == ([], [])
    # Pools in one piece give nothing.
    say_pools(world, 60, elastic=False)
    assert told(world) == ([], [])
