"""How each part of a unit comes up, and what it waits for: on any device, and on CPUs (on GPUs: `gpu_starts`).

Unit scheduler, warm parent and memory manager are processes of their own; engines are forked from the warm parent, when
the memory manager serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Sequence

import zmq

from muxserve import wire
from muxserve.cluster.effects import UnitEffects
from muxserve.cluster.events import PartId, Progress, Starting
from muxserve.cluster.launcher import Launcher
from muxserve.cluster.processes import Process
from muxserve.cluster.restarts import PATIENT_DELAYS, RestartPolicy
from muxserve.cluster.supervision import STOP_SECONDS, Part, while_running
from muxserve.cluster.warm_link import Birth, ParentEvents, WarmLink
from muxserve.gpu.budget import Needs
from muxserve.gpu.unit import GpuMemory
from muxserve.net.peer import Address, AsyncPeer
from muxserve.net.sockets import until_reachable
from muxserve.spec import UnitSpec

MPS, MEMORY, WARM = PartId("mps"), PartId("memory"), PartId("warm_parent")
UNIT, MIGRATOR = PartId("unit"), PartId("migrator")
_START_SECONDS = {
    "mps": 120.0,
    "weights": 1800.0,
    "memory": 60.0,
    "unit": 30.0,
    "migrator": 30.0,
    "warm_parent": 300.0,
    "engine": 1800.0,
}
_ASK_AGAIN_SECONDS = 1.0
# What calls the memory manager falls silent with it, and is not to blame.
_CALL_MEMORY = ("engine", "unit", "migrator")


class UnitPeer:
    """The way to a unit scheduler. Messages wait while it is being started again. Needs a running event loop."""

    def __init__(self, address: str) -> None:
        self._waiting: set[asyncio.Future[dict[str, object]]] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        at = Address("the unit scheduler", address, f"controller/{os.getpid()}")
        self._peer = AsyncPeer(self._context, at, keeps=True, on_message=self._answered)

    def send(self, message: wire.Message) -> None:
        """Send it."""
        self._peer.send(message)

    async def state(self) -> dict[str, object]:
        """The unit's state; waits until there is a unit scheduler that answers."""
        future: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            while not future.done():
                # What was sent to a scheduler that has died since is gone, hence again.
                self.send(wire.StateRequest())
                await asyncio.wait([future], timeout=_ASK_AGAIN_SECONDS)
            return future.result()
        finally:
            self._waiting.discard(future)

    def close(self) -> None:
        """Close the socket."""
        self._peer.close()
        self._context.term()

    def _answered(self, message: wire.Message) -> None:
        if isinstance(message, wire.StateReply):
            for future in self._waiting:
                if not future.done():
                    future.set_result(message.state)


