"""LoRA adapters as a front end knows them, and as engines do.

A front end knows an adapter by its name. Engines keep those that they have loaded, and block hashes, by name, path and
number; so what goes to them has a number of what the files are now, in the name, too: an adapter that comes back under
its name with other weights is another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from vllm.lora.request import LoRARequest


def adapter_requests(model: str, adapters: Mapping[str, str]) -> dict[str, LoRARequest]:
    """What requests of `model` bring by the name of the adapter that they ask for; equal in every gateway.

    Args:
        adapters: directories by name.
    """
    return {
        name: LoRARequest(lora_name=name, lora_int_id=_number(name, path), lora_path=path, base_model_name=model)
        for name, path in adapters.items()
    }


def for_engines(request: LoRARequest) -> LoRARequest:
    """The same as engines are to know it."""
    return LoRARequest(
        lora_name=f"{request.lora_name}#{request.lora_int_id:x}",
        lora_int_id=request.lora_int_id,
        lora_path=request.lora_path,
    )


def _number(name: str, path: str) -> int:
    stamps = []
    for file in sorted(Path(path).glob("adapter_*")):
        stat = file.stat()
        stamps.append(f"{file.name} {stat.st_size} {stat.st_mtime_ns}")
    digest = hashlib.sha256("\n".join([name, path, *stamps]).encode()).digest()
    return 1 + int.from_bytes(digest[:6], "big")
