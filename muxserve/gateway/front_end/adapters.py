"""LoRA adapters as a front end knows them, and as engines do.

A front end knows an adapter by its name. Engines keep those that they have loaded, and block hashes, by name, path and
number; so what goes to them has a number of what the files are now, in the name, too: an adapter that comes back under
its name with other weights is another one, and so is one whose files were overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest

from muxserve.vllm.file_identity import adapter_number


def adapter_requests(model: str, adapters: Mapping[str, str]) -> dict[str, LoRARequest]:
    """What requests of `model` bring by the name of the adapter that they ask for; equal in every gateway, and whether
    its files are there or not: requests for one whose files are gone are refused (`for_engines`), and nothing else.

    Args:
        adapters: directories by name.
    """
    return {
        name: LoRARequest(lora_name=name, lora_int_id=_number(name, path), lora_path=path, base_model_name=model)
        for name, path in adapters.items()
    }


def _number(name: str, path: str) -> int:
    """Its number in front ends, above 0."""
    return 1 + int.from_bytes(blake2b(f"{name}\n{path}".encode(), digest_size=6).digest())


def for_engines(request: LoRARequest) -> LoRARequest:
    """The same as engines are to know it: with the number of its files as they are now.

    Raises:
        VLLMValidationError: the files are not there any more.
    """
    try:
        number = adapter_number(request.lora_name, request.lora_path)
    except OSError as error:
        raise VLLMValidationError(
            f"the adapter {request.lora_name!r} cannot be served: its files cannot be read ({error})", parameter="model"
        ) from None
    return LoRARequest(lora_name=f"{request.lora_name}#{number:x}", lora_int_id=number, lora_path=request.lora_path)
