"""One fleet after the other, one fault after the other: strike, wait for recovery, let all end, look what is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.fleet import START_SECONDS, Fleet, running
from tests.soak.confined import SHARED_MEMORY, Confined
from tests.soak.load import Background, Questions, Tally
from tests.soak.parts import Held, Part, as_json, census, how_many, parts
from tests.soak.report import Step, again
from tests.soak.schedule import chosen, kind_of, possible, random_of
from tests.soak.topologies import Topology
from tests.soak.world import Kind, Struck, World
from tests.support.patience import PATIENCE

_STRIKE_SECONDS = 3 * PATIENCE
# Without an import of vLLM, for which some parts have to wait: that may take as long as a start.
_RECOVERY_SECONDS = 2 * PATIENCE
# A process of a kind may have so many more than at first; what grows without bound goes beyond.
_MORE_THREADS, _MORE_DESCRIPTORS = 16, 64
# A fleet that ends by itself is started again so often.
_STARTS = 6
# Among the temporary files: torch's own.
_CACHE = "torchinductor_"


@dataclass
class Soaked:
    """What was found in one topology."""

    name: str
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    starts: int = 0
    first: dict[str, Held] = field(default_factory=dict)
    last: dict[str, Held] = field(default_factory=dict)
    most: dict[str, Held] = field(default_factory=dict)
    pss_mib: list[tuple[float, float]] = field(default_factory=list)
    stops: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds),
            "starts": self.starts,
            "stops": self.stops,
            "pss_mib": [[round(at - self.began), round(mib)] for at, mib in self.pss_mib],
            "parts": {name: as_json(getattr(self, name)) for name in ("first", "last", "most")},
        }


class Soak:
    """Soaks topologies; `steps` and `soaked` grow meanwhile."""

    def __init__(
        self,
        place: Confined,
        reference: dict[str, list[dict[str, Any]]],
        only: str,
        seed: int,
        out: Path,
        clients: int,
    ) -> None:
        self.steps: list[Step] = []
        self.soaked: dict[str, Soaked] = {}
        self._place = place
        self._reference = reference
        self._only = only
        self._kinds = chosen(only)
        self._seed = seed
        self._out = out
        self._clients = clients

    async def topology(self, topology: Topology, seconds: float, first_step: int, most_steps: int | None) -> None:
        """Soak one for so long; a fleet that ends by itself is a failure, and started again."""
        soaked = self.soaked.setdefault(topology.name, Soaked(topology.name))
        began = time.monotonic()
        end, step = began + seconds, first_step
        last = None if most_steps is None else first_step + most_steps
        try:
            for _ in range(_STARTS):
                if time.monotonic() >= end or (last is not None and step >= last):
                    break
                step = await self._fleet(topology, soaked, end, step, last)
                if not soaked.stops[-1]["served"]:
                    break
        finally:
            soaked.seconds += time.monotonic() - began

    async def _fleet(self, topology: Topology, soaked: Soaked, end: float, step: int, last: int | None) -> int:
        """One fleet from its start to its stop; returns the number of the next step."""
        directory = self._out / f"{topology.name}-{soaked.starts}"
        directory.mkdir(parents=True, exist_ok=True)
        soaked.starts += 1
        stop: dict[str, Any] = {"served": False}
        soaked.stops.append(stop)
        stopping = time.monotonic()
        try:
            with running(topology.write(directory)) as fleet:
                print(f"-- {topology.name} serves at {fleet.url}", flush=True)
                stop["served"] = True
                try:
                    step = await self._strike_on(topology, soaked, fleet, end, step, last)
                except BaseException:
                    self._keep_logs(directory)
                    raise
                stopping = time.monotonic()
                stop["ended_by_itself"] = fleet.process.poll()
            stop["exit"] = 0
        except AssertionError as error:
            stop["exit"] = str(error)
            self._stop_failed(topology, step, f"the fleet did not stop as it should: {error}")
        stop["seconds"] = round(time.monotonic() - stopping, 1)
        stop |= self._left_behind(topology, step)
        return step

    async def _strike_on(
        self, topology: Topology, soaked: Soaked, fleet: Fleet, end: float, number: int, last: int | None
    ) -> int:
        questions = Questions(topology.models, self._reference)
        rng = random_of(self._seed, topology.name, -1 - soaked.starts)
        async with Background(fleet, questions, rng, self._clients) as load:
            load.resume()
            await load.until_busy()
            whole = await self._settled(fleet, topology)
            await load.quiesce()
            kinds = possible(self._kinds, whole + Counter(topology.changing))
            if not kinds:
                raise SystemExit(f"{topology.name} has no part that these faults concern")
            if not soaked.first:
                soaked.first = census(parts(fleet))
            while time.monotonic() < end and (last is None or number < last):
                kind = kind_of(kinds, self._seed, topology.name, number)
                step = Step(topology.name, number, kind.name)
                self.steps.append(step)
                world = World(
                    topology, fleet, self._place, questions, load, random_of(self._seed, topology.name, number)
                )
                await self._step(step, kind, world, whole, soaked)
                self._tell(step)
                number += 1
                if fleet.process.poll() is not None:
                    break
                if step.failures:
                    self._keep_logs(self._out / f"{topology.name}-{soaked.starts - 1}" / f"step-{step.number}")
        return number

    async def _step(self, step: Step, kind: Kind, world: World, whole: Counter[str], soaked: Soaked) -> None:
        fleet, load = world.fleet, world.load
        began = time.monotonic()
        load.tally, world.tally = step.load, step.own
        load.resume()
        await load.until_busy()
        load.breakable = kind.breaks_streams
        try:
            async with asyncio.timeout(_STRIKE_SECONDS):
                struck = await kind.strike(world)
        except (TimeoutError, LookupError, OSError, psutil.Error) as error:
            struck = Struck(f"could not be done: {error!r}", faults=[f"the fault could not be made: {error!r}"])
        since = struck.since or time.monotonic()
        step.what, step.faults = struck.what, struck.faults
        recovered = await self._recovered(world, struck, whole, step)
        if recovered is not None:
            step.recovery_seconds = max(0.0, recovered - since)
        # What began meanwhile has ended one way or the other before it is counted.
        await load.quiesce()
        load.breakable = False
        load.tally = Tally()
        if fleet.process.poll() is None:
            await asyncio.to_thread(self._check, world, struck, step, soaked)
        else:
            step.faults.append(f"the fleet ended by itself with status {fleet.process.returncode}")
        step.seconds = time.monotonic() - began

    async def _settled(self, fleet: Fleet, topology: Topology) -> Counter[str]:
        """The parts of a fleet that is whole: as many for two seconds."""
        seen, since = how_many(parts(fleet), topology.changing), time.monotonic()
        async with asyncio.timeout(PATIENCE):
            while time.monotonic() - since < 2.0 or (await self._status(fleet))[0] != "ok":
                await asyncio.sleep(0.2)
                if (now := how_many(parts(fleet), topology.changing)) != seen:
                    seen, since = now, time.monotonic()
        return seen

    async def _recovered(self, world: World, struck: Struck, whole: Counter[str], step: Step) -> float | None:
        """When all parts were there again and `/health` said so, twice in a row, by the monotonic clock."""
        fleet, changing = world.fleet, world.topology.changing
        began = time.monotonic()
        deadline = began + _RECOVERY_SECONDS
        first: float | None = None
        words = ""
        while time.monotonic() < deadline and fleet.process.poll() is None:
            now = how_many(parts(fleet), changing)
            there = [str(part) for part in struck.gone if _alive_or_stopped(part)]
            status, said = await self._status(fleet)
            imported = _imported(self._log(step.topology))
            if not imported:
                deadline = min(time.monotonic(), began + START_SECONDS) + _RECOVERY_SECONDS
            if status == "ok" and now == whole and not there and imported:
                if first is not None:
                    return first
                first = time.monotonic()
            else:
                first = None
                missing = {kind: f"{now[kind]} of {whole[kind]}" for kind in now | whole if now[kind] != whole[kind]}
                words = f"/health: {said}; parts: {missing or 'all'}; still there: {there or 'none'}; "
                words += "vLLM is imported" if imported else "vLLM is not imported"
            await asyncio.sleep(0.1)
        if fleet.process.poll() is None:
            step.faults.append(f"not whole again within {time.monotonic() - began:.0f} s: {words}"[:800])
            for part in struck.gone:  # the soak goes on
                with contextlib.suppress(psutil.NoSuchProcess):
                    part.process.kill()
        return None

    async def _status(self, fleet: Fleet) -> tuple[str, str]:
        try:
            async with httpx.AsyncClient(verify=False, timeout=5) as client:
                answer = await client.get(f"{fleet.url}/health")
            return str(answer.json().get("status")), answer.text[:300]
        except (httpx.HTTPError, ValueError) as error:
            return "none", repr(error)

    def _check(self, world: World, struck: Struck, step: Step, soaked: Soaked) -> None:
        """Nothing is left of the requests, and nothing grows."""
        fleet = world.fleet
        try:
            fleet.wait_pages_free()
        except Exception as error:
            step.faults.append(f"pages stay owned: {error}; {_owned(fleet)}")
        for part in struck.untouched:
            if not part.alive and part.kind not in world.topology.changing:
                step.faults.append(f"{part} has ended, for nothing")
        now = census(parts(fleet))
        soaked.last = now
        soaked.pss_mib.append((time.monotonic(), sum(held.pss_mib for held in now.values())))
        for kind, held in now.items():
            first, most = soaked.first.setdefault(kind, held), soaked.most.setdefault(kind, Held())
            for name in ("processes", "threads", "descriptors", "pss_mib"):
                setattr(most, name, max(getattr(most, name), getattr(held, name)))
            for name, more in (("threads", _MORE_THREADS), ("descriptors", _MORE_DESCRIPTORS)):
                if getattr(held, name) > getattr(first, name) + more:
                    step.faults.append(f"{kind}: {getattr(held, name)} {name}, at first {getattr(first, name)}")

    def _left_behind(self, topology: Topology, step: int) -> dict[str, Any]:
        """What a stopped fleet has left, which is then removed."""
        processes = self._place.strangers()
        left = {
            "processes": [f"{process.pid} {' '.join(process.cmdline())[:80]}" for process in processes],
            "shared_memory": sorted(path.name for path in SHARED_MEMORY.iterdir()),
            "run_directories": sorted(str(path) for path in self._place.run.glob("muxserve/*")),
            "temporary_files": sorted(
                path.name for path in self._place.temporary.iterdir() if not path.name.startswith(_CACHE)
            ),
        }
        found = {what: names for what, names in left.items() if names}
        if found:
            self._stop_failed(topology, step, f"left behind: {found}")
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for path in (*SHARED_MEMORY.iterdir(), *self._place.run.glob("muxserve/*"), *self._place.temporary.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return {"left": found}

    def _stop_failed(self, topology: Topology, step: int, words: str) -> None:
        failed = Step(topology.name, step, "stop", what="stopped the fleet", faults=[words[:2000]])
        self.steps.append(failed)
        self._tell(failed)

    def _log(self, topology: str) -> Path:
        """What `deploy` says of the fleet that runs now."""
        return self._out / f"{topology}-{self.soaked[topology].starts - 1}" / "deploy.log"

    def _keep_logs(self, directory: Path) -> None:
        """The fleet's own logs, which it would remove."""
        for logs in self._place.run.glob("muxserve/*/**/logs"):
            target = directory / logs.relative_to(self._place.run)
            with contextlib.suppress(OSError):
                shutil.copytree(logs, target, dirs_exist_ok=True)

    def _tell(self, step: Step) -> None:
        recovered = "not recovered" if step.recovery_seconds is None else f"whole after {step.recovery_seconds:.1f} s"
        own = f"; its own: {step.own}" if step.own.counts else ""
        print(
            f"{time.strftime('%H:%M:%S')} {step.topology} {step.number} {step.kind}: {step.what}; {recovered}; "
            f"load: {step.load}{own}",
            flush=True,
        )
        for failure in step.failures[:5]:
            print(f"    FAILED {failure}", flush=True)
        if step.failures:
            print(f"    again: {again(step, self._seed, self._only)}", flush=True)
        with open(self._out / "steps.jsonl", "a") as log:
            log.write(json.dumps(step.as_json()) + "\n")


def _alive_or_stopped(part: Part) -> bool:
    try:
        return part.process.is_running() and part.process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _imported(log: Path) -> bool:
    """Whether the vLLM parent can fork: its process is there much earlier."""
    states = re.findall(
        r"^(?:[\d:]+ )? *[\d.]+ s  vLLM: (up|starting|importing)\b", log.read_text(errors="replace"), re.MULTILINE
    )
    return not states or states[-1] == "up"


def _owned(fleet: Fleet) -> str:
    with contextlib.suppress(Exception):
        return "; ".join(
            f"{model['name']}: {model['owned_pages']} owned, {model['handed_pages']} handed over"
            for stats in fleet.memory()
            for model in stats["models"]
        )
    return "the memory manager does not answer"
