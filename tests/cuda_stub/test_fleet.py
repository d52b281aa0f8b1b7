"""Whole fleets in vLLM's CUDA build on a stand-in for two GPUs: `muxserve deploy`, requests, and what dies.

    make cuda-stub

Kernels compute nothing, so that answers mean nothing: only that all of their tokens come. What the engines do with
graphs and contexts is read from the trace of the stand-in (`streams.cpp`).
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml

from tests.cuda_stub import share
from tests.cuda_stub.conftest import Start
from tests.cuda_stub.stand_ins import ROOT, WHEELS
from tests.cuda_stub.trace import Trace
from tests.e2e.fleet import Fleet
from tests.support.patience import PATIENCE
from tests.support.tiny_checkpoint import Kind, data_url, tiny_checkpoint
from tests.support.tiny_seeing import tiny_seeing

pytestmark = pytest.mark.skipif(not (WHEELS / ".installed").exists(), reason="needs vLLM's CUDA build: make cuda-stub")

TOKENS = 300
SIZES = {"rate": 2, "max_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 512}
EAGER = {"enforce_eager": True}
BATCHES = [1, 2, 4]
# Captured whole, of the model as it is: what torch.compile makes of it takes half a minute.
WHOLE = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": BATCHES}}


def model(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "path": str(ROOT / "configs/models" / name), **SIZES, "engine_args": EAGER, **more}


PROMPT = "What the kernels would compute, nobody knows"


def stream(fleet: Fleet, name: str, tokens: int = TOKENS, prompt: str = PROMPT) -> openai.Stream[Any]:
    return fleet.client.completions.create(
        model=name,
        prompt=prompt,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )


def length(answer: openai.Stream[Any]) -> int:
    """How many tokens the rest of it brings the answer to."""
    *_, last = answer
    return int(last.usage.completion_tokens)


def through(fleet: Fleet, name: str, death: Callable[[], object]) -> int:
    """The tokens of an answer during which something dies."""
    answer = stream(fleet, name)
    next(answer)
    death()
    return length(answer)


def prefilled(fleet: Fleet, name: str) -> int:
    """How many tokens of prompts the model has computed."""
    (unit,) = fleet.get("/fleet").json()["units"]
    return int(unit["state"]["models"][name]["phases"]["prefill"]["tokens"])


def said(fleet: Fleet, what: str) -> int:
    """How often the controller has said it."""
    return (fleet.directory / "deploy.log").read_text().count(what)


@pytest.mark.parametrize(("engines", "phases"), [("one", ("both",)), ("split", ("decode", "prefill"))])
def test_two_models_on_a_gpu_lose_nothing_to_deaths(deploy: Start, engines: str, phases: tuple[str, ...]) -> None:
    models = (model(name, engines=engines) for name in ("atlas", "frontdesk"))
    with deploy(*models, gpus=1, mps="off") as fleet:
        assert length(stream(fleet, "atlas")) == length(stream(fleet, "frontdesk")) == TOKENS
        for words in (*((f"atlas/{phase}",) for phase in phases), ("muxserve-memory-manager", "--socket")):
            assert through(fleet, "atlas", partial(fleet.kill, *words)) == TOKENS
            fleet.wait_healthy()
        assert length(stream(fleet, "frontdesk")) == TOKENS
        assert said(fleet, "weights of atlas: loading weights") == 1, "they were kept"


def test_memory_decides_which_models_are_awake(deploy: Start) -> None:
    """Three models with two engines each, and room for one or two beside the pool. Engines end when their models
    sleep."""
    names = ("arithmetic", "atlas", "frontdesk")
    limit = 6 << 30

    def awake(fleet: Fleet) -> dict[str, Any]:
        memory = fleet.get("/fleet").json()["memory"]
        assert memory["used_bytes"] <= memory["limit_bytes"] == limit
        return {name: each for name, each in memory["models"].items() if each["residence"] == "awake"}

    memory = {"limit": limit, "min_residence": 0, "resting_engines": "off"}
    models = [model(name, engines="split") for name in names]
    with deploy(*models, memory=memory, gpus=1, mps="off") as fleet:
        # Each is loaded while there is nothing else to do; its weights are in the host's memory from then on.
        fleet.wait(
            lambda: all(said(fleet, f"weights of {name}: loading weights") for name in names), PATIENCE, "loaded"
        )
        fleet.wait(lambda: all(said(fleet, f"{name} is served by") for name in names), PATIENCE, "woken ahead")
        controller = psutil.Process(fleet.process.pid)
        files = []
        for _ in range(3):
            most = 0
            for name in names:
                assert length(stream(fleet, name, 4)) == 4
                assert name in awake(fleet)
                most = max(most, controller.num_fds())
            files.append(most)
        # What is kept of the weights of those that sleep has been let go of.
        assert files[2] <= files[1] + 1
        for name in names:
            assert said(fleet, f"weights of {name}: loading weights") == 1
            assert said(fleet, f"weights of {name}: copying weights back") > 0
        # Whatever dies while a model is woken, or serves: its requests are answered.
        for words in (("atlas/decode",), ("atlas/prefill",), ("muxserve-memory-manager", "--socket")):
            others = [name for name in names if name != "atlas"]
            while "atlas" in awake(fleet):
                for name in others:
                    length(stream(fleet, name, 4))
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(lambda: length(stream(fleet, "atlas")))
                fleet.wait(lambda words=words: fleet.part(*words) is not None, PATIENCE, words[0])
                fleet.kill(*words)
                assert answer.result() == TOKENS
            fleet.wait_healthy()


def test_engines_stay_while_their_models_sleep(deploy: Start) -> None:
    """With what they have captured: a model that is woken again only has its weights copied back. Of three models,
    with one engine each, two have room at a time, under MPS."""
    names = ("arithmetic", "atlas", "frontdesk")
    memory = {"limit": 7 << 30, "min_residence": 0, "resting_engines": 3 << 30}
    models = [model(name, engine_args=WHOLE) for name in names]

    def asleep(fleet: Fleet) -> set[str]:
        found = fleet.get("/fleet").json()["memory"]["models"]
        return {name for name, each in found.items() if each["residence"] == "asleep"}

    def pid(fleet: Fleet, name: str) -> int:
        part = fleet.part(f"engine {name}/both")
        assert part is not None
        return part.pid

    def until_asleep(fleet: Fleet, name: str) -> None:
        others = [other for other in names if other != name]

        def ask() -> bool:
            assert [length(stream(fleet, other, 4)) for other in others] == [4, 4]
            return name in asleep(fleet)

        fleet.wait(ask, PATIENCE, f"asleep: {name}")

    with deploy(*models, memory=memory, gpus=1, mps="on", sm_sharing="mps") as fleet:
        for name in names:
            assert length(stream(fleet, name, 4)) == 4
        before = {name: pid(fleet, name) for name in names}
        for _ in range(3):
            for name in names:
                until_asleep(fleet, name)
                assert length(stream(fleet, name, 40)) == 40
        assert {name: pid(fleet, name) for name in names} == before
        for name in names:
            trace = engine_trace(fleet, f"{name}/both")
            assert len(trace.captured) == len(BATCHES), "once"
            assert trace.refused == []
            assert len(trace.replayed) > 3 * 39
            assert said(fleet, f"weights of {name}: loading weights") == 1
            assert said(fleet, f"weights of {name}: copying weights back") >= 3
        # Whatever dies while they rest.
        for words in (("atlas/both",), ("muxserve-memory-manager", "--socket"), ("warm parent",)):
            until_asleep(fleet, "atlas")
            fleet.kill(*words)
            assert length(stream(fleet, "atlas")) == TOKENS
            fleet.wait_healthy()


def test_busy_models_take_turns_and_their_engines_stay(deploy: Start) -> None:
    """Three models that are asked all the time, and room for two beside their engines. Whose turn is over stops within
    an answer, and goes on when it is woken: all answers have all their tokens, also when something dies meanwhile."""
    names = ("arithmetic", "atlas", "frontdesk")
    memory = {"limit": 7 << 30, "min_residence": 0, "resting_engines": 3 << 30}
    models = [model(name, engine_args=WHOLE, slo={"ttft_ms": 3000, "tpot_ms": 100}) for name in names]

    def memory_of(fleet: Fleet) -> dict[str, Any]:
        told: dict[str, Any] = fleet.get("/fleet").json()["memory"]
        return told

    def ended(fleet: Fleet) -> int:
        told: int = memory_of(fleet)["turns"]["ended"]
        return told

    with deploy(*models, memory=memory, gpus=1, mps="on", sm_sharing="mps") as fleet:
        for name in names:
            assert length(stream(fleet, name, 4)) == 4
        stopping = threading.Event()

        def ask(name: str) -> int:
            count = 0
            while not stopping.is_set():
                assert length(stream(fleet, name)) == TOKENS
                count += 1
            return count

        with ThreadPoolExecutor(2 * len(names)) as pool:
            asked = [pool.submit(ask, name) for name in names for _ in range(2)]
            try:
                fleet.wait(lambda: ended(fleet) >= 6, 4 * PATIENCE, "six turns")
                for words in (
                    ("atlas/both",),
                    ("muxserve-memory-manager", "--socket"),
                    ("muxserve.global_scheduler",),
                ):
                    fleet.wait(lambda words=words: fleet.part(*words) is not None, PATIENCE, words[0])
                    fleet.kill(*words)
                    fleet.wait_healthy()
                    before = ended(fleet)
                    fleet.wait(lambda before=before: ended(fleet) > before, 4 * PATIENCE, f"a turn after {words}")
            finally:
                stopping.set()
            assert all(each.result() > 0 for each in asked)
        assert all(said(fleet, f"weights of {name}: loading weights") == 1 for name in names)


def engine_pids(fleet: Fleet, name: str) -> set[int]:
    """Of both engines of a model."""
    engines = [fleet.part(f"engine {name}/{phase}") for phase in ("prefill", "decode")]
    pids = {each.pid for each in engines if each is not None}
    assert len(pids) == 2
    return pids


def test_models_come_and_go_where_memory_decides(deploy: Start, tmp_path: Path) -> None:
    """One that was added is loaded when it is asked for, and its engines stay while it sleeps. Nothing of one that was
    removed is kept."""
    memory = {"limit": 12 << 30, "min_residence": 0, "resting_engines": 6 << 30}
    names = ("arithmetic", "frontdesk")
    more = tmp_path / "more.yaml"
    more.write_text(yaml.safe_dump({"models": [model("atlas", engines="split", engine_args=WHOLE)]}))

    def known(fleet: Fleet) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = fleet.get("/fleet").json()["memory"]["models"]
        return found

    with deploy(
        *(model(name, engines="split", engine_args=WHOLE) for name in names), memory=memory, gpus=1, mps="off"
    ) as fleet:
        for _ in range(2):
            added = fleet.command("add", str(more))
            assert added.returncode == 0, added.stderr
            assert length(stream(fleet, "atlas")) == TOKENS
            pids = engine_pids(fleet, "atlas")

            def asleep() -> bool:
                assert [length(stream(fleet, name, 4)) for name in names] == [4, 4]
                return known(fleet)["atlas"]["residence"] == "asleep"

            fleet.wait(asleep, PATIENCE, "asleep")
            # The controller says so with its next measurement.
            fleet.wait(lambda: known(fleet)["atlas"]["engines_rest"], PATIENCE, "its engines rest")
            assert known(fleet)["atlas"]["copy_bytes"] > 0
            assert length(stream(fleet, "atlas")) == TOKENS
            assert engine_pids(fleet, "atlas") == pids
            fleet.wait(asleep, PATIENCE, "asleep again")
            removed = fleet.command("remove", "atlas")
            assert removed.returncode == 0, removed.stderr
            assert set(known(fleet)) == set(names)
            assert not any(psutil.pid_exists(pid) for pid in pids)
        assert said(fleet, "weights of atlas: loading weights") == 2, "once each time"


def computing(fleet: Fleet, name: str, before: int) -> int:
    """`prefilled` when the unit has told of more than `before`."""
    fleet.wait(lambda: prefilled(fleet, name) > before, PATIENCE, "told of its steps")
    return prefilled(fleet, name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_with_sinks_and_with_latents_share_gpus(deploy: Start, ranks: int) -> None:
    """With graphs of whole decode batches. A prompt of latents is computed in two chunks, the second beside what the
    first has left in the pages, and is found there when it comes again."""
    paths = {"sinks": tiny_checkpoint("gpt_oss"), "latents": tiny_checkpoint("deepseek_v3", head_dim=128)}
    options = {"engine_args": WHOLE, "max_num_batched_tokens": 128}
    models = [model(name, engines="split", path=str(path), **options) for name, path in paths.items()]
    with deploy(*models, gpus=ranks, mps="off") as fleet:
        for name in paths:
            assert length(stream(fleet, name)) == TOKENS
            assert through(fleet, name, partial(fleet.kill, f"{name}/decode")) == TOKENS
            fleet.wait_healthy()
            assert length(stream(fleet, name)) == TOKENS
        prompt = PROMPT + 160 * "."
        computed = []
        for _ in range(2):
            before = prefilled(fleet, "latents")
            assert length(stream(fleet, "latents", tokens=8, prompt=prompt)) == 8
            computed.append(computing(fleet, "latents", before) - before)
        # Three blocks of 64 tokens were found.
        assert computed[0] - computed[1] == 192


def test_a_model_that_answers_with_vectors_shares_a_gpu(deploy: Start) -> None:
    """Prompts of one step and of three; what the vectors are nobody knows."""
    options = {"engine_args": {**EAGER, "runner": "pooling"}, "max_num_batched_tokens": 128}
    embedder = model("embedder", path=str(tiny_checkpoint("qwen3")), **options)
    with deploy(embedder, model("atlas"), gpus=1, mps="off") as fleet:
        answer = fleet.client.embeddings.create(model="embedder", input=["a", "all work and no play " * 15])
        first, second = (len(each.embedding) for each in answer.data)
        assert first == second > 0
        assert length(stream(fleet, "atlas", 4)) == 4


def test_a_model_with_a_private_cache_shares_a_gpu(deploy: Start) -> None:
    """It loses nothing to the death of its engine, nor to that of the memory manager, whose pool it does not use."""
    with deploy(model("arithmetic", kv="private", engine_args=WHOLE), model("atlas"), gpus=1, mps="off") as fleet:
        assert length(stream(fleet, "arithmetic")) == length(stream(fleet, "atlas")) == TOKENS
        assert len(engine_trace(fleet, "arithmetic/both").replayed) >= TOKENS - 2
        for words in (("arithmetic/both",), ("muxserve-memory-manager", "--socket")):
            assert through(fleet, "arithmetic", partial(fleet.kill, *words)) == TOKENS
            fleet.wait_healthy()
        assert length(stream(fleet, "atlas")) == TOKENS


def test_a_model_with_a_private_cache_sees_images(deploy: Start) -> None:
    """All of Qwen2.5-VL, through the death of its engine."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(100, 80)}}, {"type": "text", "text": PROMPT}]
    asked: Any = [{"role": "user", "content": parts}]
    with deploy(model("seeing", path=str(tiny_seeing("qwen2_5_vl")), kv="private"), gpus=1, mps="off") as fleet:
        (found,) = fleet.get("/fleet").json()["models"]
        assert found["kv"] == "private"

        def begin() -> openai.Stream[Any]:
            return fleet.client.chat.completions.create(
                model="seeing",
                messages=asked,
                max_tokens=TOKENS,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )

        assert length(begin()) == TOKENS
        answer = begin()
        next(answer)
        fleet.kill("seeing/both")
        assert length(answer) == TOKENS


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_with_states_share_gpus(deploy: Start, ranks: int) -> None:
    """With graphs of whole decode batches; the text of a multi-modal one, as Qwen3.5 is published. A prompt that is
    known goes on behind a snapshot of its states."""
    kinds: dict[str, Kind] = {"spaces": "granite_hybrid", "deltas": "qwen3_5-mm", "experts": "nemotron_h-moe"}
    options = {"engine_args": WHOLE, "max_num_batched_tokens": 128, "prefix_caching": True}
    paths = {name: str(tiny_checkpoint(kind, layers=3)) for name, kind in kinds.items()}
    models = [model(name, engines="split", path=path, **options) for name, path in paths.items()]
    with deploy(*models, gpus=ranks, gpu_memory=0.1, mps="off") as fleet:
        for name in kinds:
            assert length(stream(fleet, name)) == TOKENS
            assert through(fleet, name, partial(fleet.kill, f"{name}/decode")) == TOKENS
            fleet.wait_healthy()
            assert through(fleet, name, lambda: fleet.kill("muxserve-memory-manager", "--socket")) == TOKENS
            fleet.wait_healthy()
            prompt = PROMPT + 160 * "."
            computed = []
            for _ in range(3):
                before = prefilled(fleet, name)
                assert length(stream(fleet, name, tokens=8, prompt=prompt)) == 8
                computed.append(computing(fleet, name, before) - before)
            assert computed[2] < computed[0] / 2, computed


