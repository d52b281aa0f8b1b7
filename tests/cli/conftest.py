from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_files import write_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "dtype": "float32",
}
FLEET = """\
kv_pool: {size: 32MiB}
gateway: {drain_seconds: 5}
models:
  - {name: one, path: one, demo: "What are you?"}
  - {name: two, path: two, rate: 3}
"""


@pytest.fixture
def fleet_file(tmp_path: Path) -> Path:
    """A fleet that can be planned; its checkpoints have no weights worth loading."""
    for name in ("one", "two"):
        write_checkpoint(tmp_path / name, CONFIG)
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


class Endpoint:
    """An HTTP server with given answers: path -> (status, body)."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.seen: list[tuple[str, str | None]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.seen.append((self.path, self.headers["Authorization"]))
                status, body = outer.answers.get(self.path, (404, {"error": {"message": "no such page"}}))
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    thread = threading.Thread(target=endpoint.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield endpoint
    endpoint.server.shutdown()
    thread.join()
    endpoint.server.server_close()
