"""A stand-in of the Hugging Face hub on loopback: what its library asks to download checkpoints, from directories."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote, urlsplit

_SHA = "0123456789abcdef0123456789abcdef01234567"
_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


class Hub:
    """Serves `repositories`, directories by name. `paths` are those that were asked for with GET."""

    def __init__(self, repositories: Mapping[str, Path]) -> None:
        self.paths: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                outer.paths.append(urlsplit(self.path).path)
                self._answer(body=True)

            def _answer(self, body: bool) -> None:
                path = unquote(urlsplit(self.path).path)
                if path == "/":
                    self._send(b"{}", body)
                elif (match := _TREE.fullmatch(path) or _INFO.fullmatch(path) or _FILE.fullmatch(path)) is None:
                    self._missing("EntryNotFound", body)
                elif (directory := repositories.get(match["repo"])) is None:
                    self._missing("RepoNotFound", body)
                elif match.re is _FILE:
                    self._file(directory / match["path"], body)
                else:
                    files = sorted(each for each in directory.rglob("*") if each.is_file())
                    named = [(str(each.relative_to(directory)), each) for each in files]
                    if match.re is _TREE:
                        listed: object = [
                            {"type": "file", "path": name, "size": each.stat().st_size, "oid": _etag(each)}
                            for name, each in named
                        ]
                    else:
                        siblings = [{"rfilename": name} for name, _ in named]
                        listed = {"id": match["repo"], "sha": _SHA, "siblings": siblings}
                    self._send(json.dumps(listed).encode(), body)

            def _file(self, file: Path, body: bool) -> None:
                if not file.is_file():
                    self._missing("EntryNotFound", body)
                    return
                self._send(file.read_bytes(), body, headers={"ETag": f'"{_etag(file)}"', "X-Repo-Commit": _SHA})

            def _missing(self, code: str, body: bool) -> None:
                self._send(b"{}", body, HTTPStatus.NOT_FOUND, {"X-Error-Code": code})

            def _send(
                self,
                data: bytes,
                body: bool,
                status: HTTPStatus = HTTPStatus.OK,
                headers: Mapping[str, str] | None = None,
            ) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                if body:
                    self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def hub_of(repositories: Mapping[str, Path]) -> Iterator[Hub]:
    """A hub that serves these directories; HF_ENDPOINT is to be its `url`."""
    hub = Hub(repositories)
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        thread.join()
        hub.server.server_close()
