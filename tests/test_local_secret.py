"""The secret of a run: who connects to a Unix socket without it gets nowhere, and takes nobody's place."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from muxserve.net import sockets
from muxserve.net.sockets import NetworkError
from muxserve.spec.run_dir import RunDir
from tests.support.patience import PATIENCE

PATIENCE_MS = PATIENCE * 1000
# Long enough for a message that would come; only for what must not come.
MOMENT_MS = 300


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as made:
        yield made
        made.destroy(linger=0)


def router(context: zmq.Context[Any], path: Path) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    sockets.bind_local(socket, f"ipc://{path}")
    return socket


def dealer(context: zmq.Context[Any], identity: bytes = b"peer") -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    return socket


def test_who_shows_the_secret_is_heard_and_answered(context: zmq.Context[Any], tmp_path: Path) -> None:
    ours = dealer(context)
    # Also who comes first.
    sockets.connect(ours, f"ipc://{tmp_path}/s")
    ours.send(b"hello")
    server = router(context, tmp_path / "s")
    assert server.poll(PATIENCE_MS)
    assert server.recv_multipart() == [b"peer", b"hello"]
    server.send_multipart([b"peer", b"welcome"])
    assert ours.poll(PATIENCE_MS)
    assert ours.recv() == b"welcome"


@pytest.mark.parametrize("shown", [None, b"0", b"0" * 64])
def test_a_stranger_is_not_heard_and_takes_over_no_identity(
    context: zmq.Context[Any], tmp_path: Path, shown: bytes | None
) -> None:
    server = router(context, tmp_path / "s")
    ours, stranger = dealer(context), dealer(context)
    sockets.connect(ours, f"ipc://{tmp_path}/s")
    ours.send(b"hello")
    assert server.poll(PATIENCE_MS)
    server.recv_multipart()
    if shown is not None:
        stranger.plain_username, stranger.plain_password = b"muxserve", shown
    stranger.setsockopt(zmq.SNDTIMEO, 0)
    stranger.connect(f"ipc://{tmp_path}/s")
    with contextlib.suppress(zmq.Again):  # turned away before it came to that
        stranger.send(b"I am the peer")
    assert not server.poll(MOMENT_MS)
    server.send_multipart([b"peer", b"still you?"])
    assert ours.poll(PATIENCE_MS)
    assert not stranger.poll(0)


def test_each_run_has_a_secret_of_its_own_for_its_owner_only(context: zmq.Context[Any], tmp_path: Path) -> None:
    secrets = set()
    for _ in range(2):
        run = RunDir(tmp_path / "base")
        server = router(context, run.path / "s")
        file = run.path / sockets.SECRET_FILE
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        secrets.add(file.read_bytes())
        server.close()
        run.remove()
    assert len(secrets) == 2
    assert min(map(len, secrets)) == 64


def test_a_secret_that_others_can_read_is_none(context: zmq.Context[Any], tmp_path: Path) -> None:
    secret = tmp_path / sockets.SECRET_FILE
    secret.write_bytes(b"x")
    secret.chmod(0o644)
    with pytest.raises(NetworkError, match="owner only"):
        sockets.bind_local(context.socket(zmq.ROUTER), f"ipc://{tmp_path}/s")


def test_who_only_connects_leaves_nothing_in_a_directory_of_all(context: zmq.Context[Any], tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    sockets.connect(dealer(context), f"ipc://{tmp_path}/s")
    sockets.connect(dealer(context), f"ipc://{tmp_path}/nowhere/s")
    assert list(tmp_path.iterdir()) == []
