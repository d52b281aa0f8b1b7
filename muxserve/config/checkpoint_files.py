"""The files of a checkpoint, looked at before an engine or a gateway opens them.

Only regular files are opened. Links are followed; what is no file at their end, is read. Nothing here computes: that a
checkpoint's files are whole says nothing of what its weights are worth.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

INDEX = "model.safetensors.index.json"
# For config.json and its like. The largest are indices of files, with a hundred thousand tensors.
_MOST_JSON_BYTES = 64 << 20
_MOST_JSON_DEPTH = 64
# As the format has it.
_MOST_HEADER_BYTES = 100_000_000
_MOST_FILES = 10_000
_BOM = b"\xef\xbb\xbf"
_LFS_POINTER = b"version https://git-lfs"
# Bits of a number, by what safetensors call its type.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
# What a tokenizer is made from, one of them.
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "tiktoken.model",
    "*.tiktoken",
)
# What vLLM and Transformers may open beside the weights.
_OPENED = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
# What is read ahead of the engines, also if they do not load it.
_WEIGHTS = (".safetensors", ".bin", ".pt")
# Formats in which engines load safetensors files.
_SAFETENSORS_FORMATS = (None, "auto", "hf", "safetensors", "fastsafetensors")


class CheckpointError(Exception):
    """The checkpoint cannot be had, read or served; the message says why."""


@contextlib.contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading. Others are not even opened: a FIFO would block, and a device may do anything.

    Raises:
        CheckpointError: it is none, or cannot be read.
    """
    try:
        _check_regular(file, os.stat(file))
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            _check_regular(file, os.fstat(stream.fileno()))
            yield stream
    except OSError as error:
        raise CheckpointError(f"{file} {_why(file, error)}") from None


