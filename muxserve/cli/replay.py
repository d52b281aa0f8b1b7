"""`muxserve replay`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from muxserve.cli.output import command_line, console, errors, escape, print_error, print_problems
from muxserve.cli.settings import ReplaySettings
from muxserve.cli.which import endpoint_of
from muxserve.cli.workload import models_of, print_left_out
from muxserve.config import FleetError, load_fleet
from muxserve.metrics import Objectives, RequestRecord
from muxserve.metrics.report import comparison_table, models_table, report_page, to_json, write_page
from muxserve.metrics.summary import Summariser, Summary
from muxserve.net.exit_codes import ExitCode
from muxserve.replay.alone import Alone, measure_alone
from muxserve.replay.dialect import Dialect
from muxserve.replay.endpoint import Endpoint, EndpointError
from muxserve.replay.prompts import Prompts
from muxserve.replay.run import Counts, Lateness, Replay
from muxserve.workload import Workload, WorkloadError, describe, open_workload
from muxserve.workload.describe import Description
from muxserve.workload.spec import TraceSpec, parse_spec

_REFRESH, _LINES = 0.25, 10.0


@contextlib.asynccontextmanager
async def progress(console: Console, running: Replay, seconds: float, requests: int) -> AsyncIterator[None]:
    """Show `running` while the block lasts. `seconds` and `requests` are what the workload has."""
    show = _bar if console.is_terminal else _lines
    task = asyncio.create_task(show(console, running, seconds, requests))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def words(counts: Counts, requests: int) -> str:
    """The state in a line."""
    failed = f", {counts.failed} failed" if counts.failed else ""
    rate = counts.output_tokens / max(counts.elapsed, 1e-9)
    return (
        f"sent {counts.sent} of {requests}, {counts.in_flight} in flight, {counts.completed} done{failed}, "
        f"{rate:.0f} tokens/s"
    )


async def _bar(console: Console, running: Replay, seconds: float, requests: int) -> None:
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=seconds or None)
        while True:
            counts = running.counts
            bar.update(task, completed=min(counts.elapsed, seconds), description=words(counts, requests))
            await asyncio.sleep(_REFRESH)


async def _lines(console: Console, running: Replay, seconds: float, requests: int) -> None:
    while True:
        await asyncio.sleep(_LINES)
        console.print(f"{running.counts.elapsed:7.1f} s of {seconds:.0f}: {words(running.counts, requests)}")


def replay(settings: ReplaySettings) -> int:
    """Replay a workload; returns the exit code."""
    url = endpoint_of(settings.url or None)
    if url is None:
        return ExitCode.WRONG
    settings = replace(settings, url=url)
    try:
        for path in filter(None, (settings.out, settings.html, settings.records)):
            if not path.parent.is_dir():
                raise WorkloadError(f"{path} cannot be written: there is no directory {path.parent}")
        return asyncio.run(_replay(settings))
    except FleetError as error:
        print_problems(error, "nothing was sent")
    except (WorkloadError, EndpointError) as error:
        print_error(str(error))
    except OSError as error:
        print_error(f"{error.filename or 'file'}: {error.strerror or error}")
    except KeyboardInterrupt:
        print_error("interrupted before the first request")
        return ExitCode.INTERRUPTED
    return ExitCode.WRONG


async def _replay(settings: ReplaySettings) -> int:
    given = models_of(settings.fleet, settings.models)
    async with Endpoint(settings.url, settings.key, settings.timeout) as endpoint:
        served = await endpoint.models()
        if not served:
            raise EndpointError(f"{endpoint.url} serves no model")
        workload = open_workload(settings.workload, given or served)
        strange = [name for name in workload.models if name not in served]
        if strange:
            raise WorkloadError(
                f"{endpoint.url} does not serve {', '.join(strange)}; it serves {', '.join(served)}. "
                "Map the workload to these with --models, or with map=... in the workload"
            )
        described = describe(workload)
        if not described.models:
            raise WorkloadError(f"{workload.about} has no requests")
        errors.print(escape(workload.about))
        _tell_mapping(settings, workload, given is not None)
        print_left_out(workload)
        # A server may still have the KV of prompts that it was sent before.
        seed = secrets.randbits(32) if settings.prompt_seed is None else settings.prompt_seed
        prompts = Prompts(seed)
        dialects = {name: await endpoint.probe(name, prompts) for name in described.models}
        for words in dict.fromkeys(dialect.words() for dialect in dialects.values()):
            errors.print(f"{escape(endpoint.url)}: {words}")
        alone = await _alone(endpoint, dialects, prompts, described) if settings.alone else None
        collected = Summariser(
            reference=None if alone is None else (lambda record: alone[record.model].of(record)),
            objectives=_objectives(settings, workload.models),
        )
        with _writer(settings.records) as write:

            def on_record(record: RequestRecord) -> None:
                collected.add(record)
                write(record)

            running = Replay(endpoint, dialects, prompts, on_record, settings.max_in_flight)
            async with _interruptible(running), progress(errors, running, workload.duration, _count(described)):
                await running.run(workload)
    summary = collected.summary(extra=_extra(running, alone, seed))
    _report(settings, workload, dialects, summary)
    _warn(running, dialects, summary)
    if running.stopped:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if summary.overall.completed == summary.overall.requests else ExitCode.NO


def _count(described: Description) -> int:
    return described.overall.requests if described.overall else 0


def _tell_mapping(settings: ReplaySettings, workload: Workload, given: bool) -> None:
    foreign = [name for name in workload.source_models if name not in workload.models]
    spec = parse_spec(settings.workload)
    if foreign and isinstance(spec, TraceSpec) and spec.map == "auto":
        shown = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
        how = "by their rates" if given else "evenly"
        to = ", ".join(workload.models)
        errors.print(
            f"[yellow]requests to {escape(shown)} go to {escape(to)} {how}[/]; `map=...` in the workload changes that"
        )


async def _alone(
    endpoint: Endpoint, dialects: Mapping[str, Dialect], prompts: Prompts, described: Description
) -> dict[str, Alone]:
    found = {}
    for name, dialect in dialects.items():
        part = described.models[name]
        errors.print(f"measuring {escape(name)} alone")
        short, long = max(1, round(part.prompt.p50 / 2)), max(2, round(part.prompt.p95))
        found[name] = await measure_alone(endpoint, dialect, prompts, name, short, long)
    return found


def _objectives(settings: ReplaySettings, models: tuple[str, ...]) -> dict[str, Objectives]:
    found = {}
    of_fleet = {} if settings.fleet is None else {model.name: model.slo for model in load_fleet(settings.fleet).models}
    for name in models:
        slo = of_fleet.get(name)
        ttft = settings.slo_ttft_ms if settings.slo_ttft_ms is not None else slo.ttft_ms if slo else None
        tpot = settings.slo_tpot_ms if settings.slo_tpot_ms is not None else slo.tpot_ms if slo else None
        found[name] = Objectives.of_milliseconds(ttft, tpot)
    return found


@contextlib.contextmanager
def _writer(path: Path | None) -> Iterator[Callable[[RequestRecord], object]]:
    if path is None:
        yield lambda record: None
        return
    with path.open("wb") as file:
        yield lambda record: file.write(msgspec.json.encode(record) + b"\n")


@contextlib.asynccontextmanager
async def _interruptible(running: Replay) -> AsyncIterator[None]:
    """The first Ctrl-C sends nothing more, the second gives up what is under way."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        again = running.stopped
        running.stop(now=again)
        if not again:
            errors.print(f"no new requests; waiting for {running.counts.in_flight} (Ctrl-C again: give them up)")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _extra(running: Replay, alone: Mapping[str, Alone] | None, prompt_seed: int) -> dict[str, object]:
    late = Lateness.of(running.counts.lateness)
    extra: dict[str, object] = {
        "client": {
            "lateness": None if late is None else asdict(late),
            "held_back": running.counts.held,
            "shorter_than_asked": running.counts.short,
            "prompt_seed": prompt_seed,
        }
    }
    if alone is not None:
        extra["alone"] = {
            name: {"base": a.base, "per_prompt_token": a.per_prompt_token, "per_output_token": a.per_output_token}
            for name, a in alone.items()
        }
    return extra