class UnitStarts(ParentEvents, ABC):
    """The parts of a unit with what starts them (a `Starter`). Made inside a running event loop, or before it.

    Args:
        models: the models that have engines from the beginning; others of the unit may get them later.
        exits: return codes of processes that are not our children, as they are reported.
    """

    def __init__(
        self,
        unit_spec: UnitSpec,
        models: Collection[str],
        launcher: Launcher,
        effects: UnitEffects,
        exits: dict[int, int],
    ) -> None:
        self.unit_spec = unit_spec
        self.warm: WarmLink | None = None
        self.unit: UnitPeer | None = None
        # On a CPU, by model: the process that has loaded its weights and forks its engines.
        self.model_parents: dict[str, Process] = {}
        # Which warm parent a part was forked from.
        self.parent_of: dict[PartId, WarmLink] = {}
        self.sized = asyncio.Event()
        self._launcher = launcher
        self._effects = effects
        self._exits = exits
        # Models that could not be started when the unit was: the others do not wait for them.
        self.left_out: set[str] = set()
        # Set when a model is left out, or parts are stopped.
        self._left_out = asyncio.Event()
        # Parts that have been stopped before they were up.
        self._stopped: set[Part] = set()
        # Engines whose next start requests wait for.
        self.awaited: set[PartId] = set()
        # Model loading is mostly computing; more at once than this only makes each of them later.
        self._at_once = asyncio.Semaphore(2 * max(2, unit_spec.cores))
        self.parts: dict[PartId, Part] = {who: self._part(who) for who in self._base()}
        for model in unit_spec.models:
            if model.name in models:
                self.parts.update({part.id: part for part in self.parts_of(model.name)})

    # ------------------------------------------------------------ the parts

    @abstractmethod
    def _base(self) -> Sequence[PartId]:
        """What a unit has whatever it serves, in the order in which it comes up."""

    def parts_of(self, model: str) -> list[Part]:
        """What serves one model: new parts, not yet among `parts`."""
        return [self._part(PartId("engine", model, phase)) for phase in self.unit_spec.model(model).engines]

    def migrator(self) -> Part:
        """What moves requests to other units and takes theirs: a new part, not yet among `parts`. Nothing is lost while
        it is away, hence it is started again for ever."""
        part = self._part(MIGRATOR)
        part.policy = RestartPolicy(max_deaths=None, delays=PATIENT_DELAYS)
        return part

    def _part(self, who: PartId) -> Part:
        part = Part(who, self, _START_SECONDS[who.kind])
        if who.kind in _CALL_MEMORY:
            part.waits_for = (MEMORY,)
        if who.model:
            # Other models serve on without it.
            part.policy = RestartPolicy(max_deaths=None)
        return part

    @property
    def holders(self) -> list[PartId]:
        """What holds weights on GPUs, of the models that are served."""
        return [part for part in self.parts if part.kind == "weights"]

    @property
    def engines(self) -> list[PartId]:
        """The engines of the models that are served."""
        return [part for part in self.parts if part.kind == "engine"]

    def runs(self, part: PartId) -> bool:
        """Whether its process runs."""
        process = self.parts[part].process
        return process is not None and process.running

    def leave_out(self, model: str) -> None:
        """The other models go on without this one, which is tried again and again."""
        self.left_out.add(model)
        self._left_out.set()

    def stopped(self, part: Part) -> None:
        """Nobody should wait for the part any more: its model sleeps."""
        self._stopped.add(part)
        self._left_out.set()

    async def until_up(self, part: Part) -> bool:
        """Until a part is up, its model is left out, or it is stopped; whether it is up."""
        up = asyncio.ensure_future(part.up.wait())
        try:
            while not up.done() and part.id.model not in self.left_out and part not in self._stopped:
                self._left_out.clear()
                left_out = asyncio.ensure_future(self._left_out.wait())
                try:
                    await asyncio.wait({up, left_out}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    left_out.cancel()
            return part.up.is_set()
        finally:
            up.cancel()

    # ------------------------------------------------------------ life

    def open(self) -> None:
        """Make what needs a running event loop."""
        self.unit = UnitPeer(self.unit_spec.unit_address)

    async def close(self) -> None:
        """Close all that is open to the parts; they end for it at the latest."""
        await self.drop_warm()
        if self.unit is not None:
            self.unit.close()

    def change(self, unit_spec: UnitSpec) -> None:
        """The unit is as `unit_spec` has it from now on."""
        self.unit_spec = unit_spec

    async def drop_warm(self) -> None:
        """Forget the warm parent: whoever still waits to be forked by it hears that it died."""
        if self.warm is not None:
            await self.warm.close()
            self.warm = None

    @abstractmethod
    async def forget_weights(self, model: str) -> None:
        """Let go of the weights of a model none of whose engines runs any more. On GPUs, what is kept of them in the
        host's memory stays."""

    # ------------------------------------------------------------ only on GPUs (`GpuStarts`)

    @property
    def keepers_in_mps(self) -> bool:
        """Whether what keeps memory for the engines ends with the MPS server."""
        return False

    @property
    def restarts_mps(self) -> bool:
        """Whether the MPS server of this machine does not outlive a killed client unharmed."""
        return False

    def gpu_memory(self) -> GpuMemory | None:
        """What is taken of the unit's GPUs, as measured or estimated; None on a CPU."""
        return None

    def expect(self, estimated: Collection[Needs], asleep: bool) -> None:
        """What a model that joins the unit needs of its GPUs, before it has been measured. `asleep`: when it is
        woken."""

    async def admit(self, model: str) -> None:
        """Go on only if a model whose engines are about to be started has room. That is looked at again when it has
        been loaded and measured.

        Raises:
            GaveUp: see `check_room`.
        """

    async def check_room(self, model: str, loaded: bool = False) -> None:
        """Go on only if a model whose engines do not run fits beside what the unit's GPUs hold. `loaded`: its weights
        are on the GPUs.

        Raises:
            GaveUp: it does not fit, in words and numbers.
        """

    async def forget(self, model: str) -> None:
        """Let go of what is kept of a model that sleeps."""

    def forget_memory(self) -> None:
        """Let go of the GPU memory that is kept for the next memory manager: nobody computes on it any more."""

    async def rest(self, model: str) -> bool:
        """Have the engines of `model` rest, which is put to sleep; whether they do. Else they run on as they are."""
        return False

    async def end_resting(self) -> None:
        """End all engines that rest."""

    # ------------------------------------------------------------ a starter of parts

    async def before_start(self, part: Part) -> None:
        """See `Starter.before_start`."""
        match part.id.kind:
            case "warm_parent":
                await self._launcher.until_warm()
            case "unit" | "migrator" | "engine":
                await self.sized.wait()

    async def start(self, part: Part) -> None:
        """See `Starter.start`."""
        match part.id.kind:
            case "memory":
                await self._start_memory(part)
            case "unit":
                await self._start_unit(part)
            case "migrator":
                await self._start_migrator(part)
            case "warm_parent":
                await self._start_warm(part)
            case _:
                part.pause()
                await self._until_forkable(part)
                async with self._at_once:
                    await self._fork(part)

    async def release(self, pid: int) -> None:
        """See `Starter.release`."""

    async def _start_memory(self, part: Part) -> None:
        self._effects.emit(Starting(part.id))
        part.process, ready = self._memory_manager()
        await while_running(part.process, ready)

    def _memory_manager(self) -> tuple[Process, Awaitable[None]]:
        """See `Launcher.memory_manager`."""
        return self._launcher.memory_manager()

    async def _start_unit(self, part: Part) -> None:
        self._effects.emit(Starting(part.id))
        assert self.unit is not None
        part.process = self._launcher.unit_scheduler()
        await while_running(part.process, self.unit.state())

    async def _start_migrator(self, part: Part) -> None:
        await self.parts[MEMORY].up.wait()
        part.began = time.monotonic()
        self._effects.emit(Starting(part.id))
        part.process = self._launcher.migrator()
        await while_running(part.process, until_reachable(self.unit_spec.migrator_address))

    async def _start_warm(self, part: Part) -> None:
        self._effects.emit(Starting(part.id))
        await self.drop_warm()
        self.warm = WarmLink(WARM, self)
        try:
            part.process = await self._launcher.warm_parent(self.warm.theirs.fileno())
        finally:
            self.warm.theirs.close()
        await while_running(part.process, self.warm.ready)

    # ------------------------------------------------------------ forks

    async def _until_forkable(self, part: Part) -> None:
        """What a part waits for that is forked from the warm parent."""
        await self.parts[WARM].up.wait()
        await self.parts[MEMORY].up.wait()

    @abstractmethod
    async def _fork(self, part: Part) -> None:
        """Have a part forked, and wait until it is up."""

    async def _until_warm(self) -> WarmLink:
        await self.parts[WARM].up.wait()
        assert self.warm is not None
        return self.warm

    def _order(self, part: Part, link: WarmLink, **more: str) -> Birth:
        """Have a part forked; its time begins. `more`: what it hears besides."""
        part.resume()
        part.began = time.monotonic()
        self._effects.emit(Starting(part.id))
        awaited = {"awaited": "yes"} if part.id in self.awaited else {}
        self.awaited.discard(part.id)
        birth = link.order(part.id, (), **awaited, **more)
        self.parent_of[part.id] = link
        return birth

    # ------------------------------------------------------------ what the warm parent says

    def on_progress(self, part: PartId, detail: str) -> None:
        """See `ParentEvents.on_progress`."""
        self._effects.emit(Progress(part, detail))

    def on_exited(self, pid: int, status: int) -> None:
        """See `ParentEvents.on_exited`."""
        self._exits[pid] = status


class CpuStarts(UnitStarts):
    """See `UnitStarts`. The pools are as large as planned."""

    def _base(self) -> Sequence[PartId]:
        return MEMORY, WARM, UNIT

    def open(self) -> None:
        """See `UnitStarts.open`."""
        super().open()
        self.sized.set()

    async def _fork(self, part: Part) -> None:
        link = await self._until_warm()
        birth = self._order(part, link)
        part.process = await birth.process(self._exits)
        await birth.until_up(part.process)

    async def forget_weights(self, model: str) -> None:
        """See `UnitStarts.forget_weights`. They count as the model's until its parent has ended."""
        if self.warm is not None:
            self.warm.tell("end", model)
        parent = self.model_parents.get(model)
        if parent is not None:
            # It ends by itself when it gets no more orders; the memory is free when it has.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await parent.wait()
            parent.send(signal.SIGKILL)
            self.model_parents.pop(model, None)

    def on_model_parent(self, model: str, pid: int) -> None:
        """See `ParentEvents.on_model_parent`."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            parent = self.model_parents[model] = Process(pid)
            self._effects.on_model_parent(model, parent)
