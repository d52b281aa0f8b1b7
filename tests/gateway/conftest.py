from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from muxserve.spec import GrammarLimits, HttpSpec
from tests.gateway.rig import Rig, Running
from tests.gateway.unit_specs import fleet_of, model
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.tiny_checkpoint import tiny_checkpoint

# A web page that calls the endpoint from a browser.
PAGE = "https://chat.example.org"
# CPU time after which the gateway gives up compiling a grammar.
COMPILE_SECONDS = 1.0


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    # Not pytest's own directory: the paths of the sockets in it would be too long for the kernel.
    with tempfile.TemporaryDirectory(prefix="gw-") as directory:
        rig = Rig(Path(directory))
        try:
            yield rig
        finally:
            rig.close()


@pytest.fixture(scope="session")
def gateway(rig: Rig) -> Running:
    """Two models, no keys. Never stopped by a test."""
    llama, qwen = tiny_checkpoint(), tiny_checkpoint("qwen3", 2, 4, 2, 128, 1)
    rig.ready()
    directory = rig.directory / "main"
    directory.mkdir()
    running = rig.start(
        fleet_of(
            directory,
            [
                model("alpha", llama),
                model(
                    "beta",
                    qwen,
                    aliases=("org/beta",),
                    slo_ttft_ms=60_000.0,
                    slo_tpot_ms=0.000001,
                    engine_args={"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
                ),
            ],
            unit="main",
            port=free_port(),
            http=HttpSpec(max_body_bytes=200_000, cors_origins=(PAGE,), access_log=True),
            grammars=GrammarLimits(compile_seconds=COMPILE_SECONDS, compile_bytes=256 << 20),
        )
    )
    running.engines()
    return running


@pytest.fixture(scope="session")
def guarded(rig: Rig, gateway: Running) -> Running:
    """One model, keys, one request at a time and one more in the queue. Started after `gateway`."""
    directory = rig.directory / "guarded"
    directory.mkdir()
    running = rig.start(
        fleet_of(
            directory,
            [model("alpha", tiny_checkpoint(), max_concurrency=1, max_queue=1)],
            unit="guarded",
            port=free_port(),
            api_keys=["first-key", "second-key"],
        ),
        VLLM_API_KEY="of-a-vllm-server",  # the fleet file's count
    )
    running.engines()
    return running


@pytest.fixture(scope="session")
def http(gateway: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="session")
def client(gateway: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client
