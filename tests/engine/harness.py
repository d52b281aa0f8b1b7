"""Real engines without a unit scheduler: the test grants the leases and reads the tokens itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import zmq

from muxserve import spec
from muxserve.cluster.machine import this_machine
from muxserve.costs.architecture import ITEM_BYTES, read_architecture
from muxserve.costs.language_models import language_model, seeing
from muxserve.memory import server
from muxserve.memory.client import MemoryClient
from muxserve.net import sockets
from muxserve.spec import ModelSpec, PoolSpec, UnitSpec
from muxserve.wire import (
    Abort,
    Admit,
    Detached,
    EngineHello,
    EngineLost,
    HandOff,
    HandOver,
    Lease,
    Message,
    Prefilled,
    Reset,
    Returned,
    StepReport,
    TokensHeader,
    decode,
    encode,
)
from tests.engine.nursery import end, nursery
from tests.support.patience import PATIENCE
from tests.support.thoroughness import cases
from tests.support.tiny_checkpoint import LANGUAGE_MODEL_OF, tiny_checkpoint
from tests.support.tiny_private import PRIVATE
from tests.support.tiny_seeing import tiny_seeing
from tests.support.unit_specs import model_spec, unit_spec_of

M = TypeVar("M", bound=Message)

ROOT = Path(__file__).resolve().parents[2]
# An engine that waits for pages when its lease ends says nothing, and nobody here minds the time: longer than any wait.
LEASE_SECONDS = 10 * PATIENCE
# One with as many KV heads as heads, one with fewer.
MODELS = {"arithmetic": ROOT / "configs/models/arithmetic", "frontdesk": ROOT / "configs/models/frontdesk"}
# Random ones of architectures whose layers differ, or see only a part of the sequence.
_TINY: dict[str, Callable[[], Path]] = {
    "mistral": partial(tiny_checkpoint, "mistral"),
    "gemma2": partial(tiny_checkpoint, "gemma2", layers=4),
    "gemma3": partial(tiny_checkpoint, "gemma3", layers=6),
    "gpt_oss": partial(tiny_checkpoint, "gpt_oss"),
    "deepseek_v2": partial(tiny_checkpoint, "deepseek_v2"),
    "deepseek_v3": partial(tiny_checkpoint, "deepseek_v3"),
    "granite_hybrid": partial(tiny_checkpoint, "granite_hybrid", layers=4),
    "nemotron_h": partial(tiny_checkpoint, "nemotron_h", layers=6),
    "qwen3_next": partial(tiny_checkpoint, "qwen3_next", layers=4),
    "qwen3_5": partial(tiny_checkpoint, "qwen3_5", layers=4),
    "qwen3_5_moe": partial(tiny_checkpoint, "qwen3_5_moe", layers=4),
}
# Usually one with a window, one with latents and one with states.
TINY = {kind: _TINY[kind] for kind in cases(_TINY, ["mistral", "deepseek_v2", "granite_hybrid"])}
# vLLM's experts in MXFP4 on CPU need the tiles of AMX, which not every processor has.
MXFP4 = "gpt_oss-mxfp4"
# Others, each served once: of more of today's families, and with those, multi-modal ones' texts. Usually one of
# these, and experts in MXFP4.
_FAMILIES = {
    "qwen2": 2, "qwen3": 2, "qwen3_moe": 2, "granite": 2, "phi3": 2, "nemotron": 2, "olmo3": 3, MXFP4: 2, "glm4_moe": 2,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Path]] = {
    kind: partial(tiny_checkpoint, kind, layers=_FAMILIES[kind]) for kind in cases(_FAMILIES, ["qwen2", MXFP4])
}
MULTI_MODAL: dict[str, Callable[[], Path]] = {
    kind: partial(tiny_checkpoint, kind, layers={"gemma3-mm": 6, "qwen3_5-mm": 4}.get(kind, 2))
    for kind in cases(LANGUAGE_MODEL_OF, ["mistral3"])
}
# Those that see images.
SEEING: dict[str, Callable[[], Path]] = {"idefics3": partial(tiny_checkpoint, "idefics3")}
# Those that see them with a cache of their own only. The last needs torchvision, which has no build for every torch.
_WITH_TORCHVISION = ["qwen2_5_vl"] if find_spec("torchvision") else []
SEEING_PRIVATE: dict[str, Callable[[], Path]] = {
    kind: partial(tiny_seeing, kind) for kind in [*cases(["aria", "blip2"], ["aria"]), *_WITH_TORCHVISION]
}
# Those whose cache the pool cannot hold.
PRIVATE_KINDS = cases(PRIVATE, ["llama4"])
# Those of `TINY` that keep one vector of each token instead of K and V by head.
LATENT = TINY.keys() & {"deepseek_v2", "deepseek_v3"}
# Those of `TINY` that keep a state of a sequence in some layers.
STATEFUL = TINY.keys() & {"granite_hybrid", "nemotron_h", "qwen3_next", "qwen3_5", "qwen3_5_moe"}
# Those among them that are computed in 16 bits: what else is in a batch, and how many ranks there are, changes the last
# bits, and now and then a token.
ROUNDED = TINY.keys() & {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
# The same weights with 8 and with 4 bits. On CPUs without AVX-512 vLLM has no kernels for `INT4`, nor for an FP8 cache.
INT4 = "atlas-int4"
QUANTISED = {name: ROOT / "configs/models" / name for name in ("atlas-int8", INT4)}
AVX512 = this_machine().avx512
START_SECONDS = 3 * PATIENCE
# Stands for a token that has not been heard yet.
MISSING = -1


def on_this_processor() -> dict[str, Callable[[], Path]]:
    """Those of `FAMILIES` for which vLLM has kernels here."""
    return {kind: make for kind, make in FAMILIES.items() if kind != MXFP4 or this_machine().amx}


def deployed_model(name: str, path: Path, ranks: int = 1, **changes: Any) -> ModelSpec:
    """A model as a fleet would deploy it, straight from its config.json; everything can be changed."""
    config = json.loads((path / "config.json").read_text())
    text = language_model(config)
    sees = seeing(config)
    config = sees or text or config
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"] if "kv_lora_rank" in config else 0
    if latent:
        head_dim = latent // 2
    architecture = read_architecture(config)
    # vLLM's kernels on CPU for quantised weights and for gated delta nets have no float32.
    bfloat16 = "quantization_config" in config or "linear_num_key_heads" in config
    values: dict[str, Any] = {
        "path": str(path),
        "dtype": "bfloat16" if bfloat16 else "float32",
        "layers": architecture.layers,
        "kv_heads": 1 if latent else max(1, config["num_key_value_heads"] // ranks),
        "head_dim": head_dim,
        "block_tokens": 64 if latent else 64 * 64 // head_dim,
        "quota_pages": 2000,
        "text_only": text is not None,
        "sees_images": sees is not None,
        "window": architecture.window,
        "windowed_layers": architecture.windowed if ranks == 1 else (),
        # Prompts of those with latent attention are computed in one piece.
        **({"max_num_batched_tokens": 1024, "latent": latent} if latent else {}),
    }
    if architecture.states is not None:
        values |= stateful(config, ranks, {**values, **changes})
    return model_spec(name, **{**values, **changes})


def private_model(name: str, path: Path, **changes: Any) -> ModelSpec:
    """A model with a cache of vLLM's own, as a fleet would deploy it."""
    config = json.loads((path / "config.json").read_text())
    text = language_model(config)
    architecture = read_architecture(text or config)
    values: dict[str, Any] = {
        "path": str(path),
        "text_only": text is not None and not changes.get("sees_images"),
        "kv": "private",
        "shape": "one",
        "kv_bytes": 64 << 20,
        "kv_heads": 0,
        "quota_pages": 0,
        "num_blocks": 2,
        # With states it is off unless it is asked for.
        "prefix_caching": architecture.states is None,
    }
    return model_spec(name, **{**values, **changes})


