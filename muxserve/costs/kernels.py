"""Costs from measured kernels: the tables of GEMM, attention, expert and communication kernels that NVIDIA publishes in
the package `aiconfigurator-core` (the extra `muxserve[plan]`), asked through its functions.

The package knows what the kernels of a whole device take. Ours on top: shares of the SMs, jobs beside each other, and
the host's time, all as the roofline has them.

    prefill = linear(tokens) + attention(pairs)      at points of tables; a prompt alone takes what the package says
    decode  = affine in the context between points, for each batch
    step    = as the roofline's, with that for the device's part
"""

from __future__ import annotations

import json
import logging
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.calibration import GPU, Calibration
from muxserve.costs.devices import device
from muxserve.costs.latency import CostError, Decode, EngineCosts, EngineShape, LatencyModel, Load, piece_at
from muxserve.costs.roofline import Roofline, RooflineCosts

log = logging.getLogger(__name__)

PACKAGE, EXTRA = "aiconfigurator-core", "muxserve[plan]"
# The package's names of the devices that it has tables of.
SYSTEMS = {
    "A100-80GB": "a100_sxm",
    "B200-180GB": "b200_sxm",
    "B300-288GB": "b300_sxm",
    "GB200-186GB": "gb200",
    "GB300-288GB": "gb300",
    "H100-80GB": "h100_sxm",
    "H200-141GB": "h200_sxm",
    "L40S-48GB": "l40s",
    "RTX-PRO-6000-96GB": "rtx_pro_6000_server",
}
# Tokens of prefill steps, and of the context of each sequence of decode steps, at which kernels are asked for. Between
# two points costs are affine; what is beyond the last goes on as before it.
_TOKENS = tuple(sorted({*(1 << n for n in range(16)), *(3 << n for n in range(14))}))
_CONTEXTS = (1, 256, 1024, 4096, 16384, 65536, 131072)
_PROMPTS = tuple(1 << n for n in range(4, 18))
# Prompts so short that attention takes none of their time.
_SHORT = 16
# A decode step of one sequence that is said to take so many times what the roofline says was not measured on kernels
# that anybody serves with (block-wise FP8 on Blackwell: 5 to 12 times). Runs of others on Hopper took 2.3 times as long
# at most, all but one.
_FAR, _FAR_CONTEXT = 4.0, 1024

Step = Callable[[int, int], float]


