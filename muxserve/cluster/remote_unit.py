"""A unit whose host is a process of its own, usually on another machine: a `UnitHandle`.

Whoever has placed the host (`HostPlace`) is asked all the time how it is. When its process or its machine has died it
is started again, where it was or elsewhere; each such life has a connection of its own (`host_link`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from muxserve import wire
from muxserve.cluster.events import HOST, Down, Event, Failed, PartId, Ready, Starting, Stopping, Up
from muxserve.cluster.host import MemoryParents
from muxserve.cluster.host_link import (
    ASK_SECONDS,
    Answer,
    AnyCommand,
    ControllerEnd,
    HostEvent,
    JoinUnit,
    ReadState,
    Sized,
    StartMigrator,
    StartModel,
    StopModel,
    Tell,
)
from muxserve.cluster.log_tail import Said
from muxserve.cluster.starts import MEMORY, MIGRATOR, MPS, UNIT, WARM
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.units import PlannedUnit
from muxserve.gpu.budget import Needs
from muxserve.gpu.unit import GpuMemory
from muxserve.net.sockets import tcp_address
from muxserve.spec import ModelSpec, UnitEntry, UnitSpec

log = logging.getLogger(__name__)

_WATCH_SECONDS = 5.0
_RETRY_SECONDS = 0.5
# Starting a model takes what its engines are given for it, twice if they die meanwhile.
_START_SECONDS = 3600.0 + ASK_SECONDS
_AWAY = "its node or its actor has died"


class HostAwayError(Exception):
    """Nobody knows how a host is: who watches it does not answer, or is being started again with it."""


@dataclass(frozen=True)
class HostLife:
    """One life of a host: its name, Ray's name of its node if there is one, and the unit's spec as it is there.
    `problem`: why no host was started; `note`: what the user should know."""

    life: str
    node: str
    unit_spec: UnitSpec
    problem: str = ""
    note: str = ""


@dataclass(frozen=True)
class Watched:
    """How a host is: its life; its exit status if it has ended; why it was killed if it hung."""

    life: str
    ended: int | None = None
    hung: str = ""


class HostPlace(Protocol):
    """What has placed a host, watches it and ends it."""

    async def find(self) -> HostLife:
        """The life of the host that is or is about to be.

        Raises:
            HostAwayError: there is none at present.
            GaveUp: there will be none.
        """

    async def watch(self, seconds: float) -> Watched:
        """How the host is, once it has ended or `seconds` have passed.

        Raises:
            HostAwayError: nobody knows at present.
            GaveUp: nobody will know.
        """

    def kill(self) -> None:
        """End it at once; `stop` is still called."""

    async def stop(self) -> None:
        """End it in order, and give its place back."""


class RemoteUnit:
    """A handle of a unit whose host `place` has placed.

    Args:
        found: the host's first life.
        emit: called with what happens.
        patience: seconds for which a host may be away.
    """

    def __init__(
        self,
        unit: PlannedUnit,
        migrates: bool,
        place: HostPlace,
        found: HostLife,
        emit: Callable[[Event], None],
        patience: float,
    ) -> None:
        self.ended = False
        self.sized = asyncio.Event()
        self.ready = asyncio.Event()
        self._place = place
        self._emit = emit
        self._patience = patience
        self._serves = [model.name for model in unit.unit_spec.models if model.name in unit.serves]
        self._migrates = migrates
        # What every life of the host begins with, whatever was changed since.
        self._begins_with = (frozenset(self._serves), migrates)
        self._up: set[PartId] = set()
        self._said: dict[PartId, Said] = {}
        self._words = ""
        self._failed_part = HOST
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unit_spec = found.unit_spec
        # What models that have joined since take of the unit's GPUs: a new life of the host knows nothing of them.
        self._joined: dict[str, tuple[Needs, ...]] = {}
        # Nobody knows how the host is; and a new life of it has not said yet how large its pools are.
        self._away = self._moves = False
        self._others: set[asyncio.Task[object]] = set()
        self._live(found)
        self._follower = asyncio.create_task(self._follow())

    # ------------------------------------------------------------ what is known

    @property
    def node(self) -> str:
        """Ray's name of its node."""
        return self._found.node

    @property
    def entry(self) -> UnitEntry:
        """See `UnitHandle.entry`."""
        unit_spec, listen = self._unit_spec, self._unit_spec.listen
        if listen is None:
            addresses = unit_spec.unit_address, unit_spec.migrator_address
        else:
            addresses = tcp_address(listen.host, listen.unit_port), tcp_address(listen.host, listen.migrator_port)
        return UnitEntry(unit_spec, *addresses, list(self._serves), remote=listen is not None)

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
        return bool(engines) and not self._away and {UNIT, *engines} <= self._up

    def memory_parents(self) -> MemoryParents:
        """See `UnitHandle.memory_parents`."""
        return MemoryParents()

    def gpu_memory(self) -> GpuMemory | None:
        """See `UnitHandle.gpu_memory`."""
        return None

    async def wait(self) -> None:
        """See `UnitHandle.wait`."""
        await asyncio.shield(self._failed)

    async def tell(self, message: wire.AnyMessage) -> None:
        """See `UnitHandle.tell`."""
        if UNIT in self._up:
            # Beside: its node may have died a moment ago, and others are to be told as well.
            self._spawn(self._ask(Tell(message)))

    async def state(self) -> dict[str, object]:
        """See `UnitHandle.state`."""
        while (state := (await self._ask(ReadState())).state) is None:
            await asyncio.sleep(_RETRY_SECONDS)
        return state

    def log_tail_of(self, part: PartId) -> Said:
        """See `UnitHandle.log_tail_of`; the log lies on the unit's node."""
        return self._said.get(part, (None, ()))

    # ------------------------------------------------------------ what is done

    async def start_model(self, model: str) -> None:
        """See `UnitHandle.start_model`."""
        (await self._ask(StartModel(model), _START_SECONDS)).check(model)
        if model not in self._serves:
            self._serves.append(model)

    async def join(self, unit_spec: UnitSpec, model: str, needs: Sequence[Needs] = (), asleep: bool = False) -> None:
        """See `UnitHandle.join`. Where units are elsewhere, no model sleeps."""
        (await self._ask(JoinUnit(model, unit_spec, needs))).check(model)
        self._joined[model] = tuple(needs)
        self._unit_spec = unit_spec

    async def stop_model(self, model: str) -> None:
        """See `UnitHandle.stop_model`."""
        if model in self._serves:
            self._serves.remove(model)
        (await self._ask(StopModel(model))).check(model)

    async def forget(self, model: str) -> None:
        """See `UnitHandle.forget`. Where units are elsewhere, nothing is kept."""

    def start_migrator(self) -> None:
        """See `UnitHandle.start_migrator`."""
        if not self._migrates:
            self._migrates = True
            self._spawn(self._ask(StartMigrator()))

    def kill(self) -> None:
        """See `UnitHandle.kill`."""
        self._place.kill()

    async def stop(self) -> None:
        """See `UnitHandle.stop`."""
        self.ended = True
        for task in (self._follower, *self._others):
            task.cancel()
        await asyncio.gather(self._follower, *self._others, return_exceptions=True)
        self._link.close("the unit is being stopped")
        if not self._failed.done():
            self._failed.cancel()
        await self._place.stop()

    async def _ask(self, command: AnyCommand, seconds: float = ASK_SECONDS) -> Answer:
        return Answer(problem=_AWAY) if self._away else await self._link.ask(command, seconds)

    # ------------------------------------------------------------ the host's lives

    def _live(self, found: HostLife) -> None:
        """Follow a new life of the host."""
        self._found = found
        self._life_ready = asyncio.Event()
        self._up.clear()
        self._link = ControllerEnd(found.unit_spec, self._hear)

    async def _follow(self) -> None:
        """Watch the host, through whatever lives it has."""
        away = 0.0
        while not self._failed.done():
            try:
                watched = await self._place.watch(_WATCH_SECONDS)
                found = await self._place.find() if watched.life != self._found.life else self._found
            except GaveUp as failure:
                self._fail(failure.part, str(failure))
                return
            except HostAwayError as error:
                if not self._away:
                    away = time.monotonic()
                    self._go_away(str(error))
                elif time.monotonic() - away > self._patience:
                    self._fail(HOST, f"it has not been started again within {self._patience:g} s")
                    return
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if found.problem:
                self._fail(HOST, found.problem)
                return
            was_away, self._away = self._away, False
            if found is not self._found:
                self._moves = True
                self._link.close(_AWAY)
                self._live(found)
                self._spawn(self._as_before(self._life_ready))
            elif was_away:
                self._emit(Up(HOST, 0, 0.0))  # only its watcher was away
            elif watched.ended is not None:
                if watched.hung:
                    self._emit(Down(HOST, watched.hung, 0.0, hung=True))
                self._fail(self._failed_part, self._words or f"its host ended with status {watched.ended}")

    def _go_away(self, why: str) -> None:
        log.warning("nobody knows how the host of %s is: %s", self._unit_spec.unit, why)
        self._away = True
        self._link.give_up(_AWAY)
        self._emit(Down(HOST, f"{_AWAY}; it is started again", 0.0))

    async def _as_before(self, ready: asyncio.Event) -> None:
        """Have a new life of the host, which begins as the first one did, serve what was served last."""
        await ready.wait()
        for model, needs in self._joined.items():
            if problem := (await self._ask(JoinUnit(model, self._unit_spec, needs))).problem:
                log.warning("%s does not join a unit that was started again: %s", model, problem)
        serves, migrates = self._begins_with
        if self._migrates and not migrates:
            await self._ask(StartMigrator())
        changes: dict[str, StartModel | StopModel] = {name: StopModel(name) for name in serves.difference(self._serves)}
        changes |= {name: StartModel(name) for name in self._serves if name not in serves}
        for model, command in sorted(changes.items()):
            if problem := (await self._ask(command, _START_SECONDS)).problem:
                log.warning("%s %s, after a unit was started again: %s", type(command).__name__, model, problem)

    def _sized(self, unit_spec: UnitSpec) -> None:
        """This life's GPUs and pools are known; until then the unit is to others where it was."""
        lengths = {model.name: model.max_len for model in self._unit_spec.models if self.sized.is_set()}
        for model in unit_spec.models:
            if model.max_len < (before := lengths.get(model.name, 0)):
                # Requests of that length have been promised.
                words = f"{model.max_len} tokens of {model.name}, which was offered with {before}"
                where = unit_spec.listen.host if unit_spec.listen else "this machine"
                self._fail(HOST, f"the GPUs that it has now on {where} hold {words}; free their memory")
                return
        # The host joins them again when it is up.
        self._unit_spec = with_joined(unit_spec, self._unit_spec, self._joined)
        self.sized.set()
        if self._moves:
            # To the fleet this is a unit that may be somewhere else now.
            self._moves = False
            self._emit(Up(HOST, 0, 0.0))

    def _hear(self, event: HostEvent) -> None:
        match event:
            case Sized(unit_spec):
                self._sized(unit_spec)
                return
            case Up(part):
                self._up.add(part)
            case Starting(part) | Down(part):
                self._up.discard(part)
            case Ready():
                self.ready.set()
                self._life_ready.set()
            case Failed(part, message, path, tail):
                listen = self._found.unit_spec.listen
                where = Path(f"{listen.host}:{path}" if listen else path) if path else None
                self._said[part] = (where, tail)
                # Whoever is told says himself what it is that failed.
                self._failed_part = part
                self._words = message.removeprefix(f"{part} cannot start: ").removeprefix(f"{part} keeps dying: ")
                return  # the controller says so itself, if it matters to anybody
            case Stopping():
                return  # that is for the fleet as a whole
        self._emit(event)

    def _fail(self, part: PartId, reason: str) -> None:
        self._link.give_up(reason)
        if not self._failed.done():
            self._failed.set_exception(GaveUp(part, reason))
            # Nobody may be waiting yet.
            self._failed.exception()

    def _spawn(self, work: Coroutine[object, object, object]) -> None:
        task: asyncio.Task[object] = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)


def with_joined(begun: UnitSpec, before: UnitSpec, joined: Collection[str]) -> UnitSpec:
    """A unit as a life of its host has begun it, with the models that had `joined` the one before. Its models have the
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