def stateful(config: dict[str, Any], ranks: int, values: dict[str, Any]) -> dict[str, Any]:
    """What is different of a model some of whose layers keep states."""
    architecture, dtype = read_architecture(config), values["dtype"]
    pages = architecture.attention_layers * values["kv_heads"]
    block = 2 * values["block_tokens"] * values["head_dim"] * ITEM_BYTES[dtype] * pages
    return {
        "layers": architecture.attention_layers,
        "state_blocks": -(-architecture.state_bytes(dtype, ranks) // block),
        "prefix_caching": False,
        "zeroed": dtype != "float32",
    }


def reply_to_of(unit_spec: UnitSpec) -> str:
    """Where the test takes tokens from engines."""
    return f"ipc://{unit_spec.socket('gateway')}"


# Starts a warm parent of a unit's name and file, with a log and its end of the control socket.
Parent = Callable[[str, Path, Path, socket.socket], psutil.Process]


class Engines:
    """The test's side of a family of engines: unit scheduler and gateway in one."""

    def __init__(self, unit_spec: UnitSpec, control: socket.socket, manager: subprocess.Popen[bytes]) -> None:
        self.unit_spec = unit_spec
        self.control = control
        self.manager = manager
        self.pids: dict[tuple[str, str], int] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.outputs: dict[str, list[Any]] = defaultdict(list)
        self.reports: list[tuple[str, Any]] = []
        self.held: dict[str, HandOver] = {}
        self.prefilled: dict[str, Prefilled] = {}
        self.hellos: list[EngineHello] = []
        self.headers: list[TokensHeader] = []
        self.exits: dict[int, int] = {}
        self._lease_id = 0
        self._incarnation = 0
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        sockets.bind_local(self._router, unit_spec.unit_address)
        self._pull = self._context.socket(zmq.PULL)
        sockets.bind_local(self._pull, reply_to_of(unit_spec))
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._encoder = MsgpackEncoder()

    # ------------------------------------------------------------ talking

    def send(self, engine: str, message: Message) -> None:
        self._router.send_multipart([engine.encode(), encode(message)])

    def ask(self, engine: str, message: Message, kind: type[M]) -> M:
        """What the engine answers."""
        since = len(self.reports)
        self.send(engine, message)
        self.until(lambda: any(isinstance(answer, kind) for _, answer in self.reports[since:]))
        return next(answer for _, answer in self.reports[since:] if isinstance(answer, kind))

    def body(
        self,
        request_id: str,
        prompt: list[int],
        eos: int | None = None,
        priority: int = 0,
        features: Any = None,
        **params: Any,
    ) -> bytes:
        """A request as the gateway's front end would encode it, with the `features` of its images."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        params.setdefault("temperature", 0.0)
        sampling_params = SamplingParams(**params)
        sampling_params.update_from_generation_config({}, eos)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            mm_features=features,
            sampling_params=sampling_params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            priority=priority,
        )
        return b"".join(bytes(frame) for frame in self._encoder.encode(request))

    def admit(self, request_id: str, body: bytes, **fields: Any) -> Admit:
        self._incarnation += 1
        return Admit(
            request_id=request_id,
            incarnation=self._incarnation,
            attempt=fields.pop("attempt", 1),
            gateway_epoch="test",
            reply_to=reply_to_of(self.unit_spec),
            body=body,
            **fields,
        )

    def adopt(self, request_id: str, body: bytes, left: HandOver | Detached, foreign: bool = False) -> Admit:
        """The request again, with the pages and the tokens that an engine `left`."""
        return self.admit(
            request_id,
            body,
            output_tokens=left.output_tokens,
            hand_off=HandOff(left.key, left.computed_tokens, foreign),
        )

    def lease(
        self,
        engine: str,
        admit: Iterable[Admit] = (),
        steps: int = 1000,
        tokens: int = 0,
        phase: Any = "both",
        alone: str = "",
    ) -> int:
        self._lease_id += 1
        self.send(
            engine,
            Lease(
                self._lease_id,
                steps=steps,
                seconds=LEASE_SECONDS,
                admit=list(admit),
                tokens=tokens,
                phase=phase,
                alone=alone,
            ),
        )
        return self._lease_id

    def pump(self, seconds: float = 0.05) -> None:
        """Take what has come; waits at most `seconds` for something."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._pull, zmq.POLLIN)
        for sock, _ in poller.poll(int(seconds * 1000)):
            while True:
                try:
                    frames = sock.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if sock is self._router and frames[0].startswith(b"\0"):
                    continue  # of an engine whose successor has its name already; ZeroMQ made one up for it
                if sock is self._router:
                    self._from_engine(frames[0].decode(), decode(frames[1]))
                else:
                    self._from_token_path(frames)

    def until(self, condition: Any, seconds: float = PATIENCE) -> None:
        """Pump until `condition()` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "waited too long"
            self.pump()

    def _from_engine(self, engine: str, message: Any) -> None:
        if isinstance(message, EngineHello):
            self.hellos.append(message)
            self.send(engine, Reset("test"))
            return
        self.reports.append((engine, message))
        if isinstance(message, StepReport):
            for hand_over in message.handed:
                self.held[hand_over.request_id] = hand_over
            for prefilled in message.prefilled:
                self.prefilled[prefilled.request_id] = prefilled

    def _from_token_path(self, frames: list[bytes]) -> None:
        header = decode(frames[0])
        assert isinstance(header, TokensHeader)
        self.headers.append(header)
        batch = self._decoder.decode(frames[1:] if len(frames) > 2 else frames[1])
        for (request_id, _, offset), output in zip(header.entries, batch.outputs, strict=True):
            assert output.request_id == request_id
            # Prefill and decode engine write to different connections: what comes later may be heard first.
            have = self.tokens[request_id]
            have += [MISSING] * (offset - len(have))
            have[offset : offset + len(output.new_token_ids)] = output.new_token_ids
            self.outputs[request_id].append(output)

    # ------------------------------------------------------------ whole requests

    def finished(self, request_id: str) -> bool:
        ended = any(output.finish_reason is not None for output in self.outputs[request_id])
        return ended and MISSING not in self.tokens[request_id]

    def returned(self) -> list[Returned]:
        return [r for _, m in self.reports if isinstance(m, StepReport) for r in m.returned]

    def lost(self) -> list[EngineLost]:
        return [m for _, m in self.reports if isinstance(m, EngineLost)]

    def serve(self, model: str, requests: dict[str, bytes]) -> None:
        """Prefill, hand over, decode, and prefill again what was preempted, until all are finished."""
        seen = len(self.reports)
        reported: set[str] = set()
        self.lease(f"{model}/prefill", [self.admit(r, body) for r, body in requests.items()])

        def progress() -> bool:
            nonlocal seen
            new, seen = self.reports[seen:], len(self.reports)
            for engine, report in new:
                if not isinstance(report, StepReport):
                    continue
                reported.update(report.finished)
                if report.lease_left <= 0 and report.running + report.waiting:
                    # Steps that find no pages use a lease up, too.
                    self.lease(engine)
                adopted = [
                    self.adopt(h.request_id, requests[h.request_id], h)
                    for h in report.handed
                    if h.request_id in requests
                ]
                if adopted:
                    self.lease(f"{model}/decode", adopted)
                again = [
                    self.admit(r.request_id, requests[r.request_id], output_tokens=r.output_tokens)
                    for r in report.returned
                ]
                if again:
                    self.lease(f"{model}/prefill", again)
            # The last token may come before the report of the step that computed it.
            return all(self.finished(request_id) and request_id in reported for request_id in requests)

        self.until(progress)

    def serve_both(self, model: str, requests: dict[str, bytes], mixed: bool = False) -> None:
        """Let an engine of both phases serve them: prompts first as long as there are pages for them, then decoding if
        there is something to decode, or with `mixed` both in every step."""
        engine = f"{model}/both"
        seen = len(self.reports)
        reported: set[str] = set()
        prompts = set(requests)
        decoding: set[str] = set()
        stuck = False
        phase = "both" if mixed else "prefill"
        self.lease(engine, [self.admit(r, body) for r, body in requests.items()], phase=phase)

        def progress() -> bool:
            nonlocal seen, phase, stuck, prompts, decoding
            new, seen = self.reports[seen:], len(self.reports)
            for _, report in new:
                if not isinstance(report, StepReport):
                    continue
                reported.update(report.finished)
                returned = {r.request_id for r in report.returned}
                prefilled = {p.request_id for p in report.prefilled}
                in_vain = bool(returned & prompts) or (report.steps > 0 and not report.tokens)
                left = decoding & returned.union(report.finished)
                decoding = (decoding | prefilled) - returned.union(report.finished)
                prompts = (prompts | returned) - prefilled.union(report.finished)
                again = [
                    self.admit(r.request_id, requests[r.request_id], output_tokens=r.output_tokens)
                    for r in report.returned
                ]
                # Only what decodes gives pages back.
                stuck = (stuck or in_vain) and bool(decoding) and not left
                wanted = "both" if mixed else "prefill" if prompts and not stuck else "decode"
                if again or wanted != phase or (report.lease_left <= 0 and report.running + report.waiting):
                    phase = wanted
                    self.lease(engine, again, phase=phase)
            return all(self.finished(request_id) and request_id in reported for request_id in requests)

        self.until(progress)

    def abort(self, engine: str, request_ids: list[str]) -> None:
        self.send(engine, Abort(request_ids))

    def memory(self) -> MemoryClient:
        return MemoryClient(self.unit_spec.memory_socket, "test", PATIENCE)

    def forget_prefixes(self, model: str) -> None:
        """No prefix of `model` is cached any more."""
        with self.memory() as client:
            client.reset_cache(client.map(model))

    @contextmanager
    def quota(self, model: str, blocks: int) -> Iterator[None]:
        """Let `model` have only so many blocks meanwhile, none of them in use as a cached prefix."""
        with self.memory() as client:
            client.reset_cache(client.map(model))
            usual = next(m["quota_pages"] for m in client.stats()["models"] if m["name"] == model)
            client.set_quotas({model: blocks * self.unit_spec.model(model).pages_per_block})
            try:
                yield
            finally:
                client.set_quotas({model: usual})

    def kill(self, model: str, phase: str) -> None:
        os.kill(self.pids[model, phase], signal.SIGKILL)

    def fork(self, model: str, phase: str) -> None:
        self.control.send(json.dumps({"op": "fork", "kind": "engine", "model": model, "phase": phase}).encode())

    def reborn(self, model: str, phase: str) -> int:
        """Pid of the engine that is forked after one has died."""
        hellos = len(self.hellos)
        self.fork(model, phase)
        self.expect_up({(model, phase)})
        self.until(lambda: len(self.hellos) > hellos)
        return self.pids[model, phase]

    def expect_up(self, waiting: set[tuple[str, str]]) -> None:
        """Follow the family's events until these engines are up.

        Raises:
            RuntimeError: one could not start.
        """
        while waiting:
            event = json.loads(self.control.recv(1 << 16))
            if event["event"] == "ready":
                for model, phase in sorted(waiting):
                    self.fork(model, phase)
            elif event["event"] == "failed":
                raise RuntimeError(event["error"])
            elif event["event"] == "exited":
                self.exits[event["pid"]] = event["status"]
            elif event["event"] == "up":
                self.pids[event["model"], event["phase"]] = event["pid"]
                waiting.discard((event["model"], event["phase"]))

    def rest(self, model: str, *phases: str) -> None:
        """Have these engines rest."""
        for phase in phases:
            self.control.send(json.dumps({"op": "rest", "model": model, "phase": phase}).encode())
        waiting = set(phases)
        while waiting:
            event = json.loads(self.control.recv(1 << 16))
            assert event["event"] == "rests", event
            waiting.discard(event["phase"])

    def expect_exit(self, pid: int) -> int:
        """How the process ended that the warm parent forked as `pid`; waits for it."""
        while pid not in self.exits:
            event = json.loads(self.control.recv(1 << 16))
            if event["event"] == "exited":
                self.exits[event["pid"]] = event["status"]
        return self.exits[pid]

    def close(self) -> None:
        self._context.destroy(linger=0)


def parent_of(module: str) -> Parent:
    """A warm parent that `module` is, run as a program."""

    def start(unit: str, file: Path, log: Path, control: socket.socket) -> psutil.Process:
        command = [sys.executable, "-m", module, "--unit-spec", str(file), "--control-fd", str(control.fileno())]
        with open(log, "wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, pass_fds=[control.fileno()], stdout=output, stderr=output)
        return psutil.Process(process.pid)

    return start


@contextmanager
def engines(
    models: list[ModelSpec], pages: int = 8000, ranks: int = 1, stages: int = 1, parent_of: Parent | None = None
) -> Iterator[Engines]:
    """Memory manager, warm parent and the engines of each model; `models` are those of one of the `ranks`. `parent_of`:
    starts another warm parent than the usual one."""
    first = models[0]
    item = 1 if first.engine_args.get("kv_cache_dtype") == "fp8" else ITEM_BYTES[first.dtype]
    page_bytes = 2 * first.block_tokens * first.head_dim * item
    with tempfile.TemporaryDirectory(prefix="mux", dir="/tmp") as run_dir:
        staged = [msgspec.structs.replace(model, stages=stages) for model in models]
        unit_spec = unit_spec_of(run_dir, staged, PoolSpec("main", page_bytes, pages), ranks=ranks)
        unit_spec.log_dir.mkdir()
        path = Path(run_dir) / "unit.json"
        spec.save(unit_spec, path)
        manager = server.start(unit_spec)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = (parent_of or nursery().fork)(unit_spec.unit, path, unit_spec.log_dir / "warm-parent.log", theirs)
        theirs.close()
        family = Engines(unit_spec, ours, manager)
        try:
            family.control.settimeout(START_SECONDS)
            wanted: set[tuple[str, str]] = {(model.name, phase) for model in models for phase in model.engines}
            count = len(wanted)
            family.expect_up(wanted)
            family.until(lambda: len(family.hellos) >= count)
            yield family
        except BaseException:
            for file in sorted(unit_spec.log_dir.iterdir()):
                print(f"--- {file.name}\n{file.read_text()[-3000:]}", file=sys.stderr)
            raise
        finally:
            family.close()
            ours.close()
            end(parent)
            family.manager.terminate()
            family.manager.wait(PATIENCE)
