"""A unit on a node of a Ray cluster: what its launcher hands to the controller.

The unit's actor is asked all the time what the host has said. While it does not answer, its process or its node has
died; Ray starts it again, and the unit is then where it was, or elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from muxserve import wire
from muxserve.cluster.events import Down, Event, Failed, PartId, Ready, Starting, Stopping, Up, from_line
from muxserve.cluster.host import MemoryParents
from muxserve.cluster.log_tail import Said
from muxserve.cluster.ray.actor import STOP_SECONDS
from muxserve.cluster.ray.calls import ASK_SECONDS, HOST, ActorQuestions, answer, check, release, why
from muxserve.cluster.starts import MEMORY, MIGRATOR, MPS, UNIT, WARM
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.units import PlannedUnit
from muxserve.gpu.budget import Needs
from muxserve.gpu.unit import GpuMemory
from muxserve.net.sockets import tcp_address
from muxserve.spec import ModelSpec, UnitEntry, UnitSpec

log = logging.getLogger(__name__)

# An actor waits for its place on the node, and for the host before it to end.
ANSWER_SECONDS = 1800.0
_HEAR_SECONDS = 5.0
_RETRY_SECONDS = 0.5
# Starting a model takes what its engines are given for it, twice if they die meanwhile.
_START_SECONDS = 2 * ANSWER_SECONDS + ASK_SECONDS


class RayUnit:
    """A handle of a unit on some node."""

    def __init__(
        self,
        ray: Any,
        unit: PlannedUnit,
        migrates: bool,
        actor: Any,
        group: Any,
        place: dict[str, Any],
        emit: Callable[[Event], None],
        patience: float,
    ) -> None:
        self.ended = False
        self.node = ""
        self.sized = asyncio.Event()
        self.ready = asyncio.Event()
        self._ray = ray
        self._actor = actor
        self._group = group
        self._emit = emit
        self._patience = patience
        self._serves = [model.name for model in unit.unit_spec.models if model.name in unit.serves]
        self._migrates = migrates
        # What every life of the actor begins with, whatever was changed since.
        self._begins_with = (frozenset(self._serves), migrates)
        self._began = time.monotonic()
        self._up: set[PartId] = set()
        self._said: dict[PartId, Said] = {}
        self._words = ""
        self._failed_part = HOST
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._questions = ActorQuestions(ray, actor)
        self._unit_spec = msgspec.json.decode(place["unit_spec"], type=UnitSpec)
        # What models that have joined since take of the unit's GPUs: a new life of the actor knows nothing of them.
        self._joined: dict[str, tuple[Needs, ...]] = {}
        self._life = self._host = ""
        self._was_away = False
        self._moved_to(place)
        self._others: set[asyncio.Task[object]] = set()
        self._follower = asyncio.create_task(self._follow())

    # ------------------------------------------------------------ what is known

    @property
    def entry(self) -> UnitEntry:
        """See `UnitHandle.entry`."""
        listen = self._unit_spec.listen
        assert listen is not None, "the actor has chosen the ports"
        return UnitEntry(
            self._unit_spec,
            tcp_address(listen.host, listen.unit_port),
            tcp_address(listen.host, listen.migrator_port),
            list(self._serves),
            remote=True,
        )

    @property
    def parts(self) -> Collection[PartId]:
        """See `UnitHandle.parts`."""
        models = [model for model in self._unit_spec.models if model.name in self._serves]
        engines = [PartId("engine", model.name, phase) for model in models for phase in model.engines]
        gpu = self._unit_spec.gpu
        on_gpus = [] if gpu is None else [PartId("weights", model.name) for model in models]
        if gpu is not None and gpu.sm_sharing != "off":
            on_gpus.insert(0, MPS)
        return [*on_gpus, MEMORY, WARM, UNIT, *([MIGRATOR] if self._migrates else []), *engines]

    def up(self, model: str) -> bool:
        """See `UnitHandle.up`."""
        engines = {part for part in self.parts if part.model == model}
        return bool(engines) and {UNIT, *engines} <= self._up

    def memory_parents(self) -> MemoryParents:
        """See `UnitHandle.memory_parents`."""
        return MemoryParents()

    def gpu_memory(self) -> GpuMemory | None:
        """See `UnitHandle.gpu_memory`."""
        return None

    async def wait(self) -> None:
        """See `UnitHandle.wait`."""
        await asyncio.shield(self._failed)

    async def tell(self, message: wire.Message) -> None:
        """See `UnitHandle.tell`."""
        if UNIT in self._up:
            # Beside: its node may have died a moment ago, and others are to be told as well.
            self._spawn(self._questions.ask("tell", message=base64.b64encode(wire.encode(message)).decode()))

    async def state(self) -> dict[str, object]:
        """See `UnitHandle.state`."""
        while True:
            state = (await self._questions.ask("state")).get("state")
            if isinstance(state, dict):
                return state
            await asyncio.sleep(_RETRY_SECONDS)

    def log_tail_of(self, part: PartId) -> Said:
        """See `UnitHandle.log_tail_of`; the log lies on the unit's node."""
        return self._said.get(part, (None, ()))

    # ------------------------------------------------------------ what is done

    async def start_model(self, model: str) -> None:
        """See `UnitHandle.start_model`."""
        check(await self._questions.ask("start_model", _START_SECONDS, model=model), model)
        if model not in self._serves:
            self._serves.append(model)

    async def join(self, unit_spec: UnitSpec, model: str, needs: Sequence[Needs] = (), asleep: bool = False) -> None:
        """See `UnitHandle.join`. Where units are elsewhere, no model sleeps."""
        check(await self._ask_to_join(unit_spec, model, needs), model)
        self._joined[model] = tuple(needs)
        self._unit_spec = unit_spec

    async def _ask_to_join(self, unit_spec: UnitSpec, model: str, needs: Sequence[Needs]) -> dict[str, Any]:
        spec, estimated = msgspec.to_builtins(unit_spec), msgspec.to_builtins(needs)
        return await self._questions.ask("join", model=model, unit_spec=spec, needs=estimated)

    async def stop_model(self, model: str, urgent: bool = False) -> None:
        """See `UnitHandle.stop_model`. Where units are elsewhere, memory decides nothing."""
        if model in self._serves:
            self._serves.remove(model)
        check(await self._questions.ask("stop_model", model=model), model)

    async def forget(self, model: str) -> None:
        """See `UnitHandle.forget`. Where units are elsewhere, nothing is kept."""

    async def prefetch(self, model: str) -> None:
        """See `UnitHandle.prefetch`."""
        check(await self._questions.ask("prefetch", model=model), model)

    def start_migrator(self) -> None:
        """See `UnitHandle.start_migrator`."""
        if not self._migrates:
            self._migrates = True
            self._spawn(self._questions.ask("start_migrator"))

    def kill(self) -> None:
        """See `UnitHandle.kill`."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor, no_restart=True)

    async def stop(self) -> None:
        """See `UnitHandle.stop`."""
        self.ended = True
        for task in (self._follower, *self._others):
            task.cancel()
        await asyncio.gather(self._follower, *self._others, return_exceptions=True)
        self._questions.give_up("the unit is being stopped")
        if not self._failed.done():
            self._failed.cancel()
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            await answer(self._actor.stop.remote(), STOP_SECONDS + 5)
        await release(self._ray, self._actor, self._group)

    # ------------------------------------------------------------ the actor

    async def _follow(self) -> None:
        """Listen to the host, through whatever lives its actor has."""
        said, away = 0, 0.0
        errors = self._ray.exceptions
        while not self._failed.done():
            try:
                heard = await answer(self._actor.hear.remote(said, _HEAR_SECONDS), _HEAR_SECONDS + 10)
                if heard["life"] != self._life:
                    place = await answer(self._actor.place.remote(), ANSWER_SECONDS)
                    if place["problem"]:
                        self._fail(HOST, place["problem"])
                        return
                    said, away = 0, 0.0
                    self._come_back(place)
                    continue
            except errors.ActorDiedError as error:
                self._fail(HOST, why(error))
                return
            except (errors.RayError, TimeoutError) as error:
                if not away:
                    away = time.monotonic()
                    self._go_away(why(error))
                elif time.monotonic() - away > self._patience:
                    self._fail(HOST, f"Ray has not started it again within {self._patience:g} s")
                    return
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            away, said = 0.0, heard["said"]
            for line in heard["lines"]:
                self._hear(line)
            if heard["ended"] is not None:
                self._fail(self._failed_part, self._words or f"its host ended with status {heard['ended']}")

    def _go_away(self, why: str) -> None:
        log.warning("a unit's actor is away: %s", why)
        self._up.clear()
        self._questions.give_up("the unit's node or its actor has died")
        self._emit(Down(HOST, "its node or its actor has died; Ray starts it again", 0.0))

    def _come_back(self, place: dict[str, Any]) -> None:
        self._up.clear()
        self._was_away = True
        self._moved_to(place)
        self._spawn(self._as_before(self._life_ready))

    async def _as_before(self, ready: asyncio.Event) -> None:
        """Have a new life of the actor, which begins as the first one did, serve what was served last."""
        await ready.wait()
        for model, needs in self._joined.items():
            if error := (await self._ask_to_join(self._unit_spec, model, needs)).get("error"):
                log.warning("%s does not join a unit that was started again: %s", model, error)
        serves, migrates = self._begins_with
        if self._migrates and not migrates:
            await self._questions.ask("start_migrator")
        changes = dict.fromkeys(serves.difference(self._serves), "stop_model")
        changes |= dict.fromkeys(set(self._serves) - serves, "start_model")
        for model, what in sorted(changes.items()):
            if error := (await self._questions.ask(what, _START_SECONDS, model=model)).get("error"):
                log.warning("%s %s, after a unit was started again: %s", what, model, error)

    def _moved_to(self, place: dict[str, Any]) -> None:
        self._life_ready = asyncio.Event()
        self._life, self.node = place["life"], place["node"]
        self._host = place["host"]

    def _sized(self, unit_spec: UnitSpec) -> None:
        """This life's GPUs and pools are known; until then the unit is to others where it was."""
        lengths = {model.name: model.max_len for model in self._unit_spec.models if self.sized.is_set()}
        for model in unit_spec.models:
            if model.max_len < (before := lengths.get(model.name, 0)):
                # Requests of that length have been promised.
                words = f"{model.max_len} tokens of {model.name}, which was offered with {before}"
                self._fail(HOST, f"the GPUs that it has now on {self._host} hold {words}; free their memory")
                return
        # The host joins them again when it is up.
        self._unit_spec = with_joined(unit_spec, self._unit_spec, self._joined)
        self.sized.set()
        if self._was_away:
            # To the fleet this is a unit that may be somewhere else now.
            self._was_away = False
            self._emit(Up(HOST, 0, 0.0))

    def _hear(self, line: str) -> None:
        try:
            said = msgspec.json.decode(line, type=dict[str, Any])
            if "reply" in said:
                self._questions.answered(said)
                return
            if said.get("event") == "Sized":
                self._sized(msgspec.convert(said["unit_spec"], UnitSpec))
                return
            event = from_line(line)
        except ValueError as error:
            log.warning("from a unit's host: %s", error)
            return
        match event:
            case Up(part):
                self._up.add(part)
            case Starting(part) | Down(part):
                self._up.discard(part)
            case Ready():
                self.ready.set()
                self._life_ready.set()
            case Failed(part, message, path, tail):
                where = None if path is None else Path(f"{self._host}:{path}")
                self._said[part] = (where, tail)
                # Whoever is told says himself what it is that failed.
                self._failed_part = part
                self._words = message.removeprefix(f"{part} cannot start: ").removeprefix(f"{part} keeps dying: ")
                return  # the controller says so itself, if it matters to anybody
            case Stopping():
                return  # that is for the fleet as a whole
        self._emit(event)

    def _fail(self, part: PartId, reason: str) -> None:
        self._questions.give_up(reason)
        if not self._failed.done():
            self._failed.set_exception(GaveUp(part, reason))
            # Nobody may be waiting yet.
            self._failed.exception()

    def _spawn(self, work: Coroutine[object, object, object]) -> None:
        task: asyncio.Task[object] = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)


def with_joined(begun: UnitSpec, before: UnitSpec, joined: Collection[str]) -> UnitSpec:
    """A unit as a life of its actor has begun it, with the models that had `joined` the one before. Its models have the
    quotas of before, or, where the pools are of another size now, the same parts of them."""
    if not joined:
        return begun
    parts = {pool.name: pool.num_pages / before.pool(pool.name).num_pages for pool in begun.pools}

    def as_before(model: ModelSpec) -> ModelSpec:
        part = parts[model.pool]
        quota, floor = (pages if part == 1 else int(pages * part) for pages in (model.quota_pages, model.floor_pages))
        return msgspec.structs.replace(model, quota_pages=quota, floor_pages=floor)

    own = {model.name: model for model in begun.models}
    models = []
    for model in map(as_before, before.models):
        if model.name in own and model.name not in joined:
            model = msgspec.structs.replace(
                own[model.name], quota_pages=model.quota_pages, floor_pages=model.floor_pages
            )
        models.append(model)
    return msgspec.structs.replace(begun, models=models)
