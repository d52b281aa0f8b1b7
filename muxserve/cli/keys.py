"""`muxserve keys create`, `list` and `revoke`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import typer

from muxserve.cli.http import HTTPFailure, send_json
from muxserve.cli.output import console, escape, print_error
from muxserve.cli.usage import refusal
from muxserve.cli.which import endpoint_of
from muxserve.metrics.figure_table import FigureTable
from muxserve.net.exit_codes import ExitCode

KEYS = "/admin/keys"
_DAYS = {"d": 1.0, "w": 7.0}


def create(url: str | None, key: str | None, tenant: str, name: str, expires: str, as_json: bool) -> int:
    """Make a key of `tenant` that is good for `expires`, a duration, and print it; returns the exit code."""
    order: dict[str, object] = {"tenant": tenant, "name": name}
    if expires:
        order["expires_in"] = _seconds(expires)
    code, made = _ask(url, key, "POST", KEYS, order)
    if made is None:
        return code
    if as_json:
        print(json.dumps(made, indent=2))
        return code
    until = f"until {_when(made['expires_at'])}" if made["expires_at"] else "until it is revoked"
    console.print(f"{made['id']} of tenant {escape(tenant)}, good {until}. The key is shown this once:")
    print(made["key"])
    return code


def listed(url: str | None, key: str | None, tenant: str, as_json: bool) -> int:
    """Print the keys of `tenant`, or of all; returns the exit code."""
    code, answer = _ask(url, key, "GET", f"{KEYS}?tenant={quote(tenant)}" if tenant else KEYS)
    if answer is None:
        return code
    if as_json:
        print(json.dumps(answer, indent=2))
    elif not answer["data"]:
        console.print("no keys were made; `muxserve keys create TENANT` makes one")
    else:
        columns = ("id", "tenant", "name", "ends with", "state", "made (UTC)", "expires (UTC)", "last used on")
        table = FigureTable(columns, words=len(columns))
        for each in answer["data"]:
            names = (each["id"], escape(each["tenant"]), escape(each["name"]), escape(each["hint"]))
            times = (_when(each["created_at"]), _when(each["expires_at"]), each["last_used_on"] or "never")
            table.add_row(*names, each["status"], *times)
        console.print(table)
    return code


def revoke(url: str | None, key: str | None, name: str, as_json: bool) -> int:
    """Have the key `name` open nothing any more; returns the exit code."""
    code, answer = _ask(url, key, "DELETE", f"{KEYS}/{quote(name, safe='')}")
    if answer is None:
        return code
    words = f"{name} of tenant {answer['tenant']} is revoked"
    print(json.dumps(answer, indent=2) if as_json else words)
    return code


def _ask(url: str | None, key: str | None, method: str, path: str, body: object = None) -> tuple[ExitCode, Any]:
    """The exit code, and what the endpoint answered; None where it did not do it, after that was said."""
    url = endpoint_of(url)
    if url is None:
        return ExitCode.WRONG, None
    try:
        status, answer = send_json(url, method, path, body, key)
    except HTTPFailure as error:
        print_error(f"{error}; is `muxserve deploy` running there?")
        return ExitCode.WRONG, None
    if status != 200:
        print_error(refusal(status, answer))
        return ExitCode.NO if status == 404 else ExitCode.WRONG, None
    return ExitCode.DONE, answer


def _seconds(text: str) -> float:
    from muxserve.config.values import parse_duration

    try:
        if text[-1:] in _DAYS:
            return float(text[:-1]) * _DAYS[text[-1]] * 86400.0
        return parse_duration(text)
    except ValueError:
        message = f"must be a time such as 90m, 12h, 30d or 8w, not {text!r}"
        raise typer.BadParameter(message, param_hint="--expires") from None


def _when(seconds: float | None) -> str:
    return "never" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