def test_two_ranks_go_on_when_the_mps_server_is_in_fault(deploy: Start) -> None:
    """Engines end, since they cannot compute any more; weights and pool are outside MPS and stay."""
    with deploy(model("atlas", engines="split", engine_args=WHOLE), gpus=2, mps="on") as fleet:
        assert length(stream(fleet, "atlas")) == TOKENS
        fault = fleet.directory / "mps" / "fault"

        def fail() -> None:
            fault.touch()
            fleet.wait(lambda: said(fleet, "ended with the MPS server"), PATIENCE, "told of the fault")
            fault.unlink()

        assert through(fleet, "atlas", fail) == TOKENS
        fleet.wait_healthy()
        assert said(fleet, "weights of atlas: loading weights") == 1
        assert said(fleet, "memory manager: starting") == 1
        # A worker of one rank takes its engine along.
        assert through(fleet, "atlas", lambda: fleet.kill("worker atlas/decode rank 1")) == TOKENS


def test_a_pipeline_of_two_stages(deploy: Start) -> None:
    with deploy(model("atlas", stages=2), gpus=2, mps="off") as fleet:
        assert through(fleet, "atlas", lambda: fleet.kill("worker atlas", "rank 1")) == TOKENS
        assert length(stream(fleet, "atlas")) == TOKENS


