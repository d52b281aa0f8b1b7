"""Every Python block of the documentation runs."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from muxserve.costs import read_architecture
from muxserve.memory import server
from muxserve.replicas.priorities import DEFAULT_LEVELS
from muxserve.replicas.views import InstanceLoad, InstanceView
from muxserve.workload import TraceRequest
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand
from tests.memory.support import block_hash, unit_spec
from tests.support import segments
from tests.support.unit_specs import model_spec

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
Names = dict[str, Any]


class Block(NamedTuple):
    page: str
    number: int
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text, name = page.read_text(), str(page.relative_to(ROOT))
        for number, found in enumerate(BLOCK.finditer(text), 1):
            yield Block(name, number, text[: found.start()].count("\n") + 2, found[1])


BLOCKS = list(blocks())


def architecture(layers: int = 4) -> Any:
    config = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": layers, "vocab_size": 1000}
    return read_architecture({"architectures": ["LlamaForCausalLM"], **config})


WORKLOAD = [TraceRequest(n / 10, "llama", 100, 20) for n in range(20)]


# ---------------------------------------------------------------- what the text around a block has, or a reader's files


def of_the_simulator(folder: Path) -> Names:
    unit = PlacedUnit("unit0", "A10", (0,), (PlacedModel("llama", 1.0, 1.0, 1.0),), 1 << 30)
    placement = Placement(Cluster((Node("A10", 1),)), (unit,))
    return {"placement": placement, "models": {"llama": Demand("llama", architecture())}, "workload": WORKLOAD}


def of_pipelines(folder: Path) -> Names:
    return {"architecture": architecture(48), "workload": WORKLOAD}


def of_replicas(folder: Path) -> Names:
    return {"architecture": architecture(), "workload": WORKLOAD}


def of_the_global_scheduler(folder: Path) -> Names:
    return {
        "levels": DEFAULT_LEVELS,
        "load": InstanceLoad("replica-0", capacity=1000),
        "now": 1.0,
        "view": InstanceView("replica-1", capacity=1000),
        "destination": InstanceLoad("replica-0", capacity=1000),
    }


def a_profile(folder: Path) -> Names:
    (folder / "profile.json").write_bytes((ROOT / "benchmarks/results/profile_quickstart_cpu.json").read_bytes())
    return {}


def of_the_memory_manager(folder: Path) -> Names:
    model = model_spec("atlas", pool="p", layers=1, kv_heads=1, num_blocks=20, quota_pages=20)
    hashes = [block_hash(number) for number in range(4)]
    return {"unit_spec": unit_spec(folder, models=[model]), "prompt_hashes": hashes[:2], "hashes": hashes[2:]}


def in_the_repository(folder: Path) -> Names:
    return {"__cwd__": ROOT}


def a_picture(folder: Path) -> Names:
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return {}


def questions(folder: Path) -> Names:
    (folder / "questions.jsonl").write_text("{}\n")
    return {}


# What each block needs that does not say everything itself.
GIVEN: Mapping[tuple[str, int], Callable[[Path], Names]] = {
    ("docs/costs.md", 1): in_the_repository,
    ("docs/costs.md", 2): a_profile,
    ("docs/images.md", 1): a_picture,
    ("docs/memory-manager.md", 1): of_the_memory_manager,
    ("docs/pipelined.md", 1): of_pipelines,
    ("docs/replicas.md", 1): of_the_global_scheduler,
    ("docs/replicas.md", 2): of_replicas,
    ("docs/simulator.md", 1): of_the_simulator,
    ("docs/teams.md", 1): questions,
    ("docs/workload.md", 1): in_the_repository,
}
# These ask a fleet, whose start takes a multiple of all tests here, even if it is simulated. OpenAI's own client checks
# the names and arguments here, and a made-up answer has the shape that it reads; the fleet of the text answers the same
# requests in the test that is named.
SERVED = {
    ("docs/first-fleet.md", 1): "tests/e2e/test_openai.py",
    ("docs/images.md", 1): "tests/e2e/test_images.py",
    ("docs/pooling.md", 1): "tests/e2e/test_pooling.py",
    ("docs/teams.md", 1): "tests/e2e/test_teams.py",
}


def answer(request: httpx.Request) -> httpx.Response:
    """As an OpenAI endpoint."""
    assert request.url.host == "127.0.0.1"
    if request.url.path.startswith(("/v1/files", "/v1/batches")):
        return of_batches(request)
    asked = json.loads(request.content)
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    if request.url.path == "/v1/embeddings":
        data = [{"object": "embedding", "index": n, "embedding": [0.5]} for n, _ in enumerate(asked["input"])]
        return httpx.Response(200, json={"object": "list", "model": asked["model"], "data": data, "usage": usage})
    assert request.url.path == "/v1/chat/completions"
    assert asked["messages"][0]["role"] == "user"
    message = {"role": "assistant", "content": "14 + 29 = 43."}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"], "choices": [choice]}
    return httpx.Response(200, json={**body, "usage": usage})


def of_batches(request: httpx.Request) -> httpx.Response:
    """A batch of one file that is complete at once."""
    if request.url.path.endswith("/content"):
        return httpx.Response(200, text="{}\n")
    if request.url.path.startswith("/v1/files"):
        assert b'name="purpose"\r\n\r\nbatch' in request.content
        file = {"id": "file-1", "object": "file", "bytes": 3, "created_at": 0, "filename": "questions.jsonl"}
        return httpx.Response(200, json={**file, "purpose": "batch", "status": "processed"})
    batch = {"id": "batch_1", "object": "batch", "created_at": 0, "completion_window": "24h", "status": "completed"}
    of = {"endpoint": "/v1/chat/completions", "input_file_id": "file-1", "output_file_id": "file-2"}
    if request.method == "POST":
        assert json.loads(request.content) == {
            "input_file_id": "file-1",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
    return httpx.Response(200, json={**batch, **of})


@pytest.fixture
def names(tmp_path: Path) -> Iterator[Names]:
    """Those of a block; processes that it starts end with the test."""
    found: Names = {"__name__": "__main__"}
    yield found
    if "client" in found and hasattr(found["client"], "close"):
        found["client"].close()
    if "process" in found:
        process = found["process"]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        for stream in filter(None, (process.stdout, process.stderr)):
            stream.close()
        server.remove_segments(found["unit_spec"])
        segments.remove(segments.left([str(tmp_path)]))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs(block: Block, names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = (block.page, block.number)
    given = GIVEN.get(place, lambda folder: {})(tmp_path)
    monkeypatch.chdir(given.pop("__cwd__", tmp_path))
    asked: list[str] = []

    def client(**arguments: Any) -> openai.OpenAI:
        asked.append(arguments["base_url"])
        return made(**arguments, http_client=httpx.Client(transport=httpx.MockTransport(answer)))

    made = openai.OpenAI
    monkeypatch.setattr(openai, "OpenAI", client)
    names.update(given)
    exec(compile(block.code, str(block), "exec"), names)
    assert bool(asked) == (place in SERVED), "what asks a fleet is listed, with the test that does it"


def test_what_is_listed_is_there() -> None:
    there = {(block.page, block.number) for block in BLOCKS}
    assert there
    assert not (GIVEN.keys() | SERVED.keys()) - there
    assert all((ROOT / test).is_file() for test in SERVED.values())
