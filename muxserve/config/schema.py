"""The fleet file's objects. Field descriptions are what an editor shows through the JSON schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, WithJsonSchema

from muxserve.config.problems import KeyPath, Problem, shown
from muxserve.config.source import Source
from muxserve.config.values import (
    ALIAS_PATTERN,
    AUTO,
    ENDPOINT_PATTERN,
    GPU_IDS_SCHEMA,
    NAME_PATTERN,
    ORIGIN_PATTERN,
    SECRET_PATTERN,
    BytesPerSecond,
    CoresOrAuto,
    LengthOrAuto,
    MaxWait,
    Milliseconds,
    MpsMode,
    PolicyName,
    Seconds,
    Section,
    SequencesOrAuto,
    Share,
    Size,
    SizeOrAuto,
    SmSharingName,
    StagesOrAuto,
    TokensOrAuto,
    check_gpu_ids,
    parse_size,
    switch,
)
from muxserve.replicas.prefixes import DispatchName
from muxserve.replicas.priorities import DEFAULT_LEVELS
from muxserve.replicas.scaling import ScalingRules
from muxserve.scheduling.policies import DEFAULT_POLICY
from muxserve.scheduling.residency_types import ResidencyRules
from muxserve.spec import ShapeName

_SCALING, _RESIDENCY = ScalingRules(), ResidencyRules(1)
# Where answers of `/v1/responses` are kept by `responses: on`.
RESPONSES_FILE = "responses.sqlite"
# Where `/v1/batches` and their files are kept by `batches: on`.
BATCHES_DIRECTORY = "batches"

# Nobody means more: with a slip of the finger planning would take for ever, and all memory.
MOST_GPUS, MOST_REPLICAS, MOST_MODELS = 16_384, 1024, 1000
# Replicas of a model that one fleet starts.
MOST_SERVED = 64
# For everything else that is counted: requests, tokens.
MOST = 1_000_000_000
Count = Annotated[int, Field(ge=1, le=MOST)]
BudgetTokens = Annotated[int, Field(ge=1, le=1_000_000 * MOST)]
# In budgets: all models together.
ALL_MODELS = "*"
GpuCount = Annotated[int, Field(ge=1, le=MOST_GPUS)]
ReplicaCount = Annotated[int, Field(ge=1, le=MOST_REPLICAS)]
ReplicasOrNone = Annotated[int, Field(ge=0, le=MOST_REPLICAS)]


class Replicas(Section):
    """How many replicas a model has. With `min` below `max` their number follows the load, by their average freeness
    (docs/replicas.md)."""

    min: ReplicasOrNone = Field(default=1, description="Fewest; 0: it may go to sleep, and a request wakes it")
    max: ReplicaCount = Field(description="Most")
    start: ReplicasOrNone | None = Field(default=None, description="At the start; else min, but at least 1")
    idle: Seconds = Field(
        default=_SCALING.idle_seconds, description="With min: 0, time without a request before the last one goes"
    )
    wake: Annotated[Seconds, Field(gt=0)] = Field(
        default=_SCALING.wake_limit, description="With min: 0, how long a request waits for a replica to come up"
    )

    @property
    def scales(self) -> bool:
        """Whether their number changes by itself."""
        return self.min < self.max

    @property
    def at_start(self) -> int:
        """How many there are at first."""
        return max(self.min, 1) if self.start is None else self.start


class ApiKey(Section):
    """An accepted key whose requests have a priority."""

    key: str = Field(min_length=1, description='Literal, "env:NAME" or "file:PATH"')
    priority: str | None = Field(default=None, description="Priority level of its requests; else the default one")


def _budget(value: object) -> object:
    """One number stands for all models."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {ALL_MODELS: value}
    if not isinstance(value, dict):
        raise ValueError(
            f'must be a number of tokens, or models with theirs such as "{{atlas: 100000}}", not {shown(value)}'
        )
    return value


_BUDGET_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}, "minProperties": 1},
    ]
}
TokenBudget = Annotated[
    dict[str, BudgetTokens], BeforeValidator(_budget), Field(min_length=1), WithJsonSchema(_BUDGET_SCHEMA)
]


class Budgets(Section):
    """Most tokens of prompts and answers: a number, or numbers by model, where `*` stands for all together."""

    day: TokenBudget | None = Field(default=None, description="In a day (UTC)")
    month: TokenBudget | None = Field(default=None, description="In a calendar month (UTC)")


