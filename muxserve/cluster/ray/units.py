"""Units on other machines, started through Ray: a `UnitLauncher`.

Each unit is an actor (`UnitActor`) in a placement group of one bundle, with the CPUs of its engines and as
many GPUs as it has ranks; Ray finds the node, and starts the actor again when its process or its node dies. Units are
spread over the nodes, or packed on as few as hold them; either is a wish that gives way to what has room. The actor
starts the unit's host, which finds out what GPUs Ray has given to it, and watches it. Nothing else passes through Ray:
the host and the unit's sockets are reached over TCP with the fleet's CURVE keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from muxserve.cluster.events import HOST, Event, Progress
from muxserve.cluster.ray.actor import STOP_SECONDS, UnitActor
from muxserve.cluster.ray.cluster import join, survey, type_resources, why
from muxserve.cluster.remote_unit import HostAwayError, HostLife, RemoteUnit, Watched
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.units import PlannedUnit
from muxserve.spec import FleetSpec, Keys, UnitSpec

# How long a unit waits for a node at its start; a cluster that adds machines by itself may need some minutes.
PLACE_SECONDS = 300.0
# The same when no node of the cluster is large enough, whatever runs there.
INFEASIBLE_SECONDS = 10.0
# An actor waits for its place on the node, and for the host before it to end.
_FIND_SECONDS = 1800.0
# An actor that is there answers within so long, beyond the time that it takes by intent.
_ANSWER_SECONDS = 10.0


class ActorPlace:
    """An actor and its place in the cluster: a `HostPlace`."""

    def __init__(self, ray: Any, actor: Any, group: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._group = group

    async def find(self) -> HostLife:
        """See `HostPlace.find`."""
        place = await self._answer(self._actor.place.remote(), _FIND_SECONDS)
        return HostLife(**place | {"unit_spec": msgspec.json.decode(place["unit_spec"], type=UnitSpec)})

    async def watch(self, seconds: float) -> Watched:
        """See `HostPlace.watch`."""
        return Watched(**await self._answer(self._actor.watch.remote(seconds), seconds + _ANSWER_SECONDS))

    def kill(self) -> None:
        """See `HostPlace.kill`."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor, no_restart=True)

    async def stop(self) -> None:
        """See `HostPlace.stop`."""
        with contextlib.suppress(GaveUp, HostAwayError):
            await self._answer(self._actor.stop.remote(), STOP_SECONDS + 5)
        await self.release()

    async def release(self) -> None:
        """End the actor, and give its place back."""
        self.kill()
        await _give_back(self._ray, self._group)

    async def _answer(self, reference: Any, seconds: float) -> Any:
        """What a call of the actor returns.

        Raises:
            HostAwayError: it has not within `seconds`, or cannot now.
            GaveUp: it never will.
        """
        try:
            async with asyncio.timeout(seconds):
                return await reference
        except self._ray.exceptions.ActorDiedError as error:
            raise GaveUp(HOST, why(error)) from None
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            raise HostAwayError(why(error)) from None


