"""The handle of a unit whose host is another process: the host and who has placed it are played, and speak through real
sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from muxserve.cluster import remote_unit
from muxserve.cluster.events import HOST, Down, Event, Failed, PartId, Ready, Up
from muxserve.cluster.host_link import AnyCommand, HostEnd, HostEvent, JoinUnit, Sized
from muxserve.cluster.remote_unit import HostAwayError, HostLife, RemoteUnit, Watched, with_joined
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.units import PlannedUnit
from muxserve.gpu.budget import Needs
from muxserve.net.sockets import free_port, new_keys
from muxserve.spec import GpuSpec, Listen, UnitSpec
from tests.global_scheduler.support import entry
from tests.support.patience import PATIENCE

HERE = "127.0.0.1"
BACK = Up(HOST, 0, 0.0)


class Host:
    """Says what it is given to say, and notes what it is asked for. `answers`: what it does instead of nothing."""

    def __init__(self, unit_spec: UnitSpec) -> None:
        self.asked: list[AnyCommand] = []
        self.answers: dict[str, Callable[[], Awaitable[None]]] = {}
        self._unit_spec = unit_spec
        self.link = self._begin()

    def _begin(self) -> HostEnd:
        link = HostEnd(self._unit_spec)
        link.obey(self._do)
        return link

    async def begin_again(self) -> None:
        await self.link.close()
        self.link = self._begin()

    def say(self, *events: HostEvent) -> None:
        for event in events:
            self.link.say(event)

    @property
    def words(self) -> list[str]:
        return [" ".join([type(each).__name__, getattr(each, "model", "")]).strip() for each in self.asked]

    async def _do(self, command: AnyCommand) -> dict[str, Any] | None:
        self.asked.append(command)
        if answer := self.answers.get(type(command).__name__):
            await answer()
        return None


class Place:
    """Where the host is: its life, and what else is known of it."""

    def __init__(self, unit_spec: UnitSpec) -> None:
        self.found = HostLife("0", "here", unit_spec)
        self.watched = Watched("0")
        self.away = False
        self.stopped = False
        self._changed = asyncio.Event()

    def change(self, watched: Watched | None = None, away: bool = False) -> None:
        self.watched, self.away = watched or self.watched, away
        self._changed.set()

    async def find(self) -> HostLife:
        return HostLife(self.watched.life, "here", self.found.unit_spec)

    async def watch(self, seconds: float) -> Watched:
        await self._changed.wait()
        self._changed.clear()
        if self.away:
            self._changed.set()
            raise HostAwayError("it does not answer")
        return self.watched

    def kill(self) -> None:
        self.stopped = True

    async def stop(self) -> None:
        self.stopped = True


class Played:
    """A handle, its host and its place."""

    def __init__(self, run_dir: Path, serves: tuple[str, ...] = ("m",), patience: float = 60.0) -> None:
        self.unit_spec = msgspec.structs.replace(
            entry("u0", ["m", "n"], run_dir=str(run_dir)).unit_spec,
            run_dir=str(run_dir),
            listen=Listen(HERE, 1, 2, free_port(HERE)),
            keys=new_keys(),
        )
        self.host, self.place, self.events = Host(self.unit_spec), Place(self.unit_spec), list[Event]()
        unit = PlannedUnit(self.unit_spec, serves)
        self.unit = RemoteUnit(unit, False, self.place, self.place.found, self.events.append, patience)

    async def until(self, wanted: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not wanted():
                await asyncio.sleep(0.001)

    async def restart(self, unit_spec: UnitSpec | None = None) -> None:
        """Another life of the host begins; it says how large its pools are if `unit_spec` is given."""
        await self.host.begin_again()
        life = str(int(self.place.watched.life) + 1)
        self.place.change(Watched(life))
        await self.until(lambda: self.unit._found.life == life)
        if unit_spec is not None:
            self.host.say(Sized(unit_spec))


@pytest.fixture
async def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Played]]:
    monkeypatch.setattr(remote_unit, "_RETRY_SECONDS", 0.001)
    made: list[Played] = []

    def begin(*serves: str, patience: float = 60.0) -> Played:
        made.append(Played(tmp_path, serves or ("m",), patience))
        return made[-1]

    yield begin
    for played in made:
        await played.unit.stop()
        assert played.place.stopped
        await played.host.link.close()


async def never() -> None:
    await asyncio.Event().wait()


async def test_a_model_is_up_when_its_scheduler_and_engines_are(play: Callable[..., Played]) -> None:
    played = play()
    assert not played.unit.up("m")
    played.host.say(Up(PartId("unit"), 1, 0.1), Up(PartId("engine", "m", "prefill"), 1, 0.1))
    await played.until(lambda: len(played.events) == 2)
    assert not played.unit.up("m")
    played.host.say(Up(PartId("engine", "m", "decode"), 1, 0.1))
    await played.until(lambda: played.unit.up("m"))
    assert not played.unit.up("n")


async def test_an_end_that_failed_is_told(play: Callable[..., Played]) -> None:
    async def fail() -> None:
        raise RuntimeError("no")

    played = play("m", "n")
    played.host.answers["StopModel"] = fail
    with pytest.raises(GaveUp, match="RuntimeError: no"):
        await played.unit.stop_model("n")
    assert played.unit.entry.serves == ["m"]


async def test_a_host_that_does_not_answer_is_not_waited_for_without_end(
    play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteUnit._ask, "__defaults__", (0.01,))
    monkeypatch.setattr(remote_unit, "_START_SECONDS", 0.02)
    played = play()
    played.host.answers = {"StartModel": never, "StopModel": never}
    with pytest.raises(GaveUp, match=r"its host has not answered within 0.02 s"):
        await played.unit.start_model("n")
    with pytest.raises(GaveUp, match=r"its host has not answered within 0.01 s"):
        await played.unit.stop_model("n")
    assert played.unit._link._asked == {}


async def test_a_connection_that_breaks_loses_nothing_and_does_nothing_twice(play: Callable[..., Played]) -> None:
    played, go_on = play(), asyncio.Event()

    async def wait() -> None:
        await go_on.wait()

    played.host.answers["StartModel"] = wait
    starting = asyncio.create_task(played.unit.start_model("n"))
    await played.until(lambda: played.host.words == ["StartModel n"])
    peer = played.unit._link._peer
    peer.close()
    played.host.say(Ready(0.1))
    go_on.set()
    await played.until(
        lambda: played.host.link._answers == {1: played.host.link._answers[1]} and not played.host.link._tasks
    )
    assert not starting.done()
    peer._open()
    await asyncio.wait_for(starting, PATIENCE)
    await played.until(lambda: Ready(0.1) in played.events)
    played.host.say(Ready(0.2))
    await played.until(lambda: Ready(0.2) in played.events)
    assert played.host.words == ["StartModel n"]
    assert played.events == [Ready(0.1), Ready(0.2)]
    await played.until(lambda: not played.host.link._unheard)


async def test_the_connection_of_one_life_hears_nothing_of_the_next_at_its_address(
    play: Callable[..., Played],
) -> None:
    played = play()
    played.host.say(Ready(0.1))
    await played.until(lambda: played.events == [Ready(0.1)])
    await played.host.begin_again()
    played.host.say(Ready(0.2))
    await played.until(lambda: bool(played.unit._link._peer.socket.closed))
    assert played.events == [Ready(0.1)]
    played.place.change(Watched("1"))
    await played.until(lambda: played.events == [Ready(0.1), Ready(0.2)])


async def test_while_nobody_knows_how_the_host_is_nothing_is_up_and_nothing_is_asked(
    play: Callable[..., Played],
) -> None:
    played = play()
    played.host.answers["StopModel"] = never
    engines = [PartId("engine", "m", phase) for phase in ("prefill", "decode")]
    played.host.say(*(Up(part, 1, 0.1) for part in (PartId("unit"), *engines)))
    await played.until(lambda: played.unit.up("m"))
    stopping = asyncio.create_task(played.unit.stop_model("n"))
    await played.until(lambda: played.host.words == ["StopModel n"])
    played.place.change(away=True)
    with pytest.raises(GaveUp, match="its node or its actor has died"):
        await stopping
    assert not played.unit.up("m")
    with pytest.raises(GaveUp, match="its node or its actor has died"):
        await played.unit.start_model("n")
    played.place.change()
    await played.until(lambda: BACK in played.events)
    assert played.unit.up("m")
    assert any(isinstance(event, Down) for event in played.events)


async def test_a_host_that_stays_away_is_given_up(play: Callable[..., Played]) -> None:
    played = play(patience=0.0)
    played.place.change(away=True)
    with pytest.raises(GaveUp, match="it has not been started again within 0 s"):
        await asyncio.wait_for(played.unit.wait(), PATIENCE)


async def test_a_host_that_ended_is_told_with_its_reason(play: Callable[..., Played]) -> None:
    played = play()
    part = PartId("engine", "m", "decode")
    played.host.say(Failed(part, f"{part} keeps dying: killed", "/x/engine.log", ("a", "b")))
    await asyncio.wait_for(played.host.link.until_heard(PATIENCE), PATIENCE)
    played.place.change(Watched("0", ended=4))
    with pytest.raises(GaveUp, match=r"^killed$") as caught:
        await asyncio.wait_for(played.unit.wait(), PATIENCE)
    assert caught.value.part == part
    assert played.unit.log_tail_of(part) == (Path(f"{HERE}:/x/engine.log"), ("a", "b"))


async def test_a_host_that_hung_is_told_as_such(play: Callable[..., Played]) -> None:
    played = play()
    played.place.change(Watched("0", ended=-9, hung="hung: no sign of life for 7 s"))
    with pytest.raises(GaveUp, match="its host ended with status -9"):
        await asyncio.wait_for(played.unit.wait(), PATIENCE)
    assert played.events == [Down(HOST, "hung: no sign of life for 7 s", 0.0, hung=True)]


async def test_a_unit_that_was_started_again_serves_what_it_served_last(play: Callable[..., Played]) -> None:
    played = play()
    await played.unit.start_model("n")
    await played.unit.stop_model("m")
    played.unit.start_migrator()
    await played.until(lambda: len(played.host.asked) == 3)
    await played.restart(played.unit_spec)
    await played.until(lambda: BACK in played.events)
    assert len(played.host.asked) == 3, "it is still being started"
    played.host.say(Ready(0.1))
    await played.until(lambda: len(played.host.asked) == 6)
    assert played.host.words[3:] == ["StartMigrator", "StopModel m", "StartModel n"]
    assert played.unit.entry.serves == ["n"]


async def test_a_unit_on_gpus_is_where_it_was_until_its_next_life_has_gpus_and_pools(
    play: Callable[..., Played],
) -> None:
    played = play()
    assert not played.unit.sized.is_set()
    pools = [msgspec.structs.replace(pool, num_pages=7) for pool in played.unit_spec.pools]
    first = msgspec.structs.replace(played.unit_spec, gpu=GpuSpec(["GPU-a"]), pools=pools)
    played.host.say(Sized(first))
    await played.until(played.unit.sized.is_set)
    assert played.unit.entry.unit_spec == first
    assert {str(part) for part in played.unit.parts} >= {"MPS server", "weights of m"}
    await played.restart()
    assert played.unit.entry.unit_spec == first
    assert BACK not in played.events
    then = msgspec.structs.replace(first, gpu=GpuSpec(["GPU-b"], "off"), listen=Listen("127.0.0.9", 1, 2))
    played.host.say(Sized(then))
    await played.until(lambda: BACK in played.events)
    assert played.unit.entry.unit_spec == then
    assert PartId("mps") not in played.unit.parts


async def test_a_first_life_that_ends_before_its_pools_are_known_is_told_when_the_next_has_them(
    play: Callable[..., Played],
) -> None:
    played = play()
    await played.restart(played.unit_spec)
    await played.until(lambda: BACK in played.events)


async def test_a_life_that_cannot_hold_what_was_offered_is_none(play: Callable[..., Played]) -> None:
    played = play()
    played.host.say(Sized(played.unit_spec))
    await played.until(played.unit.sized.is_set)
    longest = played.unit_spec.models[0].max_len
    models = [msgspec.structs.replace(model, max_len=longest - 1) for model in played.unit_spec.models]
    await played.restart(msgspec.structs.replace(played.unit_spec, models=models))
    with pytest.raises(GaveUp, match=rf"on {HERE} hold {longest - 1} tokens of m, which was offered with {longest}"):
        await asyncio.wait_for(played.unit.wait(), PATIENCE)
    assert played.unit.entry.unit_spec == played.unit_spec


def with_a_third(unit_spec: UnitSpec) -> UnitSpec:
    third = msgspec.structs.replace(unit_spec.models[0], name="third", quota_pages=10)
    return msgspec.structs.replace(unit_spec, models=[*unit_spec.models, third])


async def test_a_model_joins_and_joins_again_when_the_unit_has_been_started_again(
    play: Callable[..., Played],
) -> None:
    played = play()
    needs = [Needs("third", 0, 3, 2, 1, 1)]
    joined = with_a_third(played.unit_spec)
    await played.unit.join(joined, "third", needs)
    await played.unit.start_model("third")
    assert played.unit.entry.unit_spec == joined
    assert played.unit.entry.serves == ["m", "third"]
    await played.restart(played.unit_spec)
    await played.until(lambda: BACK in played.events)
    assert played.unit.entry.unit_spec == joined
    played.host.say(Ready(0.1))
    await played.until(lambda: len(played.host.asked) == 4)
    assert played.host.words == ["JoinUnit third", "StartModel third"] * 2
    assert [each for each in played.host.asked if isinstance(each, JoinUnit)] == [JoinUnit("third", joined, needs)] * 2


async def test_a_model_that_the_host_does_not_take_has_not_joined(play: Callable[..., Played]) -> None:
    async def refuse() -> None:
        raise GaveUp(PartId("weights", "third"), "GPU 0 has 1 GiB left")

    played = play()
    played.host.answers["JoinUnit"] = refuse
    with pytest.raises(GaveUp, match="GPU 0 has 1 GiB left") as caught:
        await played.unit.join(with_a_third(played.unit_spec), "third")
    assert caught.value.part == PartId("weights", "third")
    assert played.unit.entry.unit_spec == played.unit_spec


def test_pools_of_another_size_are_divided_in_the_same_way() -> None:
    begun_with = entry("u0", ["m", "n"], run_dir="/nowhere/0123456789").unit_spec
    before = with_a_third(begun_with)
    pools = [msgspec.structs.replace(pool, num_pages=pool.num_pages // 2) for pool in begun_with.pools]
    begun = msgspec.structs.replace(begun_with, pools=pools, gpu=GpuSpec(["GPU-b"]))
    now = with_joined(begun, before, {"third": ()})
    assert (now.pools, now.gpu) == (begun.pools, begun.gpu)
    part = pools[0].num_pages / before.pools[0].num_pages
    assert [model.name for model in now.models] == [model.name for model in before.models]
    assert [each.quota_pages for each in now.models] == [int(each.quota_pages * part) for each in before.models]
    assert with_joined(begun, before, {}) is begun