class Tenant(Section):
    """Whoever comes with one of these keys. What is left out is not limited."""

    keys: list[Annotated[str, Field(pattern=SECRET_PATTERN)]] = Field(
        default_factory=list,
        description='Where its keys are, never the keys themselves: "env:NAME" or "file:PATH"; `muxserve keys` makes '
        "others while the fleet serves",
    )
    models: list[str] | None = Field(default=None, min_length=1, description="Models that it may use; else all")
    priority: str | None = Field(default=None, description="Highest priority level of its requests; else the default")
    requests_per_minute: Count | None = Field(default=None, description="Requests per minute, over all gateways")
    tokens_per_minute: Count | None = Field(
        default=None, description="Tokens of prompts and answers per minute, over all gateways"
    )
    max_concurrency: Count | None = Field(default=None, description="Requests at once, over all gateways")
    budgets: Budgets = Field(default=Budgets(), description="Most tokens in a day and in a month, over all restarts")
    weight: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="Its share of a model, beside others that wait for it"
    )
    admin: bool = Field(default=False, description="Whether it may see the fleet's state, and what all tenants used")
    share_prefixes: bool = Field(
        default=False,
        description="Whether it shares the prefix cache with other tenants that do and with keys of no tenant",
    )


class Priority(Section):
    """One priority level."""

    rank: int = Field(ge=-1000, le=1000, description="Higher ranks go first")
    target_load: Annotated[int, Field(ge=0, le=MOST)] | Literal["auto"] | None = Field(
        default=None,
        description="Tokens that a replica should hold at most while it runs a request of this level; auto: as many as "
        "leave its steps almost at their shortest; else all it can",
    )


class Migration(Section):
    """Running requests move from full replicas to free ones."""

    bandwidth: Size | None = Field(
        default=None, description='Most bytes per second that leave a unit, e.g. "1GiB"; else no limit'
    )


def _size_if_any(value: object) -> object:
    switched = switch(value)
    if switched in (AUTO, "off"):
        return switched
    try:
        return parse_size(value)
    except ValueError:
        raise ValueError(f'must be auto, off or a size such as "64GiB", not {shown(value)}') from None


SizeIfAny = Annotated[int | str, BeforeValidator(_size_if_any)]


def _yes_or_no(value: object) -> object:
    if value != AUTO and not isinstance(value, bool):
        raise ValueError(f"must be true, false or auto, not {shown(value)}")
    return value


YesOrNo = Annotated[bool | Literal["auto"], BeforeValidator(_yes_or_no)]


class MemorySection(Section):
    """How much of this machine's memory, or of the memory of each of its GPUs, the fleet may take. With it, memory and
    not an idle time decides which models are awake: all may sleep, but those with `keep: always`, and a request wakes
    its model (docs/residency.md)."""

    limit: SizeOrAuto = Field(
        default=AUTO,
        description='Most that all processes take together, e.g. "6GiB", on GPUs of the memory of each; auto: 90 % of '
        "what the machine, or its container, has, on GPUs `cluster.gpu_memory` of it",
    )
    min_residence: Seconds = Field(
        default=_RESIDENCY.min_residence, description="Shortest time that a woken model stays awake"
    )
    host_copies: SizeIfAny = Field(
        default=AUTO,
        description="On GPUs: memory of this machine that keeps the weights of models that have been awake, so that "
        "they are copied back and not loaded again; auto: half of what the machine, or its container, has; off: none",
    )
    resting_engines: SizeIfAny = Field(
        default=AUTO,
        description="On GPUs: memory of each for engines that stay while their models sleep, so that a wake only "
        "copies weights back; auto: what all of them need, if two models can be awake then; off: they end",
    )
    turns: YesOrNo = Field(
        default=AUTO,
        description="A busy model that has to go for another stops when it had its turn, and goes on later; otherwise "
        "it finishes its answers first. auto: it stops on GPUs if its engines stay while it sleeps",
    )


DEFAULT_PRIORITIES = {level.name: Priority(rank=level.rank, target_load=level.target_load) for level in DEFAULT_LEVELS}


def _keys(value: object) -> object:
    return [value] if isinstance(value, (str, dict)) else value


