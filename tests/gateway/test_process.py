"""How a gateway process begins and ends."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from muxserve.gateway import process
from muxserve.gateway.main import main
from muxserve.gateway.process import bind, raise_file_limit
from muxserve.spec import FleetSpec, GatewaySpec
from tests.gateway.playing import play
from tests.gateway.rig import Rig, Running
from tests.gateway.unit_specs import fleet_of, model
from tests.support.patience import PATIENCE, eventually
from tests.support.ports import free_port
from tests.support.tiny_checkpoint import tiny_checkpoint


@pytest.fixture(scope="module")
def hasty(rig: Rig, gateway: Running) -> FleetSpec:
    """A deployment that gives requests a moment to finish. Its gateways begin after `gateway`."""
    directory = rig.directory / "hasty"
    directory.mkdir()
    return fleet_of(
        directory,
        [model("alpha", tiny_checkpoint(), max_concurrency=1)],
        unit="hasty",
        port=free_port(),
        drain_seconds=0.2,
    )


def test_what_does_not_finish_in_time_is_cancelled(rig: Rig, hasty: FleetSpec) -> None:
    running = rig.start(hasty)
    mark = running.mark()
    with ThreadPoolExecutor(2) as pool:
        url = f"{running.url}/v1/completions"
        asked = pool.submit(httpx.post, url, json={"prompt": play("never", hold=2)}, timeout=PATIENCE)
        request_id = running.wait("held", mark)["id"]
        waiting = pool.submit(httpx.post, url, json={"prompt": play("nor this", hold=2)}, timeout=PATIENCE)

        def told() -> bool:
            models = httpx.get(f"{running.url}/fleet", timeout=PATIENCE).json()["models"]
            return bool(models[0]["gateway"]["waiting"])

        eventually(told, "a request waits")
        running.terminate()
        assert running.exit_status() == 0
        for answer in (asked.result(PATIENCE), waiting.result(PATIENCE)):
            assert answer.status_code == 503
            assert re.search("shut(ting)? down", answer.json()["error"]["message"])
    assert len(running.events(mark, "submit")) == 1
    assert running.wait("cancel", mark)["ids"] == [request_id]


def test_a_gateway_follows_one_that_was_killed_and_ends_with_its_controller(rig: Rig, hasty: FleetSpec) -> None:
    killed = rig.start(hasty)
    mark = killed.mark()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            httpx.post, f"{killed.url}/v1/completions", json={"prompt": play("dies with it", hold=2)}, timeout=PATIENCE
        )
        killed.wait("held", mark)
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.exit_status() == -signal.SIGKILL
        assert isinstance(asked.exception(PATIENCE), httpx.TransportError)
    running = rig.start(hasty)
    answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": play("alive")}, timeout=PATIENCE)
    assert answer.json()["choices"][0]["text"] == "alive"
    # Tokens meant for the one before are none of its business.
    running.tell_unit("go")
    assert httpx.get(f"{running.url}/fleet", timeout=PATIENCE).json()["gateway"]["requests_in_flight"] == 0
    running.cut_lifeline()
    assert running.exit_status() == 1


def test_a_deployment_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--fleet", str(tmp_path / "nothing.json")]) == 2
    broken = tmp_path / "broken.json"
    broken.write_text('{"run_dir": 3}')
    assert main(["--fleet", str(broken)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all("cannot read" in error and str(tmp_path) in error for error in errors)


async def test_a_request_over_the_connection_of_a_stream_that_has_just_ended_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its client could not know that the connection was to end, whether other gateways or another fleet listen."""
    monkeypatch.setattr(process, "QUIET_SECONDS", 0.0)
    empty = [asyncio.get_running_loop().create_future() for _ in range(2)]
    turns = iter(empty)

    async def until_empty() -> None:
        await next(turns)

    async def nothing() -> None: ...

    limiter = SimpleNamespace(empty=until_empty, occupied=1)
    gateway: Any = SimpleNamespace(
        limiter=limiter, reports=SimpleNamespace(draining=False), fleet=SimpleNamespace(handed_over=True)
    )
    endpoint: Any = SimpleNamespace(draining=False, refusing=False, until_others_answered=nothing)
    server: Any = SimpleNamespace(should_exit=False, force_exit=False, stop_listening=nothing)
    drain = process.ServerDrain(gateway, endpoint, server, PATIENCE, beside=False)
    drain.begin()
    assert (endpoint.draining, endpoint.refusing) == (True, False)
    empty[0].set_result(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not server.should_exit
    empty[1].set_result(None)
    assert drain._task is not None
    await drain._task
    assert server.should_exit


def test_only_who_takes_over_shares_an_address() -> None:
    with bind(GatewaySpec("127.0.0.1", 0)) as first:
        first.listen()
        at = GatewaySpec("127.0.0.1", first.getsockname()[1])
        with pytest.raises(OSError, match="cannot listen on"):
            bind(at)
        with bind(at, taking_over=True) as second:
            second.listen()
            first.close()
            with socket.create_connection(second.getsockname()), second.accept()[0]:
                pass


def test_an_address_that_cannot_be_had() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind(GatewaySpec("127.0.0.1", port))
    with pytest.raises(OSError, match=r"cannot listen on no\.such\.host\.invalid:80"):
        bind(GatewaySpec("no.such.host.invalid", 80))


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    with bind(GatewaySpec("127.0.0.1", 0), stall_seconds=0.3) as bound, socket.socket() as client:
        bound.listen()
        client.connect(bound.getsockname())
        connection, _ = bound.accept()
        with connection, pytest.raises(OSError, match="timed out") as error:
            connection.sendall(bytes(64 << 20))  # more than any buffer holds
        # The kernel's word, not that of a timer of Python's.
        assert error.value.errno == errno.ETIMEDOUT
        assert connection.gettimeout() is None


def test_a_client_that_vanishes_is_asked_for() -> None:
    with bind(GatewaySpec("127.0.0.1", 0)) as bound, socket.socket() as client:
        bound.listen()
        client.connect(bound.getsockname())
        connection, _ = bound.accept()
        with connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, hard), hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nobody_is_served_before_all_is_ready() -> None:
    with bind(GatewaySpec("127.0.0.1", 0)) as bound, socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", bound.getsockname()[1])) != 0
