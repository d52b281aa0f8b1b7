"""Kinds of values in a fleet file: how they are written, and what an editor is told of them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from muxserve.config.units import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    SPEED_PATTERN,
    parse_duration,
    parse_size,
    parse_speed,
)

AUTO: Literal["auto"] = "auto"
NONE: Literal["none"] = "none"
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


def check_gpu_ids(value: object) -> object:
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


def switch(value: object) -> object:
    """YAML 1.1 reads a bare `on` and `off` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


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
BytesPerSecond = Annotated[
    float, BeforeValidator(parse_speed), WithJsonSchema({"type": "string", "pattern": SPEED_PATTERN})
]
Seconds = Annotated[float, BeforeValidator(parse_duration), WithJsonSchema(_duration_schema())]
Milliseconds = Annotated[
    float, BeforeValidator(lambda value: parse_duration(value, unit="ms")), WithJsonSchema(_duration_schema())
]


def _max_wait(value: object) -> object:
    if value in (AUTO, NONE):
        return value
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{error} (or auto, or none)") from None
    if not seconds:
        raise ValueError(f"must be more than 0 (or auto, or none), not {value!r}")
    return seconds


MaxWait = Annotated[
    float | Literal["auto", "none"],
    BeforeValidator(_max_wait),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["auto", "none"]},
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": DURATION_PATTERN},
            ]
        }
    ),
]
MpsMode = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(switch),
    WithJsonSchema({"enum": ["auto", "on", "off", True, False]}),
]
Share = Annotated[float, Field(gt=0, le=1)]
GPU_IDS_SCHEMA = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": GPU_UUID_PATTERN}]},
    "uniqueItems": True,
}


class Section(BaseModel):
    """Base of every mapping in a fleet file: typed strictly, and no key that we do not know."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