def _files(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _key(value: object) -> object:
    if value == "":
        raise ValueError("must not be empty")
    if not isinstance(value, (str, dict, ApiKey)):
        wrong = 'must be a text, or a mapping such as "{key: env:NAME, priority: high}"'
        raise ValueError(f"{wrong}, not {shown(value)}")
    return {"key": value} if isinstance(value, str) else value


def _replicas(value: object) -> object:
    wrong = 'must be a whole number of at least 1, or a mapping such as "{min: 1, max: 4}"'
    if isinstance(value, (dict, Replicas)):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{wrong}, not {shown(value)}")
    if value < 1:
        raise ValueError(f"{wrong}, not {shown(value)}; a model that may have none is {{min: 0, max: 1}}")
    if value > MOST_REPLICAS:
        raise ValueError(f"must be at most {MOST_REPLICAS:,}, not {shown(value)}")
    return {"min": value, "max": value}


def _or_mapping(words: Mapping[str, object], example: str) -> BeforeValidator:
    """A mapping, or one of the words that stand for one, or for nothing."""

    def check(value: object) -> object:
        if isinstance(value, (dict, Section)):
            return value
        word = switch(value)
        if not isinstance(word, str) or word not in words:
            raise ValueError(f'must be {", ".join(words)}, or a mapping such as "{example}", not {shown(value)}')
        return words[word]

    return BeforeValidator(check)


def _watchdog(value: object) -> object:
    switched = switch(value)
    if isinstance(value, dict):
        raise ValueError("is on or off; a silent process gets no work after 3 s and is killed after 10 s")
    if switched not in ("on", "off"):
        raise ValueError(f"must be on or off, not {shown(value)}")
    return switched == "on"


def _weights(value: object) -> object:
    """One model's name stands for all of the requests."""
    if isinstance(value, str) and value:
        return {value: 1.0}
    if not isinstance(value, dict):
        raise ValueError(
            f'must be a model\'s name, or models with weights such as "{{v1: 90, v2: 10}}", not {shown(value)}'
        )
    return value


def _responses(value: object) -> object:
    switched = switch(value)
    if isinstance(value, dict):
        raise ValueError("is on, off or a file: write its `file` here; 256 MiB of answers are kept, for 30 days")
    if not isinstance(switched, str) or not switched:
        raise ValueError(f"must be on, off or a file, not {shown(value)}")
    return {"on": RESPONSES_FILE, "off": None}.get(switched, switched)


def _batches(value: object) -> object:
    switched = switch(value)
    if not isinstance(switched, str) or not switched:
        raise ValueError(f"must be on, off or a directory, not {shown(value)}")
    return {"on": BATCHES_DIRECTORY, "off": None}.get(switched, switched)


def _fallback(value: object) -> object:
    if isinstance(value, str) and value:
        return {"model": value}
    if not isinstance(value, (dict, Section)):
        wrong = 'must be a model\'s name, or a mapping such as "{url: https://api.example.com/v1, key: env:NAME}"'
        raise ValueError(f"{wrong}, not {shown(value)}")
    return value


ReplicasOrNumber = Annotated[Replicas, BeforeValidator(_replicas)]
ApiKeys = Annotated[list[Annotated[ApiKey, BeforeValidator(_key)]], BeforeValidator(_keys)]
Weight = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
_WEIGHTS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}, "minProperties": 1},
    ]
}
Weights = Annotated[dict[str, Weight], BeforeValidator(_weights), Field(min_length=1), WithJsonSchema(_WEIGHTS_SCHEMA)]
_FILE_SCHEMA = {"type": "string", "minLength": 1}
_FILES_SCHEMA: dict[str, Any] = {"anyOf": [_FILE_SCHEMA, {"type": "array", "items": _FILE_SCHEMA}]}
SharedNames = dict[Annotated[str, Field(pattern=ALIAS_PATTERN)], Weights]
Tenants = dict[Annotated[str, Field(pattern=NAME_PATTERN)], Tenant]
Priorities = dict[Annotated[str, Field(pattern=NAME_PATTERN)], Priority]
MigrationOrSwitch = Annotated[Migration | None, _or_mapping({"on": {}, "off": None}, "{bandwidth: 1GiB}")]
MemoryOrAuto = Annotated[MemorySection, _or_mapping({AUTO: {}}, "{limit: 6GiB}")]
_SWITCH_SCHEMA = {"enum": ["on", "off", True, False]}
Watchdog = Annotated[bool, BeforeValidator(_watchdog), WithJsonSchema(_SWITCH_SCHEMA)]
ResponsesFile = Annotated[
    str | None,
    BeforeValidator(_responses),
    WithJsonSchema({"anyOf": [_SWITCH_SCHEMA, {"type": "string", "minLength": 1}]}),
]