def _check_regular(file: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        raise CheckpointError(f"{file} is {kinds.get(stat.S_IFMT(found.st_mode), 'a device')}, not a regular file")


def _why(file: Path, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "is a link that leads back to itself"
    if error.errno == errno.ENOENT:
        return f"is a link to {os.readlink(file)}, which is not there" if file.is_symlink() else "is not there"
    return f"cannot be read: {error.strerror}"


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object in UTF-8, as vLLM would read it.

    Raises:
        CheckpointError: it cannot be read, or is none.
    """
    return _object(file, _parsed(file, _read(file)))


def read_json_list(file: Path) -> list[dict[str, Any]]:
    """A JSON list of objects in UTF-8; see `read_json`.

    Raises:
        CheckpointError: it cannot be read, or is none.
    """
    value = _parsed(file, _read(file))
    if not isinstance(value, list):
        raise CheckpointError(f"{file} is not a JSON list")
    return [_object(file, each) for each in value]


def _read(file: Path) -> bytes:
    with opened(file) as stream:
        data = stream.read(_MOST_JSON_BYTES + 1)
    if len(data) > _MOST_JSON_BYTES:
        raise CheckpointError(f"{file} has more than {_MOST_JSON_BYTES >> 20} MiB; is it a config file?")
    if data.startswith(_BOM):
        raise CheckpointError(f"{file} begins with a byte order mark, which vLLM cannot read; save it without one")
    return data


def _object(file: Path, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return value


def _parsed(file: Path, data: bytes) -> object:
    try:
        value: object = json.loads(data.decode())
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is not UTF-8 text") from None
    except RecursionError:
        raise CheckpointError(f"{file} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    level = [value]
    for _ in range(_MOST_JSON_DEPTH):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return value
    raise CheckpointError(f"{file} is nested too deeply")


def _inside(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


# ---------------------------------------------------------------- weights


def safetensors_files(directory: Path) -> list[Path]:
    """The safetensors files that vLLM loads: all that the index names, without one all but Mistral's own format.

    Raises:
        CheckpointError: the index cannot be read, or names something else than a file beside it.
    """
    index = directory / INDEX
    if not os.path.lexists(index):
        names = {file.name for file in directory.glob("*.safetensors")}
        names = {name for name in names if not name.startswith("consolidated")} or names
    else:
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{index} has no weight_map from tensors to files")
        names = set(shards.values())
        for name in sorted(names):
            if name != os.path.basename(name) or name in ("", ".", ".."):
                raise CheckpointError(f"{index} names {name!r}, which is not a file beside it")
    return [directory / name for name in sorted(names)]


def tensors_of(file: Path) -> dict[str, Mapping[str, Any]]:
    """What the header of a safetensors file says of its tensors, by name: `dtype`, `shape` and `data_offsets`.

    Raises:
        CheckpointError: it is no such file, or not a whole one.
    """
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if not size:
            raise CheckpointError(f"{file} is empty")
        if _LFS_POINTER.startswith(prefix):
            raise CheckpointError(f"{file} is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`")
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > _MOST_HEADER_BYTES:
            raise CheckpointError(f"{file} is not a safetensors file")
        if length > size - 8:
            raise CheckpointError(f"{file} is cut off in its header")
        header = _object(file, _parsed(file, stream.read(length)))
    header.pop("__metadata__", None)
    end = max((_end_of(file, name, tensor) for name, tensor in header.items()), default=0)
    if end != size - 8 - length:
        what = "is cut off" if end > size - 8 - length else "has more than its tensors"
        raise CheckpointError(f"{file} {what}: by its header it has {8 + length + end:,} bytes, and it has {size:,}")
    return header


def _end_of(file: Path, name: str, tensor: Any) -> int:
    """Where a tensor ends in the data of its file."""
    try:
        (begin, end), shape, bits = tensor["data_offsets"], tensor["shape"], _BITS.get(tensor["dtype"])
        counts = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
        fits = counts and begin <= end and (bits is None or math.prod(shape) * bits == 8 * (end - begin))
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise CheckpointError(f"{file} says of {name[:80]!r} what cannot be; it is damaged")
    return int(end)


# ---------------------------------------------------------------- the whole


def check_directory(directory: Path, engine_args: Mapping[Any, object]) -> None:
    """Whether the files of a checkpoint can be opened and are whole.

    Args:
        engine_args: those of its model, which may have weights or a tokenizer come from elsewhere.

    Raises:
        CheckpointError: one cannot, or is not.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(directory))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from None
    if len(names) > _MOST_FILES:
        raise CheckpointError(f"{directory} has {len(names):,} files; give the directory of one checkpoint")
    for name in names:
        file = directory / name
        # A link to weights that are not loaded may lead nowhere.
        if (name.endswith(_OPENED) or (name.endswith(_WEIGHTS) and file.exists())) and not file.is_dir():
            with opened(file):
                pass
    read_json(directory / "config.json")
    load_format = engine_args.get("load_format")
    if load_format != "dummy":
        _check_weights(directory, load_format)
    _check_tokenizer(directory, engine_args)


def _check_weights(directory: Path, load_format: object) -> None:
    files = safetensors_files(directory) if load_format in _SAFETENSORS_FORMATS else []
    for file in files:
        tensors_of(file)
    if files:
        return
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        for file in sorted(directory.glob(pattern)):
            with opened(file) as stream:
                if not stream.read(1):
                    raise CheckpointError(f"{file} is empty")


def _check_tokenizer(directory: Path, engine_args: Mapping[Any, object]) -> None:
    settings = directory / "tokenizer_config.json"
    own_code = os.path.lexists(settings) and "auto_map" in read_json(settings)
    elsewhere = engine_args.get("tokenizer") or engine_args.get("skip_tokenizer_init")
    if elsewhere or (own_code and engine_args.get("trust_remote_code")):
        return
    found = [file for pattern in _TOKENIZERS for file in sorted(directory.glob(pattern))]
    if not found:
        raise CheckpointError(
            f"{directory} has no tokenizer (tokenizer.json, tokenizer.model or the like); add it, or name another with "
            "`engine_args: {tokenizer: ...}`"
        )
    for file in found:
        with opened(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            if not size:
                raise CheckpointError(f"{file} is empty")
            if file.name == "tokenizer.json":
                stream.seek(max(0, size - 64))
                if not stream.read().rstrip().endswith(b"}"):
                    raise CheckpointError(f"{file} is cut off, or not JSON")
