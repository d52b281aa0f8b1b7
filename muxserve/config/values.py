"""Kinds of values in a fleet file: how they are written, and their JSON schemas for editors."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from muxserve.config.problems import shown

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "kib": 1 << 10,
    "m": 1000**2,
    "mb": 1000**2,
    "mib": 1 << 20,
    "g": 1000**3,
    "gb": 1000**3,
    "gib": 1 << 30,
    "t": 1000**4,
    "tb": 1000**4,
    "tib": 1 << 40,
}
_MOST_BYTES = 1 << 60
# A thousand years: what is longer cannot be added to a time.
_MOST_SECONDS = 3.2e10
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SPEED = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT])(i?)(b|bit|B)(?:/s|ps)?\s*")
_PREFIXES = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}

SPEED_PATTERN = r"^\s*\d+(\.\d+)?\s*[kKMGT]i?(b|bit|B)(/s|ps)?\s*$"
SIZE_PATTERN = r"^\s*\d+(\.\d+)?\s*([kKmMgGtT]([iI]?[bB])?|[bB])?\s*$"
DURATION_PATTERN = r"^\s*\d+(\.\d+)?\s*(us|ms|s|m|min|h)\s*$"


def parse_size(value: object) -> int:
    """Bytes of a size: a whole number of bytes, or text such as "512MiB" (1024) or "500MB" (1000).

    Raises:
        ValueError: not a positive size.
    """
    wrong = f"must be a size such as 512MiB or 2GiB, not {shown(value)}"
    if isinstance(value, bool):
        raise ValueError(wrong)
    size: float
    if isinstance(value, int):
        size = value
    elif isinstance(value, str) and (match := _QUANTITY.fullmatch(value)) and match[2].lower() in _SIZE_UNITS:
        size = float(match[1]) * _SIZE_UNITS[match[2].lower()]
    else:
        raise ValueError(wrong)
    if size <= 0:
        raise ValueError(f"must be larger than zero, not {shown(value)}")
    if size > _MOST_BYTES:
        raise ValueError(f"must be at most 1 EiB, not {shown(value)}")
    return max(1, round(size))


def parse_duration(value: object, *, unit: str = "s") -> float:
    """A duration in `unit` ("s" or "ms"): a number of those, or text such as "500ms", "30s", "2m".

    Raises:
        ValueError: not a finite duration of at least zero.
    """
    wrong = f"must be a number of {unit} or a duration such as 500ms, 30s or 2m, not {shown(value)}"
    if isinstance(value, bool):
        raise ValueError(wrong)
    duration: float
    if isinstance(value, (int, float)):
        duration = value
    elif isinstance(value, str) and (match := _QUANTITY.fullmatch(value)) and match[2] in _SECONDS:
        duration = float(match[1]) * _SECONDS[match[2]] / _SECONDS[unit]
    else:
        raise ValueError(wrong)
    if not duration >= 0:
        raise ValueError(f"must be zero or more, not {shown(value)}")
    if duration > _MOST_SECONDS / _SECONDS[unit]:
        raise ValueError(f"must be at most a thousand years, not {shown(value)}")
    return float(duration)


def parse_speed(value: object) -> float:
    """Bytes per second of a link's speed, which says whether it means bits or bytes: "25Gb/s", "25Gbit" or "3GB/s".

    Raises:
        ValueError: not a speed above zero.
    """
    wrong = f"must be a speed such as 25Gb/s (bits) or 3GB/s (bytes), not {shown(value)}"
    match = _SPEED.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(wrong)
    number, prefix, binary, unit = match.groups()
    speed = float(number) * float(1024 if binary else 1000) ** _PREFIXES[prefix] / (1 if unit == "B" else 8)
    if not 0.0 < speed < math.inf:
        raise ValueError(f"must be larger than zero, not {shown(value)}")
    return speed


AUTO: Literal["auto"] = "auto"
NONE: Literal["none"] = "none"
Auto = Literal["auto"]
PolicyName = Literal["adbs", "slack", "free", "fcfs"]
SmSharingName = Literal["auto", "mps", "green_contexts"]
GPU_UUID_PATTERN = r"^GPU-[0-9a-fA-F-]{36}$"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
# As models are called elsewhere: org/name, name:tag.
ALIAS_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"
# A secret stands in a variable or a file.
SECRET_PATTERN = r"^(env|file):.+$"
ENDPOINT_PATTERN = r"^https?://[^\s?#]+$"
ORIGIN_PATTERN = r"^(\*|https?://[^/\s]+)$"


def plain_name(asked: str) -> str:
    """A model's name for what clients call it, such as org/name or name:tag; empty if nothing is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", asked.rpartition("/")[2]).strip("-._")[:64]


def _size_or_auto(value: object) -> object:
    if value == AUTO:
        return value
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"{error} (or auto)") from None


def _count_or_auto(least: int, most: int) -> BeforeValidator:
    """A whole number in those bounds, or auto."""

    def check(value: object) -> object:
        if value == AUTO:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"must be a whole number of at least {least}, or auto, not {shown(value)}")
        if value > most:
            raise ValueError(f"must be at most {most:,}, or auto, not {shown(value)}")
        return value

    return BeforeValidator(check)


def _count_schema(least: int, most: int) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [_AUTO_SCHEMA, {"type": "integer", "minimum": least, "maximum": most}]})


def check_gpu_ids(value: object) -> object:
    wrong = 'must be a list of GPUs by number or UUID, such as [0, 1] or ["GPU-8f6d..."]'
    if not isinstance(value, list):
        raise ValueError(f"{wrong}, not {shown(value)}")
    for each in value:
        number = isinstance(each, int) and not isinstance(each, bool) and each >= 0
        if not number and not (isinstance(each, str) and re.match(GPU_UUID_PATTERN, each)):
            raise ValueError(f"{wrong}; {shown(each)} is neither (`nvidia-smi -L` lists them)")
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
# Cores and threads; stages of layers; sequences and tokens of one step; tokens of a sequence, one of them the
# answer's.
CoresOrAuto = Annotated[int | Auto, _count_or_auto(1, 4096), _count_schema(1, 4096)]
StagesOrAuto = Annotated[int | Auto, _count_or_auto(1, 256), _count_schema(1, 256)]
SequencesOrAuto = Annotated[int | Auto, _count_or_auto(1, 1 << 16), _count_schema(1, 1 << 16)]
TokensOrAuto = Annotated[int | Auto, _count_or_auto(1, 1 << 24), _count_schema(1, 1 << 24)]
LengthOrAuto = Annotated[int | Auto, _count_or_auto(2, 1 << 30), _count_schema(2, 1 << 30)]
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
        raise ValueError(f"must be more than 0 (or auto, or none), not {shown(value)}")
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
