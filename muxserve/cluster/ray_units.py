"""Units on other machines, started through Ray: a `UnitLauncher`.

Each unit is an actor (`ray_actor.UnitActor`) in a placement group of one bundle, with the CPUs of its engines; Ray
finds the node, and starts the actor again when its process or its node dies. The actor runs the unit's host. Requests,
tokens and pages do not pass through Ray: the unit's sockets are reached over TCP with the fleet's CURVE keys.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from muxserve import wire
from muxserve.cluster.event_lines import from_line
from muxserve.cluster.events import Down, Event, Failed, PartId, Progress, Ready, Starting, Up
from muxserve.cluster.last_words import Said
from muxserve.cluster.ray_actor import STOP_SECONDS, UnitActor
from muxserve.cluster.starts import MEMORY, MIGRATOR, UNIT, WARM
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.units import PlannedUnit
from muxserve.deployment import Deployment, Keys, UnitEntry
from muxserve.network import tcp_address

log = logging.getLogger(__name__)

# How long a unit waits for a node at its start; a cluster that adds machines by itself may need some minutes.
PLACE_SECONDS = 300.0
# The same when no node of the cluster is large enough, whatever runs there.
INFEASIBLE_SECONDS = 10.0
_HEAR_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_ANSWER_SECONDS = 1800.0
_HOST = PartId("host")


class RayUnits:
    """Starts units on the nodes of a Ray cluster.

    Args:
        address: of the cluster, as Ray understands it; "auto" is the one that this machine belongs to.
        keys: the fleet's.
        place_seconds: for how long a unit waits for a node with room.
        command: what starts a unit's host, if not the real one.
    """

    def __init__(
        self,
        address: str,
        keys: Keys,
        *,
        place_seconds: float = PLACE_SECONDS,
        command: list[str] | None = None,
    ) -> None:
        self._address = address
        self._keys = keys
        self._place_seconds = place_seconds
        self._command = command
        self._ray: Any = None
        self._connecting = asyncio.Lock()

    async def start(self, unit: PlannedUnit, migrates: bool, emit: Callable[[Event], None]) -> RayUnit:
        """See `UnitLauncher.start`."""
        if unit.deployment.gpu is not None:
            raise GaveUp(_HOST, "units on GPUs are started on the machine of their controller only, not on Ray")
        ray = await self._connected(unit.name)
        group = await self._place(ray, unit, emit)
        actor = None
        try:
            actor = self._actor(ray, group, unit, migrates)
            place = await _answer(actor.place.remote(), _ANSWER_SECONDS)
            if place["problem"]:
                raise GaveUp(_HOST, place["problem"])
        except ray.exceptions.RayError as error:
            await _release(ray, actor, group)
            raise GaveUp(_HOST, _why(error)) from None
        except BaseException:
            await _release(ray, actor, group)
            raise
        return RayUnit(ray, unit, migrates, actor, group, place, emit, self._keys)

    async def close(self) -> None:
        """See `UnitLauncher.close`."""
        if self._ray is not None:
            await asyncio.to_thread(self._ray.shutdown)
            self._ray = None

    # ------------------------------------------------------------ inside

    async def _connected(self, unit: str) -> Any:
        try:
            import ray
        except ImportError:
            raise GaveUp(_HOST, "units on Ray need it: pip install 'muxserve[ray]'") from None
        async with self._connecting:
            if self._ray is None:
                try:
                    await asyncio.to_thread(
                        ray.init,
                        address=self._address,
                        namespace="muxserve",
                        log_to_driver=False,
                        configure_logging=False,
                    )
                except (ConnectionError, RuntimeError, ValueError) as error:
                    raise GaveUp(
                        _HOST,
                        f"no Ray cluster answers at {self._address!r} ({_first_line(error)}); start one with "
                        "`ray start --head` here and `ray start --address=...` on the other machines",
                    ) from None
                self._ray = ray
        return self._ray

    async def _place(self, ray: Any, unit: PlannedUnit, emit: Callable[[Event], None]) -> Any:
        """A placement group for the unit, placed."""
        from ray.util.placement_group import placement_group, placement_group_table

        bundle = resources(unit.deployment)
        group = placement_group([bundle], strategy="STRICT_PACK", name=f"muxserve-{unit.name}")
        began, said = time.monotonic(), False
        try:
            while not await asyncio.to_thread(group.wait, 1):
                waited = time.monotonic() - began
                state = placement_group_table(group).get("stats", {}).get("scheduling_state", "")
                if waited > (INFEASIBLE_SECONDS if state == "INFEASIBLE" else self._place_seconds):
                    raise GaveUp(_HOST, _no_place(ray, bundle, waited))
                if not said:
                    emit(Progress(_HOST, f"waiting for a node with {_words(bundle)}"))
                    said = True
        except BaseException:
            await _release(ray, None, group)
            raise
        return group

    def _actor(self, ray: Any, group: Any, unit: PlannedUnit, migrates: bool) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = resources(unit.deployment)
        # Our keys go where the unit goes; who may talk to this Ray cluster may run whatever he likes on it anyway.
        deployment = msgspec.structs.replace(unit.deployment, keys=self._keys)
        arguments = ["--commands", *(["--migrates"] if migrates else []), "--serves", *unit.serves]
        return (
            ray.remote(UnitActor)
            .options(
                num_cpus=bundle["CPU"],
                max_restarts=-1,
                max_task_retries=0,
                # Somebody always listens; others are told things meanwhile.
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
            .remote(
                msgspec.json.encode(deployment),
                arguments,
                command=self._command,
            )
        )


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
        keys: Keys,
    ) -> None:
        self.sized = asyncio.Event()
        self.ready = asyncio.Event()
        self._ray = ray
        self._actor = actor
        self._group = group
        self._emit = emit
        self._keys = keys
        self._serves = [model.name for model in unit.deployment.models if model.name in unit.serves]
        self._migrates = migrates
        self._began = time.monotonic()
        self._up: set[PartId] = set()
        self._said: dict[PartId, Said] = {}
        self._words = ""
        self._failed_part = _HOST
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._deployment: Deployment
        self._life = ""
        self._moved_to(place)
        self._others: set[asyncio.Task[object]] = set()
        self._follower = asyncio.create_task(self._follow())

    # ------------------------------------------------------------ what is known

    @property
    def entry(self) -> UnitEntry:
        """See `UnitHandle.entry`."""
        listen = self._deployment.listen
        assert listen is not None, "the actor has chosen the ports"
        return UnitEntry(
            self._deployment,
            tcp_address(listen.host, listen.unit_port),
            tcp_address(listen.host, listen.migrator_port),
            list(self._serves),
            remote=True,
        )

    @property
    def parts(self) -> Collection[PartId]:
        """See `UnitHandle.parts`."""
        engines = [PartId("engine", model, phase) for model in self._serves for phase in ("prefill", "decode")]
        return [MEMORY, WARM, UNIT, *([MIGRATOR] if self._migrates else []), *engines]

    async def wait(self) -> None:
        """See `UnitHandle.wait`."""
        await asyncio.shield(self._failed)

    async def tell(self, message: wire.Message) -> None:
        """See `UnitHandle.tell`."""
        if UNIT in self._up:
            await self._ask("tell", message=base64.b64encode(wire.encode(message)).decode())

    async def state(self) -> dict[str, object]:
        """See `UnitHandle.state`."""
        while True:
            state = (await self._ask("state")).get("state")
            if isinstance(state, dict):
                return state
            await asyncio.sleep(_RETRY_SECONDS)

    def last_words(self, part: PartId) -> Said:
        """See `UnitHandle.last_words`; the log lies on the unit's node."""
        return self._said.get(part, (None, ()))

    # ------------------------------------------------------------ what is done

    async def start_model(self, model: str) -> None:
        """See `UnitHandle.start_model`."""
        reply = await self._ask("start_model", model=model)
        if error := reply.get("error"):
            part = reply.get("part")
            raise GaveUp(PartId("engine", model) if part is None else msgspec.convert(part, PartId), str(error))
        if model not in self._serves:
            self._serves.append(model)

    async def stop_model(self, model: str) -> None:
        """See `UnitHandle.stop_model`."""
        if model in self._serves:
            self._serves.remove(model)
        await self._ask("stop_model", model=model)

    def start_migrator(self) -> None:
        """See `UnitHandle.start_migrator`."""
        if not self._migrates:
            self._migrates = True
            self._spawn(self._ask("start_migrator"))

    def kill(self) -> None:
        """See `UnitHandle.kill`."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor, no_restart=True)

    async def stop(self) -> None:
        """See `UnitHandle.stop`."""
        for task in (self._follower, *self._others):
            task.cancel()
        await asyncio.gather(self._follower, *self._others, return_exceptions=True)
        self._give_up_questions("the unit is being stopped")
        if not self._failed.done():
            self._failed.cancel()
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            await _answer(self._actor.stop.remote(), STOP_SECONDS + 5)
        await _release(self._ray, self._actor, self._group)

    # ------------------------------------------------------------ the actor

    async def _follow(self) -> None:
        """Listen to the host, through whatever lives its actor has."""
        said, away = 0, False
        errors = self._ray.exceptions
        while not self._failed.done():
            try:
                heard = await _answer(self._actor.hear.remote(said, _HEAR_SECONDS), _HEAR_SECONDS + 10)
                if heard["life"] != self._life:
                    place = await _answer(self._actor.place.remote(), _ANSWER_SECONDS)
                    if place["problem"]:
                        self._fail(_HOST, place["problem"])
                        return
                    said, away = 0, False
                    self._come_back(place)
                    continue
            except errors.ActorDiedError as error:
                self._fail(_HOST, _why(error))
                return
            except (errors.RayError, TimeoutError) as error:
                if not away:
                    away = True
                    self._go_away(_why(error))
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            away, said = False, heard["said"]
            for line in heard["lines"]:
                self._hear(line)
            if heard["ended"] is not None:
                self._fail(self._failed_part, self._words or f"its host ended with status {heard['ended']}")

    def _go_away(self, why: str) -> None:
        log.warning("a unit's actor is away: %s", why)
        self._up.clear()
        self._give_up_questions("the unit's node or its actor has died")
        self._emit(Down(_HOST, "its node or its actor has died; Ray starts it again", 0.0))

    def _come_back(self, place: dict[str, Any]) -> None:
        self._up.clear()
        self._moved_to(place)
        # To the fleet this is a unit that may be somewhere else now.
        self._emit(Up(_HOST, 0, 0.0))

    def _moved_to(self, place: dict[str, Any]) -> None:
        self._life = place["life"]
        self._deployment = msgspec.json.decode(place["deployment"], type=Deployment)

    def _hear(self, line: str) -> None:
        try:
            said = msgspec.json.decode(line, type=dict[str, Any])
            if "reply" in said:
                future = self._asked.pop(said["reply"], None)
                if future is not None and not future.done():
                    future.set_result(said)
                return
            if said.get("event") == "Sized":
                self._deployment = msgspec.convert(said["deployment"], Deployment)
                self.sized.set()
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
            case Failed(part, message, path, tail):
                where = None if path is None else Path(f"{self._host}:{path}")
                self._said[part] = (where, tail)
                self._failed_part, self._words = part, message
                return  # the controller says so itself, if it matters to anybody
        self._emit(event)

    @property
    def _host(self) -> str:
        return self._deployment.listen.host if self._deployment.listen else ""

    async def _ask(self, what: str, **more: str) -> dict[str, Any]:
        """Have the host do something; returns its reply, with an `error` if it came to nothing."""
        self._number += 1
        number = self._number
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            line = json.dumps({"id": number, "do": what, **more})
            await _answer(self._actor.say.remote(line), _ANSWER_SECONDS)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            self._asked.pop(number, None)
            return {"error": _why(error)}
        reply: dict[str, Any] = await future
        return reply

    def _give_up_questions(self, why: str) -> None:
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_result({"error": why})

    def _fail(self, part: PartId, reason: str) -> None:
        self._give_up_questions(reason)
        if not self._failed.done():
            self._failed.set_exception(GaveUp(part, reason))
            # Nobody may be waiting yet.
            self._failed.exception()

    def _spawn(self, work: Coroutine[object, object, object]) -> None:
        task: asyncio.Task[object] = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)


def resources(deployment: Deployment) -> dict[str, float]:
    """What a unit takes of its node, as Ray counts it."""
    return {"CPU": float(deployment.cores)}


async def _answer(reference: Any, seconds: float) -> Any:
    return await asyncio.wait_for(reference, seconds)


async def _release(ray: Any, actor: Any, group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    with contextlib.suppress(ray.exceptions.RayError):
        if actor is not None:
            ray.kill(actor, no_restart=True)
    with contextlib.suppress(ray.exceptions.RayError):
        await asyncio.to_thread(remove_placement_group, group)


def _no_place(ray: Any, bundle: dict[str, float], waited: float) -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    there = "; ".join(
        f"{node['NodeManagerAddress']} with {_words({kind: node['Resources'].get(kind, 0.0) for kind in bundle})}"
        for node in nodes
    )
    return (
        f"no node had room for {_words(bundle)} within {waited:.0f} s (there are {there}; others may use some of it); "
        "add a node with `ray start --address=...`, or give units less"
    )


def _words(bundle: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {name}{'s' if count != 1 else ''}" for name, count in sorted(bundle.items()))


def _why(error: BaseException) -> str:
    if "No module named 'muxserve" in str(error):
        return "a node of the Ray cluster has no MuxServe; install the same version on every node"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