def package_version() -> str:
    """The version of the package with the tables that is installed; "" without one."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class KernelSteps:
    """Seconds of the kernels of an engine's steps on a whole device: of a prefill by the number of prompts and their
    tokens, of a decode step by the number of sequences and the tokens of their contexts."""

    prefill: Step
    decode: Step


class KernelModel:
    """A `LatencyModel` over kernels that others measured.

    Args:
        beyond: answers for models and devices that the tables do not have; by default they are errors.
        backend: whose kernels: `vllm`, `sglang` or `trtllm`.
        calibration: what a share of the SMs gives, and the host's time; by default the roofline's.
    """

    def __init__(
        self, beyond: LatencyModel | None = None, backend: str = "vllm", calibration: Calibration = GPU
    ) -> None:
        self.backend = backend
        self._beyond = beyond
        self._calibration = calibration
        self._roofline = Roofline(calibration)
        self._tables: dict[str, _Tables | str] = {}
        self._engines: dict[tuple[ModelArchitecture, EngineShape], EngineCosts] = {}
        self._kernels: dict[tuple[ModelArchitecture, str, int, str], StepPoints | str] = {}

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> EngineCosts:
        """Costs of that engine.

        Raises:
            CostError: the tables do not have it and `beyond` was not given, or cannot answer either.
        """
        known = self._engines.get((architecture, shape))
        if known is not None:
            return known
        kernels = self._kernels_of(architecture, shape)
        costs: EngineCosts
        if isinstance(kernels, StepPoints):
            costs = KernelCosts(architecture, shape, kernels, self._calibration)
        elif self._beyond is not None:
            costs = self._beyond.engine(architecture, shape)
        else:
            raise CostError(f"{kernels}; the roofline has costs of it (--costs auto)")
        self._engines[architecture, shape] = costs
        return costs

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        """As `beyond` says, or the roofline: tables of kernels know none beside another."""
        return (self._beyond or self._roofline).slowdowns(device, loads)

    def why_not(self, architecture: ModelArchitecture, shape: EngineShape) -> str:
        """Why the tables do not have that engine; "" if they do."""
        kernels = self._kernels_of(architecture, shape)
        return kernels if isinstance(kernels, str) else ""

    def version(self, device_name: str) -> str:
        """The package that measured the kernels of that device, and the engine that ran them."""
        tables = self._tables_of(device_name)
        kernels = "" if isinstance(tables, str) else f", {self.backend} {tables.version}"
        return f"{PACKAGE} {package_version()}{kernels}"

    def _kernels_of(self, architecture: ModelArchitecture, shape: EngineShape) -> StepPoints | str:
        key = (architecture, device(shape.device).name, shape.tp, shape.dtype)
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = self._ask(architecture, shape)
        return found

    def _ask(self, architecture: ModelArchitecture, shape: EngineShape) -> StepPoints | str:
        tables = self._tables_of(shape.device)
        if isinstance(tables, str):
            return tables
        if shape.dtype not in ("bfloat16", "float16"):
            return f"the kernel tables have no {shape.dtype}"
        try:
            config = table_config(architecture)
            if config is None:
                return f"the kernel tables have no models like {architecture.name}"
            found = tables.steps(config, architecture, shape.tp)
        except Exception as error:  # of whichever kind: the package's own are of six
            log.debug("no kernels of %s on %s", architecture.name, shape, exc_info=True)
            # The package's messages go on with the paths of its files.
            why = " ".join(str(error).partition(" at /")[0].split())[:120] or type(error).__name__
            return f"the kernel tables do not have {architecture.name} over {shape.tp} x {shape.device} ({why})"
        *device_parts, _ = self._roofline.engine(architecture, replace(shape, share=1.0)).decode_parts(1, _FAR_CONTEXT)
        times = found.decode(1)[_CONTEXTS.index(_FAR_CONTEXT)] / sum(device_parts)
        if times > _FAR:
            return f"the kernel tables say {times:.0f} times what the roofline says of {architecture.name}, too far off"
        return found

    def _tables_of(self, device_name: str) -> _Tables | str:
        name = device(device_name).name
        found = self._tables.get(name)
        if found is None:
            found = self._tables[name] = self._load(name)
        return found

    def _load(self, name: str) -> _Tables | str:
        system = SYSTEMS.get(name)
        if system is None:
            return f"there are no kernel tables of {name}"
        if not package_version():
            return f"kernel tables are not installed (pip install '{EXTRA}')"
        try:
            return _Tables(system, self.backend)
        except Exception as error:  # as above
            log.debug("no kernel tables of %s", system, exc_info=True)
            return f"the kernel tables of {name} cannot be read ({error})"


class _Tables:
    """The kernels of one system and backend, loaded once."""

    def __init__(self, system: str, backend: str) -> None:
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
        from aiconfigurator_core.sdk import perf_database
        from aiconfigurator_core.sdk.engine import EngineHandle

        database: Any = perf_database.get_database(system, backend, "current")
        if database is None:
            raise LookupError(f"it has none of {backend}")
        self.version = str(database.version)
        self._system, self._backend, self._database = system, backend, database
        self._handle: Any = EngineHandle.for_database(database)

    def steps(self, config: dict[str, object], architecture: ModelArchitecture, tp: int) -> StepPoints:
        """Those of a model with that config.json, split over `tp` devices.

        Raises:
            Exception: the package does not know the model, or lacks a table for it.
        """
        try:
            return StepPoints(self._steps(config, architecture, tp, None))
        except Exception:
            # An 8-bit checkpoint is taken to compute attention in 8 bits, which no table has for a KV cache of 16.
            return StepPoints(self._steps(config, architecture, tp, "bfloat16"))

    def _steps(
        self, config: dict[str, object], architecture: ModelArchitecture, tp: int, attention: str | None
    ) -> KernelSteps:
        from aiconfigurator_core.sdk.config_builders import build_model_config
        from aiconfigurator_core.sdk.engine import build_engine_spec_json
        from aiconfigurator_core.sdk.models import get_model

        split = build_model_config(
            tp_size=tp,
            pp_size=1,
            attention_dp_size=1,
            moe_tp_size=tp,
            moe_ep_size=1,
            kvcache_quant_mode="fp8" if architecture.kv_cache.startswith("fp8") else "bfloat16",
            fmha_quant_mode=attention,
        )
        with tempfile.TemporaryDirectory(prefix="muxserve-config-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            model = get_model(folder, split, self._backend)
            text = build_engine_spec_json(
                model,
                model_path=folder,
                system=self._system,
                backend=self._backend,
                backend_version=self.version,
                kv_block_size=None,
                systems_path=None,
                nextn=0,
                database=self._database,
            )
        spec = json.loads(text)
        context, generation = json.dumps(spec["context_ops"]), json.dumps(spec["generation_ops"])
        ask = self._handle.evaluate_ops_json

        def prefill(prompts: int, tokens: int) -> float:
            found = ask(context, is_context=True, batch_size=prompts, s=tokens)
            return float(sum(each[1] for each in found)) / 1e3

        def decode(sequences: int, tokens: int) -> float:
            found = ask(generation, is_context=False, batch_size=sequences, s=tokens)
            return float(sum(each[1] for each in found)) / 1e3

        return KernelSteps(prefill, decode)


class StepPoints:
    """`KernelSteps` at points, monotone, as functions of tokens, pairs and context."""

    def __init__(self, steps: KernelSteps) -> None:
        self._steps = steps
        linear = [steps.prefill(max(1, tokens // _SHORT), min(tokens, _SHORT)) for tokens in _TOKENS]
        self._linear = _Affine(_TOKENS, linear)
        alone = [(n * (n + 1) // 2, steps.prefill(1, n) - self._linear(n)) for n in _PROMPTS]
        self._attention = _Affine((0, *(pairs for pairs, _ in alone)), (0.0, *(max(0.0, each) for _, each in alone)))
        self._decodes: dict[int, tuple[float, ...]] = {}
        self.decode(1)  # what the tables lack shows now

    def linear(self, tokens: int) -> float:
        """Seconds of a prefill step over that many tokens, attention left out."""
        return self._linear(tokens)

    def attention(self, pairs: float) -> float:
        """Seconds of attention over that many (query, key) pairs."""
        return self._attention(pairs)

    def decode(self, batch: int) -> tuple[float, ...]:
        """Seconds of a decode step of so many sequences, at each of `_CONTEXTS`."""
        found = self._decodes.get(batch)
        if found is None:
            asked = (self._steps.decode(batch, context) for context in _CONTEXTS)
            found = self._decodes[batch] = tuple(accumulate(asked, max))
        return found


class _Affine:
    """A function that never falls, affine between points, and beyond the last as between the last two."""

    def __init__(self, points: Sequence[float], values: Sequence[float]) -> None:
        self._points = tuple(points)
        self._values = tuple(accumulate(values, max))
        pairs = zip(self._points, self._points[1:], self._values, self._values[1:], strict=False)
        self._slopes = tuple((above - below) / (right - left) for left, right, below, above in pairs)

    def __call__(self, at: float) -> float:
        place = min(max(0, bisect_right(self._points, at) - 1), len(self._slopes) - 1)
        return self._values[place] + self._slopes[place] * (at - self._points[place])


class KernelCosts:
    """`EngineCosts` of one engine, or of the `part` (0 to 1) of one that a stage is, from the kernels of an engine's
    steps on a whole device."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        shape: EngineShape,
        kernels: StepPoints,
        by: Calibration,
        part: float = 1.0,
    ) -> None:
        self._shape, self._kernels, self._calibration, self._part = shape, kernels, by, part
        self._layers = architecture.layers
        on = device(shape.device)
        self._ideal = RooflineCosts(architecture, shape, on, by)
        self._whole = RooflineCosts(architecture, replace(shape, share=1.0), on, by)
        self._is_whole = shape.share == 1.0
        self._compute, self._bandwidth = by.compute_share(shape.share), by.bandwidth_share(shape.share)
        self._batches: dict[int, tuple[Decode, ...]] = {}

    def of_stage(self, architecture: ModelArchitecture) -> KernelCosts:
        """Costs of a stage of a pipeline, which has these of the model's layers, and that part of its kernels."""
        part = architecture.layers / self._layers
        return KernelCosts(architecture, self._shape, self._kernels, self._calibration, part)

    def _slower(self, tokens: int, rows: int) -> float:
        """How many times as long as on the whole device the linear layers take on this share of it."""
        if self._is_whole:
            return 1.0
        return self._ideal.linear(tokens, rows) / self._whole.linear(tokens, rows)

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        """See `EngineCosts.prefill`."""
        linear = self._kernels.linear(tokens) * self._slower(tokens, sequences)
        busy = self._part * (linear + self._kernels.attention(pairs) / self._compute)
        return self._ideal.host.prefill(busy, sequences)

    def decode(self, batch: int, context: int) -> Decode:
        """See `EngineCosts.decode`."""
        pieces = self._batches.get(batch)
        if pieces is None:
            pieces = self._batches[batch] = self._ideal.host.decode(self._decode(batch), batch)
        return piece_at(pieces, context)

    def _decode(self, batch: int) -> Iterator[Decode]:
        """What the device computes of a decode step."""
        found = [self._part * each for each in self._kernels.decode(batch)]
        # Without context a step reads weights; what comes with context is the reading of KV.
        fixed = found[0] * self._slower(batch, batch)
        seconds = [fixed + (each - found[0]) / self._bandwidth for each in found]
        ends = [float(batch * context) for context in _CONTEXTS]
        for left, right, below, above in zip(ends, ends[1:], seconds, seconds[1:], strict=False):
            slope = (above - below) / (right - left)
            yield Decode(below - slope * left, slope, right if right < ends[-1] else float("inf"))

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        """See `EngineCosts.prefill_load`: what the roofline says is to be done, in the time that it takes."""
        return self._ideal.prefill_work(tokens, pairs, sequences).in_seconds(self.prefill(tokens, pairs, sequences))

    def decode_load(self, batch: int, context: int) -> Load:
        """See `EngineCosts.decode_load`; as `prefill_load`."""
        seconds = self.decode(batch, context).seconds(context)
        return self._ideal.decode_work(batch, context).in_seconds(seconds)


