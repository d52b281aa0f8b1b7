"""Engines that compute nothing: their steps take as long as the cost model says, and their answers are made up.

All else of an engine is real: vLLM's scheduler, blocks of the pool, hand-overs, leases. Only vLLM's worker is another
one, which needs no weights. It stands for all ranks; the stages of a pipeline are threads of it
(`muxserve.engine.simulated_stages`). Jobs of a unit that run at the same time slow each other down as the cost model
says; for that each engine writes into a file of the unit what its job asks of the device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from vllm.pooling_params import PoolingParams
from vllm.tasks import SupportedTask
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from muxserve.costs import LatencyModel, Load, ModelArchitecture, read_architecture
from muxserve.costs.architecture import ITEM_BYTES, split_layers
from muxserve.costs.calibration import LINKS, graphs_of
from muxserve.costs.devices import device
from muxserve.costs.latency import EngineShape
from muxserve.costs.measured import latency_model
from muxserve.costs.stages import costs_of_stages
from muxserve.costs.step_costs import StepCosts, StepWork
from muxserve.engine.binding import current, place_of
from muxserve.engine.runner import RESUMED_OUTPUT
from muxserve.engine.simulated_stages import SimulatedStage, StagedOutput, StageLink, StageThreads
from muxserve.engine.simulated_vectors import MadeUpVectors
from muxserve.engine.stage_clock import StageClocks
from muxserve.net.process_rows import ProcessRows
from muxserve.spec import SimulatedSpec, UnitSpec

# An answer of a request that may be as long as it likes.
ANSWER_TOKENS = 128
# How often a job looks who runs beside it.
_LOOK_SECONDS = 0.002
# What is left of a job and too short to sleep for.
_SHORTEST_SECONDS = 1e-6
# No engine needs so long for its own work.
_MOST_BETWEEN = 0.005
_FIELDS = 2 + len(Load._fields)
# Number of different tokens in an answer, which take turns.
_DIFFERENT = 7
# In the run directory of a unit with a device of its own.
DEVICE_FILE = "device"
# The memory that vLLM hears of; the pool is the memory manager's.
_CACHE_BYTES = 64 << 20


@dataclass(slots=True)
class _Sequence:
    """A request in this engine: its tokens that are known, the output tokens among them, and whether it goes on behind
    the end of an answer. A request for vectors has what is asked for, and its tokens."""

    tokens: int
    output: int
    endless: bool
    pooling: PoolingParams | None = None
    prompt: Sequence[int] = ()


class SharedDevice:
    """The jobs that run now on the device that all units of a machine share, in a file that all engines map: a row for
    each process, with its pid, until when its job counts, and what that asks of the device."""

    def __init__(self, path: Path, device: str, latency: LatencyModel) -> None:
        self._device = device
        self._latency = latency
        rows = ProcessRows(path, _FIELDS)
        self._rows = np.asarray(rows.numbers).reshape(-1, _FIELDS)
        self._mine = rows.mine // _FIELDS
        self._rows[self._mine, 1:] = 0.0

    def run(self, seconds: float, load: Load, after: float = 0.0) -> None:
        """Run a job that takes so long alone. Others are slowed down for `after` seconds more."""
        left, now = seconds, time.monotonic()
        while left > _SHORTEST_SECONDS:
            self._rows[self._mine, 1:] = (now + 4 * _LOOK_SECONDS, *load)
            beside = self._rows[:, 1] > now
            beside[self._mine] = False
            others = [Load(*row) for row in self._rows[beside, 2:].tolist()]
            slow = self._latency.slowdowns(self._device, [load, *others])[0]
            time.sleep(min(left * slow, _LOOK_SECONDS))
            before, now = now, time.monotonic()
            left -= (now - before) / slow
        self._rows[self._mine, 1] = now + after


class SimulatedWorker(WorkerBase):
    """`worker_cls` of simulated engines."""

    # In a pipeline: what counts the seconds of its stages, and the micro-batch whose tokens are asked for next.
    clocks: StageClocks | None = None
    _begun: Future[None] | None = None

    def init_device(self) -> None:
        unit_spec, model, _ = place_of(self.vllm_config)
        assert unit_spec.simulated is not None
        self.model = unit_spec.model(model)
        self._unit_spec: UnitSpec = unit_spec
        # An encoder may have none.
        ends = getattr(self.model_config.hf_config, "eos_token_id", None)
        self._ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        self._plain = _plain_token(self.model_config.get_vocab_size(), self._ends)
        self._vectors = MadeUpVectors(self.model_config) if self.model.pooling else None
        self._sequences: dict[str, _Sequence] = {}
        self._device: SharedDevice | None = None
        self._stages: StageThreads | None = None
        self._step: tuple[list[str], list[bool]] = ([], [])
        # The engine's own work between two steps in a row, which is part of what cost models call a step: the shortest
        # pause so far, since in longer ones it waited for a lease.
        self._ended = 0.0
        self._between = _MOST_BETWEEN

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """There is nothing to load."""

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        """What vLLM would use the model for."""
        return ("generate",) if self._vectors is None else self._vectors.tasks

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """As the model's attention layers would say, if they keep any KV."""
        model, dtype = self.model, self.model_config.dtype
        layers, heads, head_dim, block = model.layers, model.kv_heads, model.head_dim, model.block_tokens
        if model.private:
            architecture = self._architecture()
            # Whatever its layers are, as large as all of them are together.
            layers, block = architecture.layers, self.cache_config.block_size
            head_dim = architecture.kv_bytes_per_token(model.dtype) // (2 * dtype.itemsize * layers)
            heads = 1 if head_dim else 0
        if not heads:
            return {}
        spec = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=head_dim, dtype=dtype)
        return {f"model.layers.{layer}.self_attn.attn": spec for layer in range(layers)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Nobody reads the pool."""
        return [layout.name for layout in KVCacheLayout]

    def determine_available_memory(self) -> int:
        """In bytes."""
        return _CACHE_BYTES

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """The pool stays untouched."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """There is nothing to compile."""
        return CompilationTimes(0.0, 0.0)

    def rebind_pool(self) -> None:
        """There is a new memory manager, and a new pool."""

    def forget_step(self) -> None:
        """A step raised an exception half-way."""
        self._step = ([], [])
        self._begun = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Take the time of the step; its tokens are asked for by `sample_tokens`. A pipeline only begins it."""
        self._between = min(self._between, time.monotonic() - self._ended)
        for finished in scheduler_output.finished_req_ids:
            self._sequences.pop(finished, None)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        if self._unit_spec.stages > 1:
            self._begun = self._in_stages().begin(self._schedule(scheduler_output))
            return None
        device = self._on_device()
        work = self._schedule(scheduler_output)
        own = self._between if self._between < _MOST_BETWEEN else 0.0
        # What is left out of the step here is of it for its neighbours: cost models have no pauses between steps.
        device.run(self._costs.seconds(work) - own, self._costs.load(work), own)
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """A token, or vectors, for each sequence whose known tokens are all computed."""
        step, self._step = self._step, ([], [])
        begun, self._begun = self._begun, None
        allowed = _allowed(grammar_output)
        if begun is None:
            return self._sampled(step, allowed)
        return StagedOutput(begun, lambda: self._sampled(step, allowed))

    def _sampled(self, step: tuple[list[str], list[bool]], allowed: Mapping[str, Sequence[int]]) -> ModelRunnerOutput:
        ids, through = step
        output = ModelRunnerOutput(ids, {request: at for at, request in enumerate(ids)})
        if self._vectors is None:
            output.sampled_token_ids = [
                [self._token(request, allowed.get(request))] if has else []
                for request, has in zip(ids, through, strict=True)
            ]
        else:
            output.pooler_output = [
                self._pooled(self._vectors, request) if has else None for request, has in zip(ids, through, strict=True)
            ]
        self._ended = time.monotonic()
        return output

    def _on_device(self) -> SharedDevice:
        """The device, opened in the engine's own process: the one that it is forked from has others as well."""
        if self._device is None:
            latency, shape = self._latency_on()
            self._costs = StepCosts(latency.engine(self._architecture(), shape))
            self._device = SharedDevice(self._device_file(), shape.device, latency)
        return self._device

    def _in_stages(self) -> StageThreads:
        """Made in the engine's own process, too."""
        if self._stages is None:
            architecture = self._architecture()
            latency, shape = self._latency_on()
            link = _link(shape, architecture.hidden)
            split = split_layers(architecture.layers, self._unit_spec.stages)
            costs = costs_of_stages(split, latency, architecture, shape)
            self._stages = StageThreads(
                [
                    SimulatedStage(
                        StepCosts(each),
                        SharedDevice(self._device_file(stage), shape.device, latency),
                        link,
                        None if self.clocks is None else self.clocks.clock(stage),
                    )
                    for stage, each in enumerate(costs)
                ]
            )
        return self._stages

    def _architecture(self) -> ModelArchitecture:
        return read_architecture(self.model_config.hf_config.to_dict(), self.model.pooling)

    def _latency_on(self) -> tuple[LatencyModel, EngineShape]:
        """What steps take, and on what the engine, or a stage of it, runs."""
        spec, model, phase = self._unit_spec, self.model, current().phase
        simulated = _simulated(spec)
        latency = latency_model(Path(simulated.profile) if simulated.profile else None)
        share = model.prefill_share if phase == "prefill" else model.decode_share
        tp = simulated.ranks // spec.stages
        if not simulated.gpus and simulated.ranks > 1:
            # A rank of a real one has its threads, and those of a stage share what cores there are with other stages.
            share, tp = min(model.threads * tp / device(simulated.device).cores, 1.0 / spec.stages), 1
        return latency, EngineShape(simulated.device, tp, share, model.dtype, graphs_of(model.engine_args))

    def _device_file(self, stage: int = 0) -> Path:
        """Units share a CPU, and have GPUs to themselves, and so have the stages of a pipeline."""
        if not _simulated(self._unit_spec).gpus:
            return self._unit_spec.shared_device
        return Path(self._unit_spec.run_dir) / (f"{DEVICE_FILE}-{stage}" if stage else DEVICE_FILE)

    def _schedule(self, scheduled: SchedulerOutput) -> StepWork:
        """Note what the step is about."""
        computed: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            output = len(getattr(new, RESUMED_OUTPUT, None) or ())
            prompt, params = new.prompt_token_ids, new.sampling_params
            assert prompt is not None
            computed[new.req_id] = new.num_computed_tokens
            self._sequences[new.req_id] = _Sequence(
                len(prompt) + output,
                output,
                endless=params is not None and params.ignore_eos,
                pooling=new.pooling_params,
                prompt=() if new.pooling_params is None else prompt,
            )
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        work = StepWork()
        ids, through = [], []
        for request, count in scheduled.num_scheduled_tokens.items():
            known, before = self._sequences[request].tokens, computed[request]
            ids.append(request)
            through.append(before + count >= known)
            if count == 1 and self._sequences[request].output and before + 1 >= known:
                work.add_sequence(known)
            else:
                work.add_prompt(count, before)
        self._step = ids, through
        return work

    def _pooled(self, vectors: MadeUpVectors, request: str) -> torch.Tensor | None:
        """What is pooled of the sequence."""
        sequence = self._sequences.get(request)
        if sequence is None or sequence.pooling is None:
            return None
        return vectors.answer(sequence.pooling, sequence.prompt)

    def _token(self, request: str, allowed: Sequence[int] | None) -> int:
        """The next token of the sequence."""
        sequence = self._sequences.get(request)
        if sequence is None:
            # It was cancelled while this was in flight.
            return self._plain
        sequence.tokens += 1
        sequence.output += 1
        ends = bool(self._ends) and not sequence.endless and sequence.output > ANSWER_TOKENS
        token = self._ends[0] if ends else self._plain + sequence.output % _DIFFERENT
        return token if allowed is None or token in allowed else allowed[0]


def _simulated(unit_spec: UnitSpec) -> SimulatedSpec:
    assert unit_spec.simulated is not None
    return unit_spec.simulated


def _link(shape: EngineShape, hidden: int) -> StageLink:
    """Between two stages, through which vLLM sends hidden states and residual."""
    on = device(shape.device)
    use = LINKS[on.link]
    return StageLink(
        use.latency, 2.0 * hidden * ITEM_BYTES[shape.dtype] / (on.link_bandwidth * use.efficiency * shape.tp)
    )


def _plain_token(vocabulary: int, ends: Sequence[int]) -> int:
    """The first of some tokens in a row that are likely to be plain text: special ones are at either end."""
    return next(first for first in range(vocabulary // 2, 0, -1) if not {*range(first, first + _DIFFERENT)} & {*ends})


def _allowed(grammar_output: GrammarOutput | None) -> dict[str, list[int]]:
    """The tokens that grammars allow, by request."""
    if grammar_output is None:
        return {}
    bits = np.unpackbits(np.ascontiguousarray(grammar_output.grammar_bitmask).view(np.uint8), axis=1, bitorder="little")
    ids = grammar_output.structured_output_request_ids
    return {request: np.flatnonzero(row).tolist() for request, row in zip(ids, bits, strict=True)}