BatchesDirectory = Annotated[
    str | None,
    BeforeValidator(_batches),
    WithJsonSchema({"anyOf": [_SWITCH_SCHEMA, {"type": "string", "minLength": 1}]}),
]


class Ray(Section):
    """The Ray cluster whose machines the units run on."""

    address: str = Field(
        default="auto", min_length=1, description="Of the cluster; auto: the one of this machine, started if need be"
    )
    placement: Literal["spread", "pack"] = Field(
        default="spread", description="Units on as many machines as there are, or on as few as hold them"
    )


class Nodes(Section):
    """Equal machines with GPUs."""

    gpus: GpuCount = Field(description="GPUs of each")
    gpu_type: str = Field(min_length=1, description="Type of the GPUs, e.g. A100-80GB")
    count: GpuCount = Field(default=1, description="How many such machines")


# 10 Gb/s, in bytes per second.
NETWORK = 1.25e9


class ClusterSection(Section):
    """The machine, or the machines."""

    cores: CoresOrAuto = Field(
        default=AUTO, description="CPU cores for the engines; auto: all that this process may use"
    )
    ranks: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Without GPUs: processes that every model is split over (tensor parallel), to try that out",
    )
    gpus: Annotated[int, Field(ge=0, le=MOST_GPUS)] = Field(
        default=0, description="GPUs, in machines of `gpus_per_node`; 0: serve on CPU"
    )
    gpu_ids: Annotated[list[int | str], BeforeValidator(check_gpu_ids), WithJsonSchema(GPU_IDS_SCHEMA)] = Field(
        default_factory=list,
        description="GPUs of this machine to serve on, by number or UUID; without it those with the most free memory",
    )
    gpu_memory: float = Field(
        default=0.92, gt=0, le=0.99, description="Part of each GPU's memory that may be used for everything together"
    )
    mps: MpsMode = Field(
        default="auto",
        description="CUDA's Multi-Process Service, so that engines compute at the same time; auto: if it works here",
    )
    sm_sharing: SmSharingName = Field(
        default="auto",
        description="How engines get their share of SMs under MPS: by percentage, or as SMs of their own (green "
        "contexts); auto: the latter if `muxserve doctor --gpu` has found that it works here, else they alternate",
    )
    gpu_type: str | None = Field(default=None, min_length=1, description="Type of the GPUs, e.g. A100-80GB")
    gpus_per_node: GpuCount = Field(default=8, description="GPUs of one machine; the last may have fewer")
    nodes: list[Nodes] = Field(
        default_factory=list, description="Machines with GPUs, where they differ; instead of gpus and gpu_type"
    )
    network: BytesPerSecond = Field(
        default=NETWORK,
        description='Between machines, for simulated moves of requests: "25Gb/s" (bits) or "3GB/s" (bytes); 10Gb/s if '
        "it is not said",
        json_schema_extra={"default": "10Gb/s"},
    )
    launcher: Literal["local", "ray"] = Field(
        default="local", description="What starts units: this machine alone, or a Ray cluster"
    )
    ray: Ray = Field(default=Ray(), description="For launcher: ray")

    @property
    def has_shares_per_lease(self) -> bool:
        """Whether engines with shares of one GPU's SMs are expected to change these from lease to lease: in green
        contexts, which `auto` takes where they work."""
        return self.mps != "off" and self.sm_sharing != "mps"


class Sm(Section):
    """Shares of each GPU's SMs, instead of those that the planner chooses."""

    prefill: Share | None = Field(default=None, description="Share of the prefill engine, e.g. 0.6")
    decode: Share | None = Field(
        default=None, description="Share of the decode engine, or of the one engine of both phases, e.g. 0.4"
    )


class WorkloadSection(Section):
    """What requests of a model look like, for planning and first quotas."""

    prompt_tokens: Count = Field(default=512, description="Mean prompt length in tokens")
    output_tokens: Count = Field(default=256, description="Mean answer length in tokens")

    @property
    def tokens(self) -> int:
        """Mean length of a request, prompt and answer."""
        return self.prompt_tokens + self.output_tokens