# Architectures that the package has under their own names are asked for by these; what only has other names, and no
# kinds of layers of its own, by the architecture that has the same layers.
_DENSE, _EXPERTS = "LlamaForCausalLM", "Qwen3MoeForCausalLM"


def table_config(architecture: ModelArchitecture) -> dict[str, object] | None:
    """The config.json by which the package knows the model: its own, or one of the same shape under a name that the
    package has; None where neither will do."""
    from aiconfigurator_core.sdk.common import ARCHITECTURE_TO_MODEL_FAMILY

    own: dict[str, object] = json.loads(architecture.config) if architecture.config else {}
    names = own.get("architectures")
    if isinstance(names, list) and names and names[0] in ARCHITECTURE_TO_MODEL_FAMILY:
        return own
    a = architecture
    special = a.latent or a.states or a.own or a.windowed_layers or a.expert_hidden or a.mlp_layers or a.dense_layers
    if special or a.pooling or not a.causal or a.mlp_matrices != 3 or a.shared_intermediate:
        return None
    quantisation = own.get("quantization_config")
    if isinstance(quantisation, dict) and isinstance(inner := quantisation.get("quantization"), dict):
        quantisation = {**quantisation, **inner}  # as ModelOpt wrote it before there was a place for it
    if a.quantisation and not isinstance(quantisation, dict):
        return None
    shape: dict[str, object] = {
        "architectures": [_EXPERTS if a.experts > 1 else _DENSE],
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
        "vocab_size": a.vocab,
        "max_position_embeddings": a.max_len,
        "tie_word_embeddings": a.tied_embeddings,
        "torch_dtype": "bfloat16",
    }
    if a.experts > 1:
        shape |= {
            "num_experts": a.experts,
            "num_experts_per_tok": a.active_experts,
            "moe_intermediate_size": a.intermediate,
        }
    return {**shape, "quantization_config": quantisation} if isinstance(quantisation, dict) else shape