def engine_trace(fleet: Fleet, engine: str) -> Trace:
    """What the process that is now this engine has done."""
    process = fleet.part(f"engine {engine}")
    assert process is not None
    return Trace.of(fleet.directory / "trace", process.pid)


def test_graphs_of_every_batch_are_captured_and_replayed(deploy: Start) -> None:
    """Decode batches whole, others in pieces between attention layers, by what torch.compile has made of the model."""
    graphs = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": BATCHES}
    pieces = model("atlas", engines="split", engine_args={"compilation_config": graphs})
    with deploy(pieces, gpus=1, mps="off") as fleet:
        layers = json.loads((ROOT / "configs/models/atlas/config.json").read_text())["num_hidden_layers"]
        captured = len(BATCHES) * (1 + layers + 1)
        before = engine_trace(fleet, "atlas/decode")
        assert len(before.captured) == captured
        assert before.refused == []
        assert length(stream(fleet, "atlas")) == TOKENS
        # A step of one request is one graph, which was captured last of all whole ones.
        replayed = engine_trace(fleet, "atlas/decode").replayed
        assert max(Counter(replayed).values()) >= TOKENS - 2
        # With the pool at its old address they are as good as before.
        assert through(fleet, "atlas", lambda: fleet.kill("muxserve-memory-manager", "--socket")) == TOKENS
        fleet.wait_healthy()
        assert len(engine_trace(fleet, "atlas/decode").captured) == captured
        assert through(fleet, "atlas", lambda: fleet.kill("atlas/decode")) == TOKENS
        after = engine_trace(fleet, "atlas/decode")
        assert len(after.captured) == captured
        assert len(after.replayed) > 0


