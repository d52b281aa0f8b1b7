"""The fleet file's objects. Field descriptions are what an editor shows through the JSON schema."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema

from muxserve.config.problems import KeyPath, Problem
from muxserve.config.source import Source
from muxserve.config.units import DURATION_PATTERN, SIZE_PATTERN, parse_duration, parse_size

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]
PolicyName = Literal["adbs", "fcfs", "round_robin"]
SmSharingName = Literal["mps", "green_contexts"]
GPU_UUID_PATTERN = r"^GPU-[0-9a-fA-F-]{36}$"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


def _size_or_auto(value: object) -> object:
    if value == AUTO:
        return value
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"{error} (or auto)") from None


def _count_or_auto(value: object) -> object:
    if value == AUTO:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"must be a whole number of at least 1, or auto, not {value!r}")
    return value


def _gpu_ids(value: object) -> object:
    wrong = 'must be a list of GPUs by number or UUID, such as [0, 1] or ["GPU-8f6d..."]'
    if not isinstance(value, list):
        raise ValueError(f"{wrong}, not {value!r}")
    for each in value:
        number = isinstance(each, int) and not isinstance(each, bool) and each >= 0
        if not number and not (isinstance(each, str) and re.match(GPU_UUID_PATTERN, each)):
            raise ValueError(f"{wrong}; {each!r} is neither (`nvidia-smi -L` lists them)")
    if len(set(value)) < len(value):
        raise ValueError("names a GPU twice")
    return value


def _switch(value: object) -> object:
    """YAML 1.1 reads a bare `on` and `off` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _keys(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _auto_cluster(value: object) -> object:
    if value == AUTO:
        return {}
    if not isinstance(value, (dict, Cluster)):
        raise ValueError(f'must be auto or a mapping such as "cores: 2", not {value!r}')
    return value


_SIZE_SCHEMA = {"type": "string", "pattern": SIZE_PATTERN}
_AUTO_SCHEMA = {"const": "auto"}


def _duration_schema(minimum: float = 0) -> dict[str, Any]:
    return {"anyOf": [{"type": "number", "minimum": minimum}, {"type": "string", "pattern": DURATION_PATTERN}]}


Size = Annotated[
    int, BeforeValidator(parse_size), WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _SIZE_SCHEMA]})
]
SizeOrAuto = Annotated[
    int | Auto,
    BeforeValidator(_size_or_auto),
    WithJsonSchema({"anyOf": [_AUTO_SCHEMA, {"type": "integer", "minimum": 1}, _SIZE_SCHEMA]}),
]
CountOrAuto = Annotated[
    int | Auto,
    BeforeValidator(_count_or_auto),
    WithJsonSchema({"anyOf": [_AUTO_SCHEMA, {"type": "integer", "minimum": 1}]}),
]
Seconds = Annotated[float, BeforeValidator(parse_duration), WithJsonSchema(_duration_schema())]
Milliseconds = Annotated[
    float, BeforeValidator(lambda value: parse_duration(value, unit="ms")), WithJsonSchema(_duration_schema())
]


MpsMode = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(_switch),
    WithJsonSchema({"enum": ["auto", "on", "off", True, False]}),
]
Share = Annotated[float, Field(gt=0, le=1)]
_GPU_IDS_SCHEMA = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": GPU_UUID_PATTERN}]},
    "uniqueItems": True,
}


class Section(BaseModel):
    """Base of every mapping in a fleet file: typed strictly, and no key that we do not know."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Nodes(Section):
    """Equal machines with GPUs."""

    gpus: int = Field(ge=1, description="GPUs of each")
    gpu_type: str = Field(min_length=1, description="Type of the GPUs, e.g. A100-80GB")
    count: int = Field(default=1, ge=1, description="How many such machines")


class Cluster(Section):
    """The machine, or the machines."""

    cores: CountOrAuto = Field(
        default=AUTO, description="CPU cores for the engines; auto: all that this process may use"
    )
    ranks: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Without GPUs: processes that every model is split over (tensor parallel), to try that out",
    )
    gpus: int = Field(default=0, ge=0, description="GPUs, in machines of `gpus_per_node`; 0: serve on CPU")
    gpu_ids: Annotated[list[int | str], BeforeValidator(_gpu_ids), WithJsonSchema(_GPU_IDS_SCHEMA)] = Field(
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
        default="mps",
        description="How engines get their share of SMs under MPS: by percentage, or as SMs of their own",
    )
    gpu_type: str | None = Field(default=None, min_length=1, description="Type of the GPUs, e.g. A100-80GB")
    gpus_per_node: int = Field(default=8, ge=1, description="GPUs of one machine; the last may have fewer")
    nodes: list[Nodes] = Field(
        default_factory=list, description="Machines with GPUs, where they differ; instead of gpus and gpu_type"
    )


class Sm(Section):
    """Shares of each GPU's SMs, instead of those that the planner chooses."""

    prefill: Share | None = Field(default=None, description="Share of the prefill engine, e.g. 0.6")
    decode: Share | None = Field(default=None, description="Share of the decode engine, e.g. 0.4")


