"""`muxserve list`: the fleets that this user runs on this machine."""

from __future__ import annotations

import json
import time

from muxserve.cli.http import HTTPFailure, get_json
from muxserve.cli.output import console, escape
from muxserve.cli.ready import endpoint, trust
from muxserve.control.client import RunningFleet, running_fleets
from muxserve.metrics.figure_table import FigureTable
from muxserve.net.exit_codes import ExitCode

# One that hangs must not keep the others from being listed.
_PATIENCE = 2.0


def list_fleets(as_json: bool) -> int:
    """Print them; returns the exit code."""
    found = [_described(fleet) for fleet in running_fleets()]
    if as_json:
        print(json.dumps(found, indent=2))
    elif not found:
        console.print("no fleet of yours runs here; `muxserve deploy FILE` or `muxserve run MODEL` starts one")
    else:
        table = FigureTable(["fleet", "state", "URL", "models", "pid", "up for"], words=4)
        for each in found:
            models = ", ".join(each["models"]) if isinstance(each["models"], list) else ""
            cells = [each["id"], each["status"], each["url"], models, each["pid"] or "-", _time(each["seconds"])]
            table.add_row(*(escape(str(cell)) for cell in cells))
        console.print(table)
    return ExitCode.DONE


def _described(fleet: RunningFleet) -> dict[str, object]:
    spec = fleet.spec()
    url, status = "", "starting"
    if spec is not None:
        url = endpoint(spec.gateway)
        trust(spec.gateway)
        try:
            _, health = get_json(url, "/health", timeout=_PATIENCE)
            status = str(health.get("status", "unknown")) if isinstance(health, dict) else "unknown"
        except HTTPFailure:
            pass  # its gateways do not listen yet, or no longer
    return {
        "id": fleet.name,
        "url": url,
        "status": status,
        "pid": fleet.pid,
        "seconds": round(time.time() - fleet.began),
        "models": [] if spec is None else spec.served_names,
    }


def _time(seconds: object) -> str:
    minutes, rest = divmod(int(str(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
