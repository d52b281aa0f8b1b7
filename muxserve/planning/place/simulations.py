"""Many simulations of one fleet: units that plans have in common are simulated once, and those that know nothing of
each other on as many cores as there are. Neither changes a result."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec

from muxserve.costs.latency import LatencyModel
from muxserve.costs.measured import overheads_on
from muxserve.metrics.records import RequestRecord
from muxserve.simulator import Options, Rules, SimUnit, coupled, simulate
from muxserve.workload.trace import TraceRequest

Progress = Callable[[int, int], None]

# A process of its own takes some hundredths of a second; so many requests take ten times that.
_WORTH_A_PROCESS = 200
_MOST_PROCESSES = 8
# Others have about as much to do. One that is not there after so many times as long (and as many seconds) hangs.
_PATIENCE = 20.0
_decoder = msgspec.msgpack.Decoder(list[list[RequestRecord]])


class Asked(NamedTuple):
    """A simulation of units under a workload, with the rules by which replicas work together. It ends for each model at
    its time in `until`, in seconds (absent: with the last request)."""

    units: Sequence[SimUnit]
    workload: Sequence[TraceRequest]
    rules: Rules
    until: Mapping[str, float] = {}


class _Group(NamedTuple):
    """Units that depend on each other, the requests for their models, where these stand in the workload, the rules of
    these models, and `until` when they are simulated. `key` says all that its result depends on; None where that cannot
    be told."""

    units: list[SimUnit]
    requests: list[TraceRequest]
    places: list[int]
    rules: Rules
    until: float
    key: object


class Simulations:
    """Simulates units under the delays of the control path, on at most so many processes (None: as there are cores)."""

    def __init__(self, latency: LatencyModel, processes: int | None = None) -> None:
        self._latency = latency
        self._processes = processes or min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
        self._known: dict[object, list[RequestRecord]] = {}

    def records(
        self,
        units: Sequence[SimUnit],
        workload: Sequence[TraceRequest],
        rules: Rules,
        progress: Progress | None = None,
        until: Mapping[str, float] | None = None,
    ) -> list[RequestRecord]:
        """What becomes of each request of one simulation; as `records_of`."""
        (found,) = self.records_of([Asked(units, workload, rules, until or {})], progress)
        return found

    def records_of(self, asked: Sequence[Asked], progress: Progress | None = None) -> list[list[RequestRecord]]:
        """What becomes of each request of each simulation, in the order of its workload. All of them share the
        processes. `progress` is as of `simulate`, over all requests that have to be simulated.

        Raises:
            SimulationError, CostError: as `simulate`.
        """
        groups = [_groups(each) for each in asked]
        made: dict[int, list[RequestRecord]] = {}  # by group
        missing: dict[object, list[_Group]] = {}
        for group in chain.from_iterable(groups):
            known = None if group.key is None else self._known.get(group.key)
            if known is None:
                missing.setdefault(id(group) if group.key is None else group.key, []).append(group)
            else:
                made[id(group)] = known
        results = self._simulate([alike[0] for alike in missing.values()], progress)
        for alike, records in zip(missing.values(), results, strict=True):
            made |= {id(group): records for group in alike}
            if alike[0].key is not None:
                self._known[alike[0].key] = records
        return [_in_order(each.workload, mine, made) for each, mine in zip(asked, groups, strict=True)]

    def _simulate(self, groups: Sequence[_Group], progress: Progress | None) -> list[list[RequestRecord]]:
        count = sum(len(group.requests) for group in groups)
        shares = _divide(groups, max(1, min(self._processes, count // _WORTH_A_PROCESS)))
        # Those of this process stand for all that goes on beside them.
        own = sum(len(groups[number].requests) for number in shares[0])
        done = 0

        def here(numbers: Sequence[int], progress: Progress | None) -> list[list[RequestRecord]]:
            nonlocal done
            made = []
            for number in numbers:
                units, requests, _, rules, end, _ = groups[number]
                told = None if progress is None else partial(_tell, progress, done, own, count)
                # Nobody asks how many pages were in use.
                options = Options(overheads_on(self._latency, units[0].device), sample_seconds=0.0, until=end)
                made.append(simulate(units, requests, self._latency, options, rules, progress=told).records)
                done += len(requests)
            return made

        others = [_Child(partial(here, numbers, None)) for numbers in shares[1:]]
        began = time.monotonic()
        try:
            parts = [here(shares[0], progress)]
            patience = time.monotonic() + _PATIENCE * (1.0 + time.monotonic() - began)
            for numbers, child in zip(shares[1:], others, strict=True):
                part = child.result(patience)
                # What went wrong there goes wrong here, and is raised.
                parts.append(here(numbers, progress) if part is None else part)
        finally:
            for child in others:
                child.end()
        found: list[list[RequestRecord]] = [[] for _ in groups]
        for numbers, part in zip(shares, parts, strict=True):
            for number, made in zip(numbers, part, strict=True):
                found[number] = made
        return found


def _tell(progress: Progress, before: int, own: int, count: int, done: int, _: int) -> None:
    progress(min(count, (before + done) * count // max(1, own)), count)


def _groups(asked: Asked) -> list[_Group]:
    members = coupled(asked.units)
    places: list[list[int]] = [[] for _ in members]
    of = {model.name: mine for group, mine in zip(members, places, strict=True) for u in group for model in u.models}
    for number, request in enumerate(asked.workload):
        if request.model in of:
            of[request.model].append(number)
    found = []
    for group, mine in zip(members, places, strict=True):
        requests = [asked.workload[number] for number in mine]
        names = {model.name for unit in group for model in unit.models}
        end = max((asked.until.get(name, math.inf) for name in names), default=math.inf)
        rules = {name: asked.rules[name] for name in sorted(names) if name in asked.rules}
        found.append(_Group(group, requests, mine, rules, end, _key(group, requests, rules, end)))
    return found


def _in_order(
    workload: Sequence[TraceRequest], groups: Sequence[_Group], made: Mapping[int, list[RequestRecord]]
) -> list[RequestRecord]:
    """The records of all groups in the order of the workload. Nothing serves the models that are in none."""
    records = [RequestRecord(each.model, each.arrival, each.prompt_tokens, 0) for each in workload]
    for record in records:
        record.error = f"no unit serves {record.model}"
    for group in groups:
        for place, record in zip(group.places, made[id(group)], strict=True):
            records[place] = record
    return records


def _key(units: Sequence[SimUnit], requests: Sequence[TraceRequest], rules: Rules, until: float) -> object:
    """The units, whatever their names and wherever their devices are, by what rules they work together, what comes for
    them, and for how long."""
    numbers: dict[int, int] = {}
    for unit in units:
        for device in unit.devices:
            numbers.setdefault(device, len(numbers))
    alike = tuple(
        replace(unit, name=str(place), devices=tuple(numbers[device] for device in unit.devices))
        for place, unit in enumerate(units)
    )
    key = (alike, tuple(rules.items()), tuple(requests), until)
    try:
        hash(key)
    except TypeError:
        # Models that sleep are in dictionaries.
        return None
    return key


def _divide(groups: Sequence[_Group], processes: int) -> list[list[int]]:
    """The numbers of the groups of each process: the largest first, each to the one that has the least to do."""
    shares: list[list[int]] = [[] for _ in range(processes)]
    load = [0] * processes
    for number in sorted(range(len(groups)), key=lambda number: -len(groups[number].requests)):
        least = load.index(min(load))
        shares[least].append(number)
        load[least] += len(groups[number].requests)
    return [shares[0], *(share for share in shares[1:] if share)]


class _Child:
    """A forked process that simulates, and writes the records into a pipe."""

    def __init__(self, work: Callable[[], list[list[RequestRecord]]]) -> None:
        self._pid: int | None = None
        self._ended = False
        self._read, write = os.pipe()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(write)
            return
        if self._pid == 0:
            try:
                os.close(self._read)
                data = memoryview(msgspec.msgpack.encode(work()))
                while data:
                    data = data[os.write(write, data) :]
                os._exit(0)
            finally:
                os._exit(1)
        os.close(write)

    def result(self, until: float) -> list[list[RequestRecord]] | None:
        """What it found; None: it did not get there by `until`, of the monotonic clock."""
        data, waiting = bytearray(), select.poll()
        waiting.register(self._read, select.POLLIN)
        while True:
            if not waiting.poll(max(0.0, 1000.0 * (until - time.monotonic()))):
                return None
            part = os.read(self._read, 1 << 20)
            if not part:
                break
            data += part
        self._ended = True
        try:
            return _decoder.decode(data)
        except msgspec.DecodeError:
            return None

    def end(self) -> None:
        """It is not needed any more."""
        os.close(self._read)
        if self._pid is None:
            return
        # Somebody else may have waited for one that has ended, and its number may be another's by now.
        with suppress(ProcessLookupError, ChildProcessError):
            if not self._ended:
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