class Workload(Section):
    """What requests of a model look like, for planning."""

    prompt_tokens: int = Field(default=512, ge=1, description="Mean prompt length in tokens")
    output_tokens: int = Field(default=256, ge=1, description="Mean answer length in tokens")


class KVPool(Section):
    """The page pool that all models share."""

    size: SizeOrAuto = Field(default=AUTO, description='Memory of the pool, e.g. "256MiB"; auto: from rates and limits')


class Slo(Section):
    """Latency objectives; requests that meet them are counted per model."""

    ttft_ms: Annotated[Milliseconds, Field(gt=0)] | None = Field(default=None, description="Time to first token, ms")
    tpot_ms: Annotated[Milliseconds, Field(gt=0)] | None = Field(default=None, description="Time per output token, ms")


class Limits(Section):
    """Admission limits of one model."""

    max_concurrency: int = Field(default=256, ge=1, description="Requests in service at once; more wait in the queue")
    max_queue: int = Field(default=1024, ge=0, description="Requests that may wait; more are answered with 429")


class Model(Section):
    """One model of the fleet."""

    name: str = Field(pattern=NAME_PATTERN, description="Name in the API's `model` field and in URLs")
    path: str | None = Field(default=None, min_length=1, description="Checkpoint directory, relative to the fleet file")
    hub: str | None = Field(
        default=None, pattern=r"^[\w.-]+(/[\w.-]+)?$", description="Hugging Face hub id, e.g. org/name"
    )
    revision: str | None = Field(default=None, min_length=1, description="Revision of the hub id")
    architecture: str | None = Field(
        default=None,
        min_length=1,
        description="For planning without a checkpoint: a config.json, or a built-in name such as llama-7b",
    )
    rate: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="Expected requests per second; weighs the quotas"
    )
    workload: Workload = Field(default=Workload(), description="Lengths of its requests, for planning")
    slo: Slo = Field(default=Slo(), description="Latency objectives")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of weights and KV cache; auto: the checkpoint's own"
    )
    max_len: CountOrAuto = Field(
        default=AUTO,
        description="Longest sequence (prompt and output) in tokens; auto: the model's, or what the pool can hold",
    )
    max_num_seqs: int = Field(default=64, ge=1, description="Sequences in one batch")
    max_num_batched_tokens: int = Field(
        default=2048, ge=1, description="Tokens in one step; longer prompts run in chunks"
    )
    prefix_caching: bool = Field(default=True, description="Reuse the KV cache of equal prompt prefixes")
    threads: CountOrAuto = Field(default=AUTO, description="CPU threads of each engine of this model")
    sm: Sm = Field(default=Sm(), description="On GPUs: shares of the SMs, instead of the planner's")
    limits: Limits = Field(default=Limits(), description="Admission limits")
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="vLLM engine options passed through, e.g. trust_remote_code: true"
    )
    demo: str | None = Field(default=None, min_length=1, description="Question that `muxserve deploy --demo` asks")


class Gateway(Section):
    """The OpenAI endpoint."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0: any free one")
    api_keys: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(_keys),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
    ] = Field(default_factory=list, description='Accepted keys, each literal or "env:NAME"; none: no key is asked for')
    max_body: Size = Field(default=4 << 20, description='Largest request body, e.g. "4MiB"')
    drain_seconds: Seconds = Field(default=30.0, description="How long running requests may go on after Ctrl-C")


class Fleet(Section):
    """A fleet file."""

    cluster: Annotated[Cluster, BeforeValidator(_auto_cluster)] = Field(
        default=Cluster(), description="The machine; auto: what it has"
    )
    policy: PolicyName = Field(default="adbs", description="How models share the machine")
    kv_pool: KVPool = Field(default=KVPool(), description="The shared KV page pool")
    gateway: Gateway = Field(default=Gateway(), description="The OpenAI endpoint")
    models: list[Model] = Field(min_length=1, description="The models to serve")

    _source: Source | None = PrivateAttr(None)

    def problem(self, path: KeyPath, message: str) -> Problem:
        """A problem of this fleet at the place of `path` in its file."""
        return self._source.problem(path, message) if self._source else Problem(message, "fleet", None, path)