def test_graphs_are_captured_anew_when_the_pool_has_moved(deploy: Start) -> None:
    """Where memory cannot be exported, holders stay, and who has restarted allocates a pool of its own."""
    lies = {"FAKE_CUDA_NO_VMM": "1"}
    with deploy(model("atlas", engines="split", engine_args=WHOLE), gpus=1, mps="off", lies=lies) as fleet:
        assert fleet.part("weights atlas") is not None
        assert length(stream(fleet, "atlas")) == TOKENS
        assert through(fleet, "atlas", lambda: fleet.kill("muxserve-memory-manager", "--socket")) == TOKENS
        fleet.wait_healthy()
        moved = engine_trace(fleet, "atlas/decode")
        assert len(moved.captured) == 2 * len(BATCHES)
        assert len(moved.dropped) == len(BATCHES)
        assert not set(moved.replayed_after_last_capture) & set(moved.dropped)
        # An engine maps the weights again; when who has them dies, it ends, and they are loaded again.
        assert through(fleet, "atlas", lambda: fleet.kill("atlas/decode")) == TOKENS
        fleet.wait_healthy()
        assert said(fleet, "weights of atlas: loading weights") == 1
        assert through(fleet, "atlas", lambda: fleet.kill("weights atlas")) == TOKENS
        fleet.wait_healthy()
        assert said(fleet, "weights of atlas: loading weights") == 2