class KVPool(Section):
    """The page pool that all models share."""

    size: SizeOrAuto = Field(default=AUTO, description='Memory of the pool, e.g. "256MiB"; auto: from rates and limits')


class Slo(Section):
    """Latency objectives; requests that meet them are counted per model."""

    ttft_ms: Annotated[Milliseconds, Field(gt=0)] | None = Field(default=None, description="Time to first token, ms")
    tpot_ms: Annotated[Milliseconds, Field(gt=0)] | None = Field(default=None, description="Time per output token, ms")


class Limits(Section):
    """Admission limits of one model."""

    max_concurrency: Count = Field(default=256, description="Requests in service at once; more wait in the queue")
    max_queue: Annotated[int, Field(ge=0, le=MOST)] = Field(
        default=1024, description="Requests that may wait; more are answered with 429"
    )
    max_wait: MaxWait = Field(
        default=AUTO,
        description="Predicted wait for the first token from which on requests are answered with 429; auto: twice "
        "slo.ttft_ms, or without that 5s once the queue stands; none: without end",
    )


class Fallback(Section):
    """What answers in place of a model that is degraded or at a limit: another model, or another OpenAI endpoint."""

    model: str | None = Field(
        default=None, min_length=1, description="A model of this fleet, or of the endpoint; there the same name if none"
    )
    url: str | None = Field(
        default=None, pattern=ENDPOINT_PATTERN, description='An OpenAI endpoint, e.g. "https://api.example.com/v1"'
    )
    key: str | None = Field(
        default=None, pattern=SECRET_PATTERN, description='The API key that it wants: "env:NAME" or "file:PATH"'
    )


FallbackOrModel = Annotated[Fallback, BeforeValidator(_fallback)]


class ModelSettings(Section):
    """What models of a fleet may have in common."""

    rate: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="Expected requests per second; weighs the quotas"
    )
    replicas: ReplicasOrNumber = Field(
        default=Replicas(min=1, max=1),
        description="How many units serve it: a number, or bounds for scaling",
    )
    keep: Literal["auto", "always"] = Field(
        default="auto", description="With `memory`: auto sleeps when another model needs its memory, always never does"
    )
    engines: Literal["auto", "split", "one"] = Field(
        default=AUTO,
        description="split: an engine for prefill and one for decode; one: one engine of both phases; auto: as the "
        "plan has it",
    )
    stages: StagesOrAuto = Field(
        default=AUTO,
        description="Stages that the layers of its one engine are split over; auto: one, or as the plan has it",
    )
    dispatch: Literal["auto", "rolling"] = Field(
        default=AUTO,
        description="rolling: prefill rolls over replicas of one engine; auto: the fleet's dispatch, or as the plan "
        "has it",
    )
    kv: Literal["auto", "pool", "private"] = Field(
        default="auto",
        description="Where its KV lies: in the pool that all models share, or in a cache of vLLM's own of a planned "
        "size; auto: in the pool, if that can hold what the model keeps",
    )
    workload: WorkloadSection = Field(default=WorkloadSection(), description="Lengths of its requests, for planning")
    slo: Slo = Field(default=Slo(), description="Latency objectives")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of weights and KV cache; auto: the checkpoint's own"
    )
    max_len: LengthOrAuto = Field(
        default=AUTO,
        description="Longest sequence (prompt and output) in tokens; auto: the model's, or what the pool can hold",
    )
    max_num_seqs: SequencesOrAuto = Field(
        default=AUTO,
        description="Sequences in one batch; auto: 64 on CPU, on GPUs vLLM's default (256 or 1024)",
    )
    max_num_batched_tokens: TokensOrAuto = Field(
        default=AUTO,
        description="Tokens in one step; longer prompts run in chunks; auto: 2048, on large GPUs as vLLM has it",
    )
    prefix_caching: bool = Field(default=True, description="Reuse the KV cache of equal prompt prefixes")
    threads: CoresOrAuto = Field(default=AUTO, description="CPU threads of each engine of this model")
    sm: Sm = Field(default=Sm(), description="On GPUs: shares of the SMs, instead of the planner's")
    limits: Limits = Field(default=Limits(), description="Admission limits")
    fallback: FallbackOrModel | None = Field(
        default=None,
        description="What answers while it is degraded or at a limit: a model of this fleet, or an OpenAI endpoint",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="vLLM engine options passed through, e.g. trust_remote_code: true"
    )


