"""How tests ask a gateway: prompts that the fake unit plays, and a client that leaves without an answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.gateway.rig import Running
from tests.support.patience import PATIENCE


def play(say: str, **script: Any) -> str:
    return "PLAY " + json.dumps({"say": say, **script})


def user(say: str, **script: Any) -> list[Any]:
    return [{"role": "user", "content": play(say, **script)}]


@contextmanager
def asking(running: Running, body: dict[str, Any], **headers: str) -> Iterator[None]:
    """A client that has asked, and leaves in the end without having read an answer."""
    port = running.fleet.gateway.port
    data = json.dumps(body).encode()
    lines = {"Host": "gateway", "Content-Type": "application/json", "Content-Length": str(len(data)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + data)
        yield
