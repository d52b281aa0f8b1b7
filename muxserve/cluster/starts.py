"""How each part of a unit comes up, and what it waits for.

On a CPU: memory manager, warm parent and unit scheduler at once; engines from the warm parent, when the memory manager
serves. On GPUs also: the MPS server before the warm parent; the weight holders of all models from it; from what they
measured, the size of the pools; and only then everything that reads it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import zmq

from muxserve import wire
from muxserve.cluster.events import Event, PartId, Progress, Starting
from muxserve.cluster.launcher import Launcher
from muxserve.cluster.processes import Process, children, exit_words
from muxserve.cluster.restarts import PATIENT_DELAYS, RestartPolicy
from muxserve.cluster.resting import RestingEngines
from muxserve.cluster.supervision import STOP_SECONDS, GaveUp, Part, PartDied, PartFailed, while_running
from muxserve.cluster.warm_link import WarmLink
from muxserve.gpu import mps, nvml
from muxserve.gpu.budget import WAITING, Needs
from muxserve.gpu.unit import GpuMemory, PoolSizer, SizingError
from muxserve.gpu.weight_server import HostCopy, WeightServer
from muxserve.net.peer import Address, AsyncPeer
from muxserve.net.sockets import until_reachable
from muxserve.spec import UnitSpec
from placement.format import format_size

if TYPE_CHECKING:
    from muxserve.memory.fd_store import FdStore

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
_LAST_WORDS_SECONDS = 0.1
_ASK_AGAIN_SECONDS = 1.0
# What the process that fills a model's weights in does: reads its files, keeps a copy of what came of them, or copies
# that back.
WeightSource = Literal["", "copy", "restore"]
# Engines let go of the weights, or map them again, in milliseconds; so long at most, before they end. The weights are
# copied in seconds, those of several models one after the other.
_REST_SECONDS = 30.0
_RESTORE_SECONDS = 180.0
# What a process had on a GPU is free some time after its end; so long, and so often, is looked.
_FREE_SECONDS, _FREE_LOOK_SECONDS = 5.0, 0.1


class UnitPeer:
    """The controller's connection to a unit scheduler. Messages wait for one that is being started again. Made inside
    a running event loop."""

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


class Starts:
    """The parts of a unit with what starts them. Made inside a running event loop, or before it.

    Args:
        serves: the models that have engines from the beginning; others of the unit may get them later.
        exits: return codes of processes that are not our children, as they are told.
        sizer: on GPUs, what makes pools of what was measured.
        on_model_parent: told model and pid of each process that loads a model to fork its engines.

    Raises:
        ValueError: on GPUs, without a sizer, or where a model has no engines from the beginning: what it needs of the
            GPUs could not be measured before the pools take the rest.
    """

    def __init__(
        self,
        unit_spec: UnitSpec,
        serves: Collection[str],
        launcher: Launcher,
        emit: Callable[[Event], None],
        exits: dict[int, int],
        sizer: PoolSizer | None = None,
        on_model_parent: Callable[[str, int], None] = lambda model, pid: None,
    ) -> None:
        if unit_spec.gpu is not None and sizer is None:
            raise ValueError("on GPUs the pools are sized by what is measured")
        self.unit_spec = unit_spec
        self.warm: WarmLink | None = None
        self.unit: UnitPeer | None = None
        # Which warm parent a part was forked from.
        self.parent_of: dict[PartId, WarmLink] = {}
        self.sized = asyncio.Event()
        self._launcher = launcher
        self._emit = emit
        self._exits = exits
        self._sizer = sizer
        self._on_model_parent = on_model_parent
        # As measured, or, of a model that has joined the unit and not been loaded yet, as estimated.
        self._needs: dict[tuple[str, int], Needs] = {}
        # Models that were started when the pools had been made: what they measure may be more than is left.
        self._late: set[str] = set()
        # Models that could not be started when the unit was: the others do not wait for them.
        self.left_out: set[str] = set()
        self._left_out = asyncio.Event()
        # Engines whose next start requests wait for.
        self.awaited: set[PartId] = set()
        self._looking = asyncio.Lock()
        self._store: FdStore | None = None
        # Of models on GPUs whose weights outlive who has loaded them; and what is kept of these in the host's memory,
        # by rank.
        self._weights: dict[str, list[WeightServer]] = {}
        self._copies: dict[str, dict[int, HostCopy]] = {}
        # What copied weights back last.
        self._copier: Process | None = None
        # Engines that stay while their models sleep.
        self.resting = RestingEngines(unit_spec.resting)
        # Model loading is mostly computing; more at once than this only makes each of them later.
        self._at_once = asyncio.Semaphore(2 * max(2, unit_spec.cores))
        models = [model.name for model in unit_spec.models if model.name in serves]
        for needs in sizer.sleeping if sizer is not None else ():
            self._needs[needs.model, needs.rank] = needs
        sleeping = {model for model, _ in self._needs}
        if unit_spec.gpu is not None and any(m.name not in models and m.name not in sleeping for m in unit_spec.models):
            raise ValueError("on GPUs a unit starts with all of its models that never sleep")
        self.parts: dict[PartId, Part] = {part.id: part for part in self._base()}
        for model in models:
            self.parts.update({part.id: part for part in self.parts_of(model)})

    @property
    def _under_mps(self) -> bool:
        return self.unit_spec.gpu is not None and self.unit_spec.gpu.sm_sharing != "off"

    @property
    def keepers_in_mps(self) -> bool:
        """Whether what keeps memory for the engines ends with the MPS server."""
        return self.unit_spec.gpu is not None and self.unit_spec.gpu.keepers_in_mps

    @property
    def restarts_mps(self) -> bool:
        """Whether the MPS server of this machine does not outlive a killed client unharmed."""
        return self._under_mps and self.unit_spec.gpu is not None and self.unit_spec.gpu.restart_mps

    async def _release(self, pid: int) -> None:
        """Take a process and its ranks off the GPUs."""
        await asyncio.to_thread(mps.terminate, self.unit_spec.mps_dir, {pid, *children(pid)})

    @property
    def holders(self) -> list[PartId]:
        """What holds weights on GPUs, of the models that are served."""
        return [part for part in self.parts if part.kind == "weights"]

    @property
    def engines(self) -> list[PartId]:
        """The engines of the models that are served."""
        return [part for part in self.parts if part.kind == "engine"]

    def leave_out(self, model: str) -> None:
        """The other models go on without this one, which is tried again and again."""
        self.left_out.add(model)
        self._left_out.set()

    async def until_up(self, part: Part) -> bool:
        """Until a part is up, or its model is left out; whether it is up."""
        up = asyncio.ensure_future(part.up.wait())
        try:
            while not up.done() and part.id.model not in self.left_out:
                self._left_out.clear()
                left_out = asyncio.ensure_future(self._left_out.wait())
                try:
                    await asyncio.wait({up, left_out}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    left_out.cancel()
            return part.up.is_set()
        finally:
            up.cancel()

    def runs(self, part: PartId) -> bool:
        """Whether its process runs."""
        process = self.parts[part].process
        return process is not None and process.running

    def _base(self) -> list[Part]:
        """What a unit has whatever it serves, in the order in which it comes up."""
        gpu = self.unit_spec.gpu
        memory = self._part(MEMORY, self._start_memory, self._until_sized)
        return [
            *([self._part(MPS, self._start_mps)] if self._under_mps else []),
            *([] if gpu else [memory]),
            self._part(WARM, self._start_warm, self._until_warm),
            *([memory] if gpu else []),
            self._part(UNIT, self._start_unit, self.sized.wait),
        ]

    def parts_of(self, model: str) -> list[Part]:
        """What serves one model: new parts, not yet among `parts`."""
        holders = [self._part(PartId("weights", model), self._start_forked, self._until_mps)]
        engines = [PartId("engine", model, phase) for phase in self.unit_spec.model(model).engines]
        return [
            *(holders if self.unit_spec.gpu else []),
            *(self._part(who, self._start_forked, self.sized.wait) for who in engines),
        ]

    def migrator(self) -> Part:
        """What moves requests to other units and takes theirs: a new part, not yet among `parts`. Nothing is lost while
        it is away, hence it is started again for ever."""
        part = self._part(MIGRATOR, self._start_migrator, self.sized.wait)
        part.policy = RestartPolicy(max_deaths=None, delays=PATIENT_DELAYS)
        return part

    def _part(
        self,
        who: PartId,
        start: Callable[[Part], Awaitable[None]],
        after: Callable[[], Awaitable[object]] | None = None,
    ) -> Part:
        clients = self._under_mps and who.kind in ("engine", "migrator")
        part = Part(who, start, _START_SECONDS[who.kind], after, self._release if clients else None)
        if who.model:
            # Other models serve on without it.
            part.policy = RestartPolicy(max_deaths=None)
        return part

    def open(self) -> None:
        """Make what needs a running event loop."""
        self.unit = UnitPeer(self.unit_spec.unit_address)
        if self.unit_spec.gpu is None:
            self.sized.set()
        else:
            # Needs the native module, which a host without GPUs can do without.
            from muxserve.memory.fd_store import FdStore

            self._store = FdStore()

    async def close(self) -> None:
        """Close all that is open to the parts; they end for it at the latest."""
        await self.drop_warm()
        if self.unit is not None:
            self.unit.close()
        self.forget_memory()
        for model in list(self._weights):
            self.forget_weights(model)
        for model in list(self._copies):
            self._forget_copies(model)

    async def drop_warm(self) -> None:
        """Forget the warm parent: whoever still waits to be forked by it is told that it died."""
        if self.warm is not None:
            await self.warm.close()
            self.warm = None

    def forget_memory(self) -> None:
        """Let go of the GPU memory that is kept for the next memory manager: nobody computes on it any more."""
        if self._store is not None:
            self._store.close()

    def forget_weights(self, model: str) -> None:
        """Let go of the weights that are kept of a model on GPUs: none of its engines runs any more. What is kept of
        them in the host's memory stays."""
        for rank, server in enumerate(self._weights.pop(model, [])):
            server.close()
            if server.copy is not None:
                self._copies.setdefault(model, {})[rank] = server.copy

    async def rest(self, model: str) -> bool:
        """Have the engines of `model` rest, which is put to sleep; whether they do. Else they run on as they are.

        They do if the weights are kept in the host's memory, from where they come back to the same places, and if there
        is room for them.
        """
        servers = self._weights.get(model, [])
        engines = [self.parts[part] for part in self.engines if part.model == model]
        processes = {each.id: each.process for each in engines if each.up.is_set() and each.process is not None}
        link = self.warm
        copied = bool(servers) and all(server.copy is not None for server in servers)
        if self._sizer is None or link is None or not copied or len(processes) < len(engines):
            return False
        size = self._sizer.resting([needs for (name, _), needs in self._needs.items() if name == model])
        if not await self.resting.make_room(size):
            return False
        try:
            async with asyncio.timeout(_REST_SECONDS):
                await asyncio.gather(*(while_running(process, link.rest(id)) for id, process in processes.items()))
        except (TimeoutError, PartDied, PartFailed) as error:
            reason = str(error) or "it takes too long"
            self._emit(Progress(PartId("weights", model), f"note: its engines end instead of resting: {reason}"))
            return False
        self.resting.add(model, size, processes)
        return True

    async def forget(self, model: str) -> None:
        """Let go of what is kept of a model that sleeps: engines that rest, and copies of its weights."""
        await self.resting.end(model)
        self._forget_copies(model)
        if self.warm is not None:
            self.warm.forget(model)

    def _forget_copies(self, model: str) -> None:
        for copy in self._copies.pop(model, {}).values():
            copy.close()

    def copied(self, model: str) -> bool:
        """Whether the host's memory has the weights of a model on GPUs that sleeps."""
        return len(self._copies.get(model, {})) == self.unit_spec.ranks

    def _source(self, model: str) -> WeightSource:
        """Where the weights of a model come from: the host's memory, or its files, of which a copy may be kept."""
        if self.copied(model):
            return "restore"
        sleeps = self._sizer is not None and any(needs.model == model for needs in self._sizer.sleeping)
        if not sleeps:
            return ""
        weights = sum(needs.weights_bytes for (name, _), needs in self._needs.items() if name == model)
        return "copy" if sum(self._kept().values()) + weights <= self.unit_spec.host_copies else ""

    def expect(self, estimated: Collection[Needs], asleep: bool) -> None:
        """What a model that joins the unit needs of its GPUs, before it has been measured. `asleep`: when it is
        woken."""
        for needs in estimated:
            self._needs[needs.model, needs.rank] = needs
        if asleep and self._sizer is not None:
            self._sizer.expect(estimated)

    async def admit(self, model: str) -> None:
        """Go on only if a model whose engines are about to be started has room. That is looked at again when it has
        been loaded and measured.

        Raises:
            GaveUp: see `check_room`.
        """
        until = time.monotonic() + _FREE_SECONDS
        while True:
            try:
                await self.check_room(model)
                break
            except GaveUp as failure:
                passing = isinstance(failure.__cause__, SizingError) and failure.__cause__.passing
                if not passing or time.monotonic() > until:
                    raise
            await asyncio.sleep(_FREE_LOOK_SECONDS)
        self._late.add(model)

    def gpu_memory(self) -> GpuMemory | None:
        """What is taken of the unit's GPUs, as measured or estimated; None on a CPU."""
        if self._sizer is None:
            return None
        there = {part.model for part in self.parts}
        used = self._sizer.used([each for each in self._needs.values() if each.model in there], self.unit_spec.pools)
        return replace(used, copies=self._kept(), resting=self.resting.models)

    def _kept(self) -> dict[str, int]:
        """Bytes of the host's memory for weights, by model."""
        asleep = {model: sum(copy.bytes for copy in each.values()) for model, each in self._copies.items()}
        there = ((model, [s.copy for s in each if s.copy is not None]) for model, each in self._weights.items())
        return asleep | {model: sum(copy.bytes for copy in copies) for model, copies in there if copies}

    async def _until_loaded(self, model: str) -> None:
        """A model's engines come after its weights."""
        holder = self.parts.get(PartId("weights", model))
        if holder is None:
            return
        await holder.up.wait()
        async with self._looking:  # once for both engines
            if model in self._late:
                await self.check_room(model, loaded=True)
                self._late.discard(model)

    async def check_room(self, model: str, loaded: bool = False) -> None:
        """Go on only if a model whose engines do not run fits beside what the unit's GPUs hold. On CPU nothing is
        looked at. `loaded`: its weights are on the GPUs.

        Raises:
            GaveUp: it does not fit, in words and numbers.
        """
        if self._sizer is None:
            return
        served = {part.model for part in self.engines} - {model}
        needs = list(self._needs.values())
        others, joining = ([each for each in needs if each.model in of] for of in (served, {model}))
        try:
            found = await asyncio.to_thread(nvml.machine)
            self._sizer.check_room(others, joining, self.unit_spec.pools, found, loaded)
        except SizingError as error:
            raise GaveUp(PartId("weights", model), str(error)) from error

    def _keep_weights(self, part: Part) -> asyncio.Future[str]:
        """Take what the process that loads the weights of a model will have kept; resolves when that is lost."""
        model = part.id.model
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[str] = loop.create_future()

        def resolve(reason: str) -> None:
            if not lost.done():
                lost.set_result(f"the weights are lost: {reason}")

        def on_lost(reason: str) -> None:
            loop.call_soon_threadsafe(resolve, reason)

        copies = self._copies.pop(model, {})
        self._weights[model] = [
            WeightServer(self.unit_spec.weights_socket(model, rank), on_lost=on_lost, copy=copies.get(rank))
            for rank in range(self.unit_spec.ranks)
        ]
        return lost

    # ------------------------------------------------------------ what parts wait for

    async def _until_mps(self) -> None:
        if MPS in self.parts:
            await self.parts[MPS].up.wait()

    async def _until_warm(self) -> None:
        await self._until_mps()
        await self._launcher.until_warm()

    async def _until_sized(self) -> None:
        """The memory manager comes after the sizing of the pools, which it is the first to need.

        Raises:
            GaveUp: the GPUs are too small.
        """
        await self._until_mps()
        if self.sized.is_set():
            return
        assert self._sizer is not None
        for holder in self.holders:
            await self.until_up(self.parts[holder])
        there = [holder.model for holder in self.holders if holder.model not in self.left_out]
        # What could not be loaded keeps the room that it is thought to need.
        self._needs.update({(each.model, each.rank): each for each in self._sizer.estimates(self.left_out)})
        wanted = [(model, rank) for model in (*there, *sorted(self.left_out)) for rank in range(self.unit_spec.ranks)]
        missing = [f"{model} on rank {rank}" for model, rank in wanted if (model, rank) not in self._needs]
        if missing:
            raise GaveUp(MEMORY, f"the weight holders did not say what they measured of {', '.join(missing)}")
        try:
            self.unit_spec, budgets = self._sizer.size([self._needs[who] for who in wanted])
        except SizingError as error:
            raise GaveUp(MEMORY, str(error)) from None
        left = min(budget.pool_bytes for budget in budgets)
        size = sum(pool.page_bytes * pool.num_pages for pool in self.unit_spec.pools)
        words = f"KV pool of {format_size(size)} on each GPU, where {format_size(left)} are left, as measured"
        self._emit(Progress(MEMORY, words))
        self.sized.set()

    # ------------------------------------------------------------ starting

    async def _start_mps(self, part: Part) -> None:
        self._emit(Starting(part.id))
        part.process, ready = self._launcher.mps()
        await while_running(part.process, ready)

    async def _start_memory(self, part: Part) -> None:
        self._emit(Starting(part.id))
        part.process, ready = self._launcher.memory_manager(self._store.open_child() if self._store else None)
        await while_running(part.process, ready)

    async def _start_unit(self, part: Part) -> None:
        self._emit(Starting(part.id))
        assert self.unit is not None
        part.process = self._launcher.unit_scheduler()
        await while_running(part.process, self.unit.state())

    async def _start_migrator(self, part: Part) -> None:
        await self._until_mps()
        await self.parts[MEMORY].up.wait()
        part.began = time.monotonic()
        self._emit(Starting(part.id))
        part.process = self._launcher.migrator()
        await while_running(part.process, until_reachable(self.unit_spec.migrator_address))

    async def _start_warm(self, part: Part) -> None:
        self._emit(Starting(part.id))
        await self.drop_warm()
        self.warm = WarmLink(
            WARM,
            self._on_progress,
            self._exits.__setitem__,
            self._on_measured,
            self._on_model_parent,
        )
        try:
            part.process = await self._launcher.warm_parent(self.warm.theirs.fileno())
        finally:
            self.warm.theirs.close()
        await while_running(part.process, self.warm.ready)

    async def _start_forked(self, part: Part) -> None:
        part.pause()
        await self._until_mps()
        await self.parts[WARM].up.wait()
        if part.id.kind == "engine":
            await self._until_loaded(part.id.model)
            await self.parts[MEMORY].up.wait()
        async with self._at_once:
            await self._fork(part)

    async def _fork(self, part: Part) -> None:
        await self.parts[WARM].up.wait()
        link = self.warm
        assert link is not None
        gpu = self.unit_spec.gpu
        exported = part.id.kind == "weights" and gpu is not None and gpu.exports_weights
        source: WeightSource = ""
        lost = None
        if exported:
            self.forget_weights(part.id.model)
            source = self._source(part.id.model)
            if source != "restore":
                # Weights that are loaded anew may lie elsewhere than engines which rest would have them.
                await self.resting.end(part.id.model)
            lost = self._keep_weights(part)
        part.resume()
        part.began = time.monotonic()
        self._emit(Starting(part.id))
        awaited = {"awaited": "yes"} if part.id in self.awaited else {}
        self.awaited.discard(part.id)
        rested = self.resting.take(part.id)
        # Weights are copied by a process that other models need, too.
        part.lent = source == "restore"
        known = self._copier if part.lent else rested
        limit = _RESTORE_SECONDS if part.lent else _REST_SECONDS if rested else None
        birth = link.order(part.id, (), **awaited, **({"weights": source} if source else {}))
        self.parent_of[part.id] = link
        try:
            pid = await birth.forked
            try:
                part.process = known if known is not None and known.pid == pid and known.running else Process(pid)
            except ProcessLookupError:
                raise PartDied(exit_words(self._exits.get(pid))) from None
            if part.lent:
                self._copier = part.process
            self._exits.pop(pid, None)  # of an earlier process with that pid
            async with asyncio.timeout(limit):
                kept = await while_running(part.process, asyncio.shield(birth.up))
        except TimeoutError:
            if limit is None:
                raise
            raise PartDied(f"not ready after {limit:.0f} s") from None
        except (PartDied, PartFailed) as failure:
            # It may have said why just before it ended.
            await asyncio.wait([birth.up], timeout=_LAST_WORDS_SECONDS)
            said = birth.up.exception() if birth.up.done() else None
            blameless = isinstance(failure, PartDied) and failure.blameless
            if source == "restore" and not blameless:
                # The copy may be to blame: the next try loads the model.
                self.forget_weights(part.id.model)
                self._forget_copies(part.id.model)
                raise PartDied(f"its weights cannot be copied back: {said or failure}") from None
            if rested and not blameless:
                # The next one is started from nothing.
                raise PartDied(f"it cannot come back from its rest: {said or failure}") from None
            raise said or failure from None
        if source == "copy":
            link.pin(part.id.model)
        if part.lent:
            part.left = lost
        elif kept and lost is not None:
            # Its contexts leave the GPUs, before the pools take the rest.
            ranks = [Process(pid) for pid in children(part.process.pid)]
            await part.stop(STOP_SECONDS)
            for rank in ranks:
                rank.send(signal.SIGKILL)
                await rank.wait()
            part.left = lost

    def _on_progress(self, of: PartId, detail: str) -> None:
        # A holder waits for those before it, however long they take.
        part = self.parts.get(of)
        if part is not None and of.kind == "weights":
            (part.pause if detail == WAITING else part.resume)()
        self._emit(Progress(of, detail))

    def _on_measured(self, needs: Needs) -> None:
        self._needs[needs.model, needs.rank] = needs