class Model(ModelSettings):
    """One model of the fleet."""

    name: str = Field(pattern=NAME_PATTERN, description="Name in the API's `model` field and in URLs")
    aliases: list[Annotated[str, Field(pattern=ALIAS_PATTERN)]] = Field(
        default_factory=list, description="Other names under which requests may ask for it, e.g. gpt-4o"
    )
    adapters: dict[Annotated[str, Field(pattern=ALIAS_PATTERN)], Annotated[str, Field(min_length=1)]] | None = Field(
        default=None,
        description="LoRA adapters: directories by the names that requests ask for them with; `{}`: none yet",
    )
    path: str | None = Field(default=None, min_length=1, description="Checkpoint directory, relative to the fleet file")
    hub: str | None = Field(
        default=None, pattern=r"^[\w.-]+(/[\w.-]+)?$", description="Hugging Face hub id, e.g. org/name"
    )
    revision: str | None = Field(default=None, min_length=1, description="Revision of the hub id")
    architecture: str | None = Field(
        default=None,
        min_length=1,
        description="For planning without a checkpoint: a config.json, or a name such as Qwen/Qwen3-32B",
    )
    demo: str | None = Field(default=None, min_length=1, description="Question that `muxserve deploy --demo` asks")

    @property
    def rolls(self) -> bool:
        """Whether prefill rolls over its replicas."""
        return self.dispatch == "rolling"

    @property
    def stage_count(self) -> int:
        """Stages of its engine where no plan says how many."""
        return self.stages if isinstance(self.stages, int) else 1

    @property
    def has_own_unit(self) -> bool:
        """Whether each replica has a unit to itself."""
        return self.stage_count > 1 or self.rolls

    @property
    def is_open(self) -> bool:
        """Whether the file leaves its engines to a plan."""
        return self.engines == AUTO and not self.has_own_unit

    @property
    def shape(self) -> ShapeName:
        """Its engines, where no plan says more of them. One takes half of the memory of two, and serves at least as
        much in most simulations (docs/scheduling.md)."""
        return "split" if self.engines == "split" else "one"

    def with_engines(self, shape: ShapeName, stages: int = 1, rolling: bool = False) -> Model:
        """The model with that in place of what it says of its engines."""
        dispatch = "rolling" if rolling else AUTO
        return self.model_copy(update={"engines": shape, "stages": stages, "dispatch": dispatch})


class TlsSection(Section):
    """The endpoint speaks HTTPS."""

    cert: str = Field(
        min_length=1, description="PEM file of the certificate and the chain behind it, relative to the fleet file"
    )
    key: str = Field(min_length=1, description="PEM file of its key, without a password, relative to the fleet file")