def _report(settings: ReplaySettings, workload: Workload, dialects: Mapping[str, Dialect], summary: Summary) -> None:
    runs = {"replay": summary}
    about = f"{workload.about} on {settings.url}"
    parameters = {
        "url": settings.url,
        "workload": settings.workload,
        "max_in_flight": settings.max_in_flight,
        "dialects": {name: dialect.words() for name, dialect in dialects.items()},
    }
    document = to_json(runs, about=about, parameters=parameters)
    if settings.as_json:
        sys.stdout.write(document.decode())
    else:
        console.print(comparison_table(runs))
        console.print()
        console.print(models_table(summary))
        for text, count in summary.errors.items():
            console.print(f"[red]{count} x[/] {escape(text)}")
    if settings.out:
        settings.out.write_bytes(document)
    if settings.html:
        page = report_page(runs, title="MuxServe replay", about=about, command=command_line())
        write_page(settings.html, page)
    for path in filter(None, (settings.out, settings.html, settings.records)):
        errors.print(f"written to {escape(str(path))}")


def _warn(running: Replay, dialects: Mapping[str, Dialect], summary: Summary) -> None:
    late = Lateness.of(running.counts.lateness)
    latency = summary.overall.latency
    if late is not None and late.disturbs(latency.p50 if latency else 0.0):
        errors.print(
            f"[yellow]this client was late[/]: 1 % of the requests left {late.p99 * 1e3:.1f} ms or more after their "
            f"time (at most {late.max * 1e3:.0f} ms), so latencies include its own delay. Run it on a free core, or "
            "replay slower"
        )
    if running.counts.held:
        errors.print(
            f"[yellow]{running.counts.held} requests waited[/] for --max-in-flight; that is part of their latency"
        )
    if running.counts.short and any(not dialect.ignore_eos for dialect in dialects.values()):
        errors.print(f"[yellow]{running.counts.short} answers[/] ended before the length asked for")
    elif running.counts.short:
        errors.print(
            f"[yellow]{running.counts.short} answers[/] were shorter than asked although the server took ignore_eos; "
            "it may not know it, or its context is too short"
        )
