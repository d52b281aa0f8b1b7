"""Runs the measurements of a fleet and keeps the profile file up to date, cell by cell."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.latency import EngineShape
from muxserve.costs.profile import (
    DecodeCell,
    EngineProfile,
    Overheads,
    PrefillCell,
    Profile,
    ProfiledModel,
    save_profile,
)
from muxserve.memory.client import MemoryClient
from muxserve.profiling.contention import Sample, step_seconds
from muxserve.profiling.family import Family
from muxserve.profiling.grid import DECODE_STEPS, Grid, ModelGrid, grid_for
from muxserve.profiling.jobs import Bench, Bodies, Timing
from muxserve.profiling.player import Player
from muxserve.spec import ModelSpec, UnitSpec

DEVICE = "CPU"
# A cell is measured until it has been measured often or for long enough.
_FEWEST, _MOST, _ENOUGH_SECONDS = 3, 15, 0.5
_WARM_STEPS, _LEASE_STEPS = 2, 8


@dataclass(frozen=True)
class Scope:
    """What is measured: with which numbers of threads per engine, and which steps."""

    threads: Sequence[int]
    grid: Grid


@dataclass
class Session:
    """What is measured, and where to.

    `samples` are all steps measured so far.

    Args:
        unit_spec: of the whole fleet; threads and quotas are set for each measurement.
        architectures: of its models, in their order.
        scope: what is measured.
        profile: what is known already; cells that are in it are not measured again.
        path: where it is written after every cell.
        progress: called with what happens in words; `advanced` with the number of cells just done.
    """

    unit_spec: UnitSpec
    architectures: Sequence[ModelArchitecture]
    scope: Scope
    profile: Profile
    path: Path
    progress: Callable[[str], None]
    advanced: Callable[[int], None]
    turns: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    # ------------------------------------------------------------ what is to be done

    @property
    def models(self) -> list[tuple[ModelSpec, ModelArchitecture]]:
        """The models whose steps can differ: one of each shape and dtype."""
        seen = set()
        found = []
        for model, architecture in zip(self.unit_spec.models, self.architectures, strict=True):
            key = (ProfiledModel.of(architecture), model.dtype)
            if key not in seen:
                seen.add(key)
                found.append((model, architecture))
        return found

    def grid_of(self, model: ModelSpec) -> ModelGrid:
        """Its cells, when it has nearly all pages."""
        return grid_for(self.scope.grid, model, self._quotas([model.name])[model.name])

    def engine(self, model: ModelSpec, architecture: ModelArchitecture, threads: int) -> EngineProfile:
        """The part of the profile that its cells go to."""
        where = EngineShape(DEVICE, 1, self.share(threads), model.dtype)
        shape = ProfiledModel.of(architecture)
        found = self.profile.find(shape, where)
        if found is None:
            found = EngineProfile(model.name, shape, DEVICE, model.dtype, 1, where.share, [], [])
            self.profile.engines.append(found)
        return found

    def share(self, threads: int) -> float:
        """The part of the cores that `threads` threads have."""
        return round(min(1.0, threads / self.unit_spec.cores), 4)

    def outstanding(self, threads: int) -> int:
        """Cells that are not measured yet with this number of threads."""
        count = 0
        for model, architecture in self.models:
            engine = self.engine(model, architecture, threads)
            grid = self.grid_of(model)
            known = {cell.place for cell in engine.prefill}
            count += sum((sequences, tokens, 0) not in known for sequences, tokens in grid.prefill)
            count += sum(place not in known for place in _chunk_places(grid))
            measured = {cell.place for cell in engine.decode}
            count += sum((batch, c) not in measured for c, batches in grid.decode for batch in batches)
        return count

    # ------------------------------------------------------------ doing it

    async def run(self) -> None:
        """Measure everything that is outstanding.

        Raises:
            StartError: engines did not start, or ended.
        """
        for threads in self.scope.threads:
            if self.outstanding(threads):
                await self._run(threads)
        self.save()

    def save(self) -> None:
        """Write the profile."""
        save_profile(self.profile, self.path)

    async def _run(self, threads: int) -> None:
        share = self.share(threads)
        models = [
            msgspec.structs.replace(m, threads=threads, prefill_share=share, decode_share=share)
            for m in self.unit_spec.models
            if any(m.name == wanted.name for wanted, _ in self.models)
        ]
        unit_spec = msgspec.structs.replace(self.unit_spec, models=models)
        self.progress(f"starting {2 * len(models)} engines with {threads} thread{'s' if threads > 1 else ''} each")
        async with Bodies() as bodies, Player(unit_spec) as player, Family(unit_spec, self.progress) as family:
            await player.greeted()
            memory = MemoryClient(unit_spec.memory_socket, "profile")
            try:
                benches = [
                    Bench(player, memory, bodies, unit_spec.model(model.name), architecture.vocab)
                    for model, architecture in self.models
                ]
                await _unless(family.died(), self._measure(threads, benches, memory))
            finally:
                memory.close()

    async def _measure(self, threads: int, benches: list[Bench], memory: MemoryClient) -> None:
        for bench, (model, architecture) in zip(benches, self.models, strict=True):
            memory.set_quotas(self._quotas([model.name]))
            engine = self.engine(model, architecture, threads)
            grid = self.grid_of(model)
            await self._prefill_cells(bench, engine, grid)
            await self._chunked_cells(bench, engine, grid)
            for context, batches in grid.decode:
                await self._decode_cells(bench, engine, context, batches)

    async def _prefill_cells(self, bench: Bench, engine: EngineProfile, grid: ModelGrid) -> None:
        known = {cell.place for cell in engine.prefill}
        for sequences, tokens in grid.prefill:
            if (sequences, tokens, 0) in known:
                continue
            self.progress(f"{engine}: prefill {sequences} x {tokens} tokens")
            await bench.prefill_step(sequences, tokens, Timing())
            timing = Timing()
            began = time.monotonic()
            while not _enough(len(timing.steps), began):
                await bench.prefill_step(sequences, tokens, timing)
            self.turns += timing.turns
            self.samples += timing.steps
            engine.prefill.append(PrefillCell(sequences, tokens, 0, step_seconds(timing.steps), len(timing.steps)))
            self._done(1)

    async def _chunked_cells(self, bench: Bench, engine: EngineProfile, grid: ModelGrid) -> None:
        missing = set(_chunk_places(grid)) - {cell.place for cell in engine.prefill}
        if not missing or grid.chunked is None:
            return
        tokens, chunks = grid.chunked.tokens, grid.chunked.chunks
        self.progress(f"{engine}: prefill of {tokens * chunks} tokens in {chunks} chunks")
        runs: list[list[Sample]] = []
        began = time.monotonic()
        while not _enough(len(runs), began):
            runs.append(await bench.prefill_chunks(tokens, chunks))
        for place in sorted(missing):
            steps = [run[place[2] // tokens] for run in runs]
            self.samples += steps
            engine.prefill.append(PrefillCell(*place, seconds=step_seconds(steps), samples=len(steps)))
        self._done(len(missing))

    async def _decode_cells(self, bench: Bench, engine: EngineProfile, context: int, batches: Iterable[int]) -> None:
        known = {cell.place for cell in engine.decode}
        for batch in batches:
            if (batch, context) in known:
                continue
            self.progress(f"{engine}: decode {batch} x {context} tokens")
            # The sequences grow while they are measured: half of it before they are as long as they should be.
            ids = await bench.fill(batch, max(1, context - DECODE_STEPS // 2))
            await bench.decode_steps(_WARM_STEPS, batch, Timing())
            timing = Timing()
            began, steps = time.monotonic(), _WARM_STEPS
            while steps + _LEASE_STEPS <= DECODE_STEPS and not _enough(len(timing.steps), began):
                await bench.decode_steps(_LEASE_STEPS, batch, timing)
                steps += _LEASE_STEPS
            await bench.empty(ids)
            self.turns += timing.turns
            self.gaps += timing.gaps
            self.samples += timing.steps
            engine.decode.append(DecodeCell(batch, context, step_seconds(timing.steps), len(timing.steps)))
            self._done(1)

    # ------------------------------------------------------------ details

    def _done(self, cells: int) -> None:
        known = self.profile.overheads.get(DEVICE, Overheads())
        turn = median(self.turns) if self.turns else known.turn
        between = median(self.gaps) if self.gaps else known.between
        self.profile.overheads[DEVICE] = msgspec.structs.replace(known, turn=turn, between=between)
        self.save()
        self.advanced(cells)

    def _quotas(self, names: Sequence[str]) -> dict[str, int]:
        """Nearly all pages for the models that are measured, and what is left for the others."""
        quotas = {}
        for pool in self.unit_spec.pools:
            inside = [m for m in self.unit_spec.models if m.pool == pool.name]
            wanted = [m for m in inside if m.name in names]
            others = [m for m in inside if m.name not in names and any(m.name == w.name for w, _ in self.models)]
            quotas.update({m.name: m.pages_per_block for m in others})
            left = pool.num_pages - 1 - sum(quotas[m.name] for m in others)
            quotas.update({m.name: left // max(1, len(wanted)) for m in wanted})
        return quotas


def _enough(samples: int, began: float) -> bool:
    return samples >= _MOST or (samples >= _FEWEST and time.monotonic() - began > _ENOUGH_SECONDS)


def _chunk_places(grid: ModelGrid) -> list[tuple[int, int, int]]:
    if grid.chunked is None:
        return []
    tokens = grid.chunked.tokens
    return [(1, tokens, i * tokens) for i in range(1, grid.chunked.chunks)]


async def _unless(ends: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, unless `ends` raises first."""
    watching, working = asyncio.ensure_future(ends), asyncio.ensure_future(work)
    try:
        await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
        (watching if watching.done() else working).result()
    finally:
        for task in (watching, working):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
