"""How the parts of a unit on GPUs come up: the MPS server before the warm parent; the weight holders of all models from
it; from what they measured, the size of the pools; and only then everything that reads it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from muxserve.cluster.effects import UnitEffects
from muxserve.cluster.events import PartId, Progress, Starting
from muxserve.cluster.launcher import Launcher
from muxserve.cluster.processes import Process, children
from muxserve.cluster.sleeping import HeldWeights, RestingEngines
from muxserve.cluster.starts import MEMORY, MPS, UNIT, WARM, UnitStarts
from muxserve.cluster.supervision import STOP_SECONDS, GaveUp, Part, PartDied, PartFailed, while_running
from muxserve.gpu import mps, nvml
from muxserve.gpu.budget import WAITING, Needs
from muxserve.gpu.unit import GpuMemory, PoolSizer, SizingError
from muxserve.spec import GpuSpec, UnitSpec
from placement.format import format_size

if TYPE_CHECKING:
    from muxserve.memory.fd_store import FdStore

# What the process that fills a model's weights in does: reads its files, keeps a copy of what came of them, or copies
# that back.
WeightSource = Literal["", "copy", "restore"]
# Engines let go of the weights, or map them again, in milliseconds; so long at most, before they end. The weights are
# copied in seconds, those of several models one after the other.
_REST_SECONDS = 30.0
_RESTORE_SECONDS = 180.0
# What a process had on a GPU is free some time after its end; so long, and so often, is looked.
_FREE_SECONDS, _FREE_LOOK_SECONDS = 5.0, 0.1


class GpuStarts(UnitStarts):
    """See `UnitStarts`.

    Args:
        models: those that are wanted from the beginning. The others start, too, unless they sleep until memory wakes
            them: what they need of the GPUs is measured before the pools take what is left.
        sizer: makes pools of what was measured.
    """

    def __init__(
        self,
        unit_spec: UnitSpec,
        models: Collection[str],
        launcher: Launcher,
        effects: UnitEffects,
        exits: dict[int, int],
        sizer: PoolSizer,
    ) -> None:
        asleep = {needs.model for needs in sizer.sleeping}
        first = [each.name for each in unit_spec.models if each.name in models or each.name not in asleep]
        super().__init__(unit_spec, first, launcher, effects, exits)
        self._sizer = sizer
        # As measured, or, of a model that has joined the unit and not been loaded yet, as estimated.
        self._needs = {(needs.model, needs.rank): needs for needs in sizer.sleeping}
        # Models that were started when the pools had been made: what they measure may be more than is left.
        self._late: set[str] = set()
        self._looking = asyncio.Lock()
        self._store: FdStore | None = None
        self._weights = HeldWeights(unit_spec.ranks)
        # What copied weights back last.
        self._copier: Process | None = None
        # Engines that stay while their models sleep.
        self._resting = RestingEngines(unit_spec.resting)

    # ------------------------------------------------------------ the parts

    @property
    def _gpu(self) -> GpuSpec:
        assert self.unit_spec.gpu is not None
        return self.unit_spec.gpu

    @property
    def _under_mps(self) -> bool:
        return self._gpu.sm_sharing != "off"

    @property
    def keepers_in_mps(self) -> bool:
        """See `UnitStarts.keepers_in_mps`."""
        return self._gpu.keepers_in_mps

    @property
    def restarts_mps(self) -> bool:
        """See `UnitStarts.restarts_mps`."""
        return self._under_mps and self._gpu.restart_mps

    def _base(self) -> Sequence[PartId]:
        return *([MPS] if self._under_mps else []), WARM, MEMORY, UNIT

    def parts_of(self, model: str) -> list[Part]:
        """See `UnitStarts.parts_of`."""
        return [self._part(PartId("weights", model)), *super().parts_of(model)]

    def _part(self, who: PartId) -> Part:
        part = super()._part(who)
        part.releases = self._under_mps and who.kind in ("engine", "migrator")
        return part

    # ------------------------------------------------------------ life

    def open(self) -> None:
        """See `UnitStarts.open`."""
        super().open()
        # Needs the native module, which a host without GPUs can do without.
        from muxserve.memory.fd_store import FdStore

        self._store = FdStore()

    async def close(self) -> None:
        """See `UnitStarts.close`."""
        await super().close()
        self.forget_memory()
        self._weights.close()

    def change(self, unit_spec: UnitSpec) -> None:
        """See `UnitStarts.change`."""
        super().change(unit_spec)
        self._resting.change(unit_spec.resting)

    def forget_memory(self) -> None:
        """See `UnitStarts.forget_memory`."""
        if self._store is not None:
            self._store.close()

    # ------------------------------------------------------------ room

    def gpu_memory(self) -> GpuMemory | None:
        """See `UnitStarts.gpu_memory`."""
        there = {part.model for part in self.parts}
        used = self._sizer.used([each for each in self._needs.values() if each.model in there], self.unit_spec.pools)
        return replace(used, copies=self._weights.copied_bytes(), resting=self._resting.models)

    def expect(self, estimated: Collection[Needs], asleep: bool) -> None:
        """See `UnitStarts.expect`."""
        for needs in estimated:
            self._needs[needs.model, needs.rank] = needs
        if asleep:
            self._sizer.expect(estimated)

    async def admit(self, model: str) -> None:
        """See `UnitStarts.admit`."""
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

    async def check_room(self, model: str, loaded: bool = False) -> None:
        """See `UnitStarts.check_room`."""
        served = {part.model for part in self.engines} - {model}
        needs = list(self._needs.values())
        others, joining = ([each for each in needs if each.model in of] for of in (served, {model}))
        try:
            found = await asyncio.to_thread(nvml.machine)
            self._sizer.check_room(others, joining, self.unit_spec.pools, found, loaded)
        except SizingError as error:
            raise GaveUp(PartId("weights", model), str(error)) from error

    # ------------------------------------------------------------ models that sleep

    async def rest(self, model: str) -> bool:
        """See `UnitStarts.rest`.

        They do if the weights are kept in the host's memory, from where they come back to the same places, and if there
        is room for them.
        """
        engines = [self.parts[part] for part in self.engines if part.model == model]
        processes = {each.id: each.process for each in engines if each.up.is_set() and each.process is not None}
        link = self.warm
        if link is None or not self._weights.has_copies(model) or len(processes) < len(engines):
            return False
        size = self._sizer.resting([needs for (name, _), needs in self._needs.items() if name == model])
        if not await self._resting.make_room(size):
            return False
        try:
            async with asyncio.timeout(_REST_SECONDS):
                await asyncio.gather(*(while_running(process, link.rest(id)) for id, process in processes.items()))
        except (TimeoutError, PartDied, PartFailed) as error:
            reason = str(error) or "it takes too long"
            words = f"note: its engines end instead of resting: {reason}"
            self._effects.emit(Progress(PartId("weights", model), words))
            return False
        self._resting.add(model, size, processes)
        return True

    async def end_resting(self) -> None:
        """See `UnitStarts.end_resting`."""
        await self._resting.end_all()

    async def forget(self, model: str) -> None:
        """Let go of what is kept of a model that sleeps: engines that rest, and copies of its weights."""
        await self._resting.end(model)
        self._weights.forget_copies(model)
        if self.warm is not None:
            self.warm.tell("forget", model)

    async def forget_weights(self, model: str) -> None:
        """See `UnitStarts.forget_weights`."""
        self._weights.let_go(model)

    def _source(self, model: str) -> WeightSource:
        """Where the weights of a model come from: the host's memory, or its files, of which a copy may be kept."""
        if self._weights.copied(model):
            return "restore"
        if all(needs.model != model for needs in self._sizer.sleeping):
            return ""
        weights = sum(needs.weights_bytes for (name, _), needs in self._needs.items() if name == model)
        return "copy" if sum(self._weights.copied_bytes().values()) + weights <= self.unit_spec.host_copies else ""

    # ------------------------------------------------------------ what parts wait for

    async def before_start(self, part: Part) -> None:
        """See `Starter.before_start`."""
        match part.id.kind:
            case "weights" | "warm_parent":
                await self._until_mps()
            case "memory":
                await self._until_sized()
        await super().before_start(part)

    async def _until_mps(self) -> None:
        if MPS in self.parts:
            await self.parts[MPS].up.wait()

    async def _until_sized(self) -> None:
        """The memory manager comes after the sizing of the pools, which it is the first to need.

        Raises:
            GaveUp: the GPUs are too small.
        """
        await self._until_mps()
        if self.sized.is_set():
            return
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
        self._effects.emit(Progress(MEMORY, words))
        self.sized.set()

    async def _until_forkable(self, part: Part) -> None:
        await self._until_mps()
        await self.parts[WARM].up.wait()
        if part.id.kind == "engine":
            await self._until_loaded(part.id.model)
            await self.parts[MEMORY].up.wait()

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

    # ------------------------------------------------------------ starting

    async def start(self, part: Part) -> None:
        """See `Starter.start`."""
        if part.id == MPS:
            await self._start_mps(part)
        else:
            await super().start(part)

    async def release(self, pid: int) -> None:
        """Take a process and its ranks off the GPUs."""
        await asyncio.to_thread(mps.terminate, self.unit_spec.mps_dir, {pid, *children(pid)})

    async def _start_mps(self, part: Part) -> None:
        self._effects.emit(Starting(part.id))
        part.process, ready = self._launcher.mps()
        await while_running(part.process, ready)

    def _memory_manager(self) -> tuple[Process, Awaitable[None]]:
        assert self._store is not None
        return self._launcher.memory_manager(self._store.open_child())

    async def _start_migrator(self, part: Part) -> None:
        await self._until_mps()
        await super()._start_migrator(part)

    async def _fork(self, part: Part) -> None:
        link = await self._until_warm()
        model = part.id.model
        source: WeightSource = ""
        lost = None
        if part.id.kind == "weights" and self._gpu.exports_weights:
            self._weights.let_go(model)
            source = self._source(model)
            if source != "restore":
                # Weights that are loaded anew may lie elsewhere than engines which rest would have them.
                await self._resting.end(model)
            sockets = [self.unit_spec.weights_socket(model, rank) for rank in range(self.unit_spec.ranks)]
            lost = self._weights.keep(model, sockets)
        rested = self._resting.take(part.id)
        # Weights are copied by a process that other models need, too.
        part.lent = source == "restore"
        limit = _RESTORE_SECONDS if part.lent else _REST_SECONDS if rested else None
        birth = self._order(part, link, **({"weights": source} if source else {}))
        try:
            process = part.process = await birth.process(self._exits, self._copier if part.lent else rested)
            if part.lent:
                self._copier = process
            async with asyncio.timeout(limit):
                kept = await birth.until_up(process)
        except TimeoutError:
            if limit is None:
                raise
            raise PartDied(f"not ready after {limit:.0f} s") from None
        except (PartDied, PartFailed) as failure:
            blameless = isinstance(failure, PartDied) and failure.blameless
            if source == "restore" and not blameless:
                # The copy may be to blame: the next try loads the model.
                self._weights.let_go(model)
                self._weights.forget_copies(model)
                raise PartDied(f"its weights cannot be copied back: {failure}") from None
            if rested and not blameless:
                # The next one is started from nothing.
                raise PartDied(f"it cannot come back from its rest: {failure}") from None
            raise
        if source == "copy":
            link.tell("pin", model)
        if part.lent:
            part.left = lost
        elif kept and lost is not None:
            # Its contexts leave the GPUs, before the pools take what is left.
            ranks = [Process(pid) for pid in children(process.pid)]
            await part.stop(STOP_SECONDS)
            for rank in ranks:
                rank.send(signal.SIGKILL)
                await rank.wait()
            part.left = lost

    # ------------------------------------------------------------ what the warm parent says

    def on_progress(self, part: PartId, detail: str) -> None:
        """See `ParentEvents.on_progress`."""
        # A holder waits for those before it, however long they take.
        holder = self.parts.get(part)
        if holder is not None and part.kind == "weights":
            (holder.pause if detail == WAITING else holder.resume)()
        super().on_progress(part, detail)

    def on_measured(self, needs: Needs) -> None:
        """See `ParentEvents.on_measured`."""
        self._needs[needs.model, needs.rank] = needs
