"""`muxserve status`."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from muxserve.cli.http import HTTPFailure, get_json
from muxserve.cli.output import console, escape, print_error
from placement.words import format_size

EXIT_OK, EXIT_NOT_SERVING, EXIT_NOBODY = 0, 1, 2


def status(url: str, key: str | None, as_json: bool) -> int:
    """Print the state of the fleet at `url`; returns the exit code."""
    url = url.rstrip("/")
    try:
        code, health = get_json(url, "/health")
        fleet_code, fleet = get_json(url, "/fleet", key)
    except HTTPFailure as error:
        print_error(f"{error}; is `muxserve deploy` running there?")
        return EXIT_NOBODY
    if not isinstance(health, dict) or "models" not in health:
        print_error(f"{url} answers, but is no MuxServe endpoint")
        return EXIT_NOBODY
    if as_json:
        print(json.dumps({"health": health, "fleet": fleet if fleet_code == 200 else None}, indent=2))
    else:
        _print(url, health, fleet if fleet_code == 200 and isinstance(fleet, dict) else {})
        if fleet_code == 401:
            print_error("queues and pages need an API key: give --api-key or set MUXSERVE_API_KEY")
    return EXIT_OK if code == 200 else EXIT_NOT_SERVING


def _print(url: str, health: dict[str, Any], fleet: dict[str, Any]) -> None:
    word = str(health.get("status", "unknown"))
    colour = {"ok": "green", "degraded": "yellow", "starting": "yellow"}.get(word, "red")
    state = (fleet.get("unit") or {}).get("state") or {}
    policy = f", {state['policy']}" if "policy" in state else ""
    console.print(
        f"{escape(url)}: [{colour}]{escape(word)}[/], unit scheduler {health.get('unit', '?')}{escape(policy)}"
    )
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    columns = (
        "model",
        "state",
        "running",
        "waiting",
        "queued",
        "prefilling",
        "decoding",
        "pages used",
        "quota",
        "cached",
    )
    for column in columns:
        table.add_column(column, no_wrap=True, justify="left" if column in ("model", "state") else "right")
    for name, model in health["models"].items():
        unit = (state.get("models") or {}).get(name) or {}
        shown = [
            unit.get(field, "-")
            for field in ("queued", "prefilling", "decoding", "used_pages", "quota_pages", "cached_pages")
        ]
        down = [phase for phase, engine in (model.get("engines") or {}).items() if engine != "up"]
        text = str(model.get("status", "?")) + (f" ({', '.join(down)} down)" if down else "")
        row = [name, text, model.get("running", "-"), model.get("waiting", "-"), *shown]
        table.add_row(*(escape(str(cell)) for cell in row))
    console.print(table)
    for name, pool in (state.get("pools") or {}).items():
        free, total = pool.get("free_pages", "-"), pool.get("total_pages", "-")
        console.print(f"{escape(str(name))}: {free} of {total} pages free")
    _print_gpus(fleet.get("gpus") or [])


def _print_gpus(gpus: list[dict[str, Any]]) -> None:
    for gpu in gpus:
        name = f"GPU {gpu.get('index', '?')} ({gpu.get('name') or gpu.get('uuid')})"
        if gpu.get("fault"):
            console.print(f"{escape(name)}: [red]{escape(str(gpu['fault']))}[/]")
            continue
        busy = gpu.get("utilization")
        words = "" if busy is None else f", busy {busy:.0%} of the time"
        used, total, pool = (format_size(gpu.get(key) or 0) for key in ("used_bytes", "memory_bytes", "pool_bytes"))
        console.print(f"{escape(name)}: {used} of {total} in use, {pool} of it KV pool{words}")