class RayUnits:
    """Starts units on the nodes of a Ray cluster.

    Args:
        address: of the cluster, as Ray understands it; "auto" is the one that this machine belongs to, which is started
            if there is none.
        keys: the fleet's.
        placement: units on as many nodes as there are, or on as few as hold them.
        place_seconds: for how long a unit waits for a node with room.
        away_seconds: for how long it is left to Ray to start one again.
        command: what starts a unit's host, if not the real one.
    """

    def __init__(
        self,
        address: str,
        keys: Keys,
        *,
        placement: Literal["spread", "pack"] = "spread",
        place_seconds: float = PLACE_SECONDS,
        away_seconds: float = PLACE_SECONDS,
        command: list[str] | None = None,
    ) -> None:
        self._address = address
        self._keys = keys
        self._placement = placement
        self._place_seconds = place_seconds
        self._away_seconds = away_seconds
        self._command = command
        self._ray: Any = None
        self._connecting = asyncio.Lock()
        self._units: dict[str, RemoteUnit] = {}

    async def connect(self) -> str:
        """Join the cluster; returns the address under which its nodes reach this machine.

        Raises:
            GaveUp: Ray is not installed, or no cluster answers.
        """
        async with self._connecting:
            if self._ray is None:
                self._ray = await asyncio.to_thread(join, self._address)
        return str(self._ray.util.get_node_ip_address())

    async def reachable(self, fleet: FleetSpec) -> FleetSpec:
        """Join the cluster; returns the fleet with keys, and an address where engines on its nodes find the gateways.

        Raises:
            GaveUp: as for `connect`.
        """
        return msgspec.structs.replace(fleet, keys=self._keys, tokens_host=await self.connect())

    async def start(self, unit: PlannedUnit, migrates: bool, emit: Callable[[Event], None]) -> RemoteUnit:
        """See `UnitLauncher.start`."""
        await self.connect()
        ray = self._ray
        bundle = resources(unit.unit_spec)
        if unit.gpu is not None:
            bundle |= type_resources(await asyncio.to_thread(survey, ray), unit.gpu.unit.gpus[0])
        group = await self._place(ray, unit, bundle, emit)
        try:
            place = ActorPlace(ray, self._actor(ray, group, unit, migrates), group)
        except BaseException:
            await _give_back(ray, group)
            raise
        try:
            found = await place.find()
            if found.problem:
                raise GaveUp(HOST, found.problem)
        except HostAwayError as error:
            await place.release()
            raise GaveUp(HOST, str(error)) from None
        except BaseException:
            await place.release()
            raise
        if found.note:
            emit(Progress(HOST, found.note))
        started = RemoteUnit(unit, migrates, place, found, emit, self._away_seconds)
        self._units[unit.name] = started
        return started

    async def close(self) -> None:
        """See `UnitLauncher.close`."""
        self._units = {}
        if self._ray is not None:
            await asyncio.to_thread(self._ray.shutdown)
            self._ray = None

    # ------------------------------------------------------------ inside

    async def _place(self, ray: Any, unit: PlannedUnit, bundle: dict[str, float], emit: Callable[[Event], None]) -> Any:
        """A placement group for the unit, placed."""
        from ray.util.placement_group import placement_group, placement_group_table

        wish = self._wish(ray, unit)
        group = placement_group(
            [bundle], strategy="STRICT_PACK", name=f"muxserve-{unit.name}", _soft_target_node_id=wish or None
        )
        began, said = time.monotonic(), False
        try:
            while not await asyncio.to_thread(group.wait, 1):
                waited = time.monotonic() - began
                state = placement_group_table(group).get("stats", {}).get("scheduling_state", "")
                patience = INFEASIBLE_SECONDS if state == "INFEASIBLE" else self._place_seconds
                if waited > min(patience, self._place_seconds):
                    raise GaveUp(HOST, _no_place(ray, bundle, waited))
                if not said:
                    emit(Progress(HOST, f"waiting for a node with {_words(bundle)}"))
                    said = True
        except BaseException:
            await _give_back(ray, group)
            raise
        return group

    def _wish(self, ray: Any, unit: PlannedUnit) -> str:
        """The node that the unit should be on, if it has room; empty: any."""
        need = resources(unit.unit_spec)
        taken: dict[str, Counter[str]] = defaultdict(Counter)
        for name, other in self._units.items():
            if name != unit.name and not other.ended:
                taken[other.node].update(resources(other.entry.unit_spec))
        rooms = {
            node["NodeID"]: {kind: node["Resources"].get(kind, 0.0) - taken[node["NodeID"]][kind] for kind in need}
            for node in ray.nodes()
            if node["Alive"]
        }
        return wished(rooms, taken, need, self._placement)

    def _actor(self, ray: Any, group: Any, unit: PlannedUnit, migrates: bool) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = resources(unit.unit_spec)
        # Our keys go where the unit goes; who may talk to this Ray cluster may run whatever he likes on it anyway.
        unit_spec = msgspec.structs.replace(unit.unit_spec, keys=self._keys)
        arguments = ["--ends-with-input", *(["--migrates"] if migrates else []), "--serves", *unit.serves]
        return (
            ray.remote(UnitActor)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0.0),
                max_restarts=-1,
                max_task_retries=0,
                # Somebody always listens; others are told things meanwhile.
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
            .remote(
                msgspec.json.encode(unit_spec),
                arguments,
                command=self._command,
                gpu_plan=b"" if unit.gpu is None else unit.gpu.to_json(),
            )
        )


async def _give_back(ray: Any, group: Any) -> None:
    """Remove a placement group."""
    from ray.util.placement_group import remove_placement_group

    with contextlib.suppress(ray.exceptions.RayError):
        await asyncio.to_thread(remove_placement_group, group)


def resources(unit_spec: UnitSpec) -> dict[str, float]:
    """What a unit takes of its node, as Ray counts it. GPUs are whole ones: a unit shares them with nobody."""
    gpus = {} if unit_spec.gpu is None else {"GPU": float(unit_spec.ranks)}
    return {"CPU": float(unit_spec.cores), **gpus}


def wished(
    rooms: Mapping[str, Mapping[str, float]],
    taken: Mapping[str, Mapping[str, float]],
    need: Mapping[str, float],
    placement: str,
) -> str:
    """The node for a unit that needs so many GPUs or CPUs, given those that each has left and those our units take of
    each; empty if none has room. Spread: where we have least, and then where most is left. Packed: where we have most,
    and then where least is left. Units on GPUs are counted by those."""
    fit = sorted(
        node for node, left in rooms.items() if all(left.get(kind, 0.0) >= count for kind, count in need.items())
    )
    sign = 1 if placement == "spread" else -1
    by = "GPU" if "GPU" in need else "CPU"

    def rank(node: str) -> tuple[float, float]:
        return sign * taken.get(node, {}).get(by, 0.0), -sign * rooms[node][by]

    return min(fit, key=rank, default="")


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
    counted = {name: count for name, count in bundle.items() if ":" not in name}
    kinds = [name.partition(":")[2] for name in sorted(bundle.keys() - counted.keys()) if bundle[name]]
    words = [f"{count:g} {name}{'s' if count != 1 else ''}" for name, count in sorted(counted.items())]
    return " and ".join(words) + f" ({', '.join(kinds)})" * bool(kinds)