class GatewaySection(Section):
    """The OpenAI endpoint."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0: any free one")
    api_keys: ApiKeys = Field(
        default_factory=list,
        description='Accepted keys, each literal, "env:NAME" or "file:PATH"; none, and no tenants: for anyone',
    )
    usage_file: str = Field(
        default="usage.sqlite",
        min_length=1,
        description="Where it is kept what tenants used, relative to the fleet file; written only where there are some",
    )
    max_body: Size = Field(default=4 << 20, description='Largest request body, e.g. "4MiB"')
    drain_seconds: Seconds = Field(default=30.0, description="How long running requests may go on after Ctrl-C")
    count: int = Field(default=1, ge=1, le=64, description="Gateway processes that share the port")
    cors_origins: list[Annotated[str, Field(pattern=ORIGIN_PATTERN)]] = Field(
        default_factory=list,
        description='Web pages that may call the endpoint from a browser, e.g. "https://chat.example.org"; "*": any',
    )
    access_log: bool = Field(default=False, description="A line in the gateway's log for every request that ended")
    ui: bool = Field(default=True, description="A live page at /ui")
    tls: TlsSection | None = Field(default=None, description="Certificate and key; without it the endpoint speaks HTTP")
    responses: ResponsesFile = Field(
        default=None,
        description="Keeps the answers of `/v1/responses`: a file, relative to the fleet file; on: responses.sqlite",
    )

    batches: BatchesDirectory = Field(
        default=None,
        description="Keeps `/v1/batches` and their files: a directory, relative to the fleet file; on: batches",
    )

    @property
    def keys(self) -> list[str]:
        """The accepted keys."""
        return [key.key for key in self.api_keys]

    @property
    def key_priorities(self) -> dict[str, str]:
        """Priority level by key, of those that have one."""
        return {key.key: key.priority for key in self.api_keys if key.priority is not None}


class Fleet(Section):
    """A fleet file."""

    cluster: Annotated[ClusterSection, _or_mapping({AUTO: {}}, "{cores: 2}")] = Field(
        default=ClusterSection(), description="The machine; auto: what it has"
    )
    policy: PolicyName = Field(default=DEFAULT_POLICY, description="How models share the machine")
    memory: MemoryOrAuto | None = Field(
        default=None, description="Memory decides which models are awake; without it all are, as `replicas` says"
    )
    kv_pool: KVPool = Field(default=KVPool(), description="The shared KV page pool")
    gateway: GatewaySection = Field(default=GatewaySection(), description="The OpenAI endpoint")
    tenants: Tenants = Field(default_factory=dict, description="Who shares the endpoint, by name")
    aliases: SharedNames = Field(
        default_factory=dict,
        description="Names that several models share: the models of each, with the weights of their parts of requests",
    )
    priorities: Priorities = Field(
        default=DEFAULT_PRIORITIES,
        min_length=1,
        description="Priority levels of requests, by name; one is normal, that of requests that name none",
    )
    migration: MigrationOrSwitch = Field(
        default=Migration(), description="Moving running requests between replicas; off: they stay"
    )
    dispatch: DispatchName = Field(
        default="prefix",
        description="Which replica gets a request: one with a part of its prompt in the cache, or the freest",
    )
    watchdog: Watchdog = Field(
        default=True, description="Processes that hang are killed and started again; off: nobody looks"
    )
    models: list[Model] = Field(min_length=1, max_length=MOST_MODELS, description="The models to serve")
    # These two are resolved before (`include.py`), and are nothing that a fleet does.
    include: Annotated[list[str], BeforeValidator(_files), WithJsonSchema(_FILES_SCHEMA)] = Field(
        default_factory=list,
        exclude=True,
        description="Files with other parts of the fleet, relative to this one; patterns such as teams/*.yaml",
    )
    model_defaults: ModelSettings = Field(
        default=ModelSettings(), exclude=True, description="What models have that do not say it themselves"
    )

    _source: Source | None = PrivateAttr(None)
    # Where each model stands in the file, also when this has become a fleet of some of them.
    _places: dict[str, int] = PrivateAttr(default_factory=dict)

    def with_models(self, models: Sequence[Model]) -> Fleet:
        """The same fleet with these models only; mistakes are reported at their places in the file."""
        return self.model_copy(update={"models": list(models)})

    def with_name(self, name: str) -> Fleet:
        """The same fleet, whose only model is called `name`."""
        (model,) = self.models
        return self.with_models([model.model_copy(update={"name": name})])

    def as_split(self) -> Fleet:
        """The same fleet with an engine for each phase of every model, whatever it says."""
        return self.with_models([model.with_engines("split") for model in self.models])

    def all_awake(self) -> Fleet:
        """The same fleet without `memory:`, which would decide which of its models are awake."""
        return self.model_copy(update={"memory": None})

    def with_policy(self, policy: str) -> Fleet:
        """The same fleet, whose models share the machine in that way, which may be one that only plans have."""
        return self.model_copy(update={"policy": policy})

    def with_pool_size(self, size: int) -> Fleet:
        """The same fleet with pools of `size` bytes."""
        return self.model_copy(update={"kv_pool": self.kv_pool.model_copy(update={"size": size})})

    def model(self, name: str) -> Model:
        """The model of that name.

        Raises:
            KeyError: there is none.
        """
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(name)

    def problem(self, path: KeyPath, message: str) -> Problem:
        """A problem of this fleet at the place of `path` in its file."""
        return self._source.problem(path, message) if self._source else Problem(message, "fleet", None, path)

    def model_problem(self, name: str, key: str, message: str) -> Problem:
        """A problem with a key of a model, wherever that stands in the file."""
        names = [model.name for model in self.models]
        return self.problem(("models", self._places.get(name, names.index(name)), key), message)