def test_shares_of_leases_choose_the_context(deploy: Start, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    names = ("atlas", "frontdesk")
    with deploy(
        *(model(name, engines="split", engine_args=WHOLE) for name in names),
        gpus=1, gpu_memory=0.1, mps="on", sm_sharing="green_contexts",
        lies={"CUDA_STUB_LOSES": str(lost)},
    ) as fleet:  # fmt: skip
        for _ in range(3):
            answers = [stream(fleet, name) for name in names for _ in range(2)]
            assert [length(answer) for answer in answers] == [TOKENS] * 4
        whole = (0, 132)
        for name in names:
            decode, prefill = (engine_trace(fleet, f"{name}/{phase}") for phase in ("decode", "prefill"))
            # There are 16 parts of 8 SMs: decode from the end, prefill from the front.
            assert decode.made == [(96, 32), (64, 64), (32, 96)]
            assert prefill.made == [(0, 32), (0, 64), (0, 96)]
            # In each of them the same graphs.
            assert Counter(decode.captured.values()) == dict.fromkeys((*decode.made, whole), len(BATCHES))
            assert len(decode.replayed) > 0
            for trace in (decode, prefill):
                assert trace.refused == []
                # Kernels and graphs of a step are those of the context that its lease has chosen.
                assert trace.astray == []
        used = {place for name in names for place in engine_trace(fleet, f"{name}/decode").chosen}
        assert len(used) > 1, "shares have changed"
        assert engine_trace(fleet, "atlas/decode").asked > 0

        def find() -> None:
            fleet.wait(lambda: said(fleet, "is not current any more"), PATIENCE, "told of the lost context")
            lost.unlink()

        # It looks when a lease has another share, and ends; the next engine has contexts of its own.
        lost.touch()
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(find)
            while not found.done():
                answers = [stream(fleet, name) for name in names]
                assert [length(answer) for answer in answers] == [TOKENS] * 2
            found.result()
        fleet.wait_healthy()


def test_kernels_that_ask_for_a_stream_compute_in_the_context_of_the_lease(deploy: Start, tmp_path: Path) -> None:
    """Marlin's do, and vLLM would make one for them, in whichever context is current at the first step."""
    path = share.checkpoint(tmp_path, "experts, gptq")
    experts = {**model("experts", engines="split", engine_args={**WHOLE, "load_format": "dummy"}), "path": str(path)}
    with deploy(experts, gpus=1, gpu_memory=0.1, mps="on", sm_sharing="green_contexts") as fleet:
        for _ in range(3):
            assert [length(answer) for answer in [stream(fleet, "experts") for _ in range(2)]] == [TOKENS] * 2
        for phase in ("prefill", "decode"):
            trace = engine_trace(fleet, f"experts/{phase}")
            assert len(set(trace.chosen)) > 1, "shares have changed"
            assert trace.astray == []
