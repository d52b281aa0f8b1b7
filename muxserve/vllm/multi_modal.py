"""Whether vLLM, as it is installed here, serves a multi-modal checkpoint with images. It is asked itself, in a process
of its own, since importing it takes seconds."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

from muxserve.vllm import language_models
from muxserve.vllm.args import environment, image_args

log = logging.getLogger(__name__)

SECONDS = 120.0


@dataclass(frozen=True)
class ServedWhole:
    """Whether requests may bring `images`; if not, `why`, in words. Without `text` vLLM cannot load the checkpoint even
    for that."""

    images: bool
    why: str = ""
    text: bool = True


@cache
def served_whole(directory: Path, options: str) -> ServedWhole:
    """What vLLM says of the checkpoint in `directory` with these `engine_args`, in JSON. Where vLLM gives no answer,
    images: an engine says more when it starts."""
    log.warning("asking vLLM whether it serves images with %s here", directory)
    line = [sys.executable, "-m", __name__, str(directory), options]
    try:
        asked = subprocess.run(
            line, env=environment() | os.environ, capture_output=True, text=True, timeout=SECONDS, check=True
        )
        return ServedWhole(**json.loads(asked.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, LookupError, ValueError, TypeError):
        return ServedWhole(images=True)


def look(directory: Path, options: Mapping[str, object]) -> ServedWhole:
    """The same, in this process. Where the processor of images is not at hand, by the model's class alone.

    Raises:
        ImportError: vLLM is not installed.
    """
    from vllm import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    known = {field.name for field in fields(EngineArgs)}
    try:
        language_models.register_classes(json.loads((directory / "config.json").read_text()))
    except Exception as error:
        return ServedWhole(images=False, why=_lacking(error), text=False)
    if not [*directory.glob("*processor_config.json")]:
        return ServedWhole(images=True)
    try:
        given = image_args() | {name: value for name, value in options.items() if name in known}
        config = EngineArgs(**{**given, "model": str(directory)}).create_model_config()
        if not config.supports_multimodal_inputs:
            return ServedWhole(images=False, why="vLLM takes no images for it")
        processor = MULTIMODAL_REGISTRY.create_processor(config)
        taken = [modality for modality, most in processor.info.allowed_mm_limits.items() if most]
        # As engines do when they start.
        processor.get_dummy_mm_inputs(dict.fromkeys(taken, 1))
    except Exception as error:
        return ServedWhole(images=False, why=_lacking(error))
    return ServedWhole(images=True)


def _lacking(error: BaseException) -> str:
    """What is missing for it: the module whose import failed first, where one did."""
    chain = [*_causes(error)]
    missing = [each.name for each in chain if isinstance(each, ModuleNotFoundError) and each.name]
    if missing:
        return f"vLLM needs the module {missing[-1].partition('.')[0]}, which is not installed here"
    said = next((each for each in reversed(chain) if isinstance(each, ImportError)), error)
    return f"vLLM says: {next(iter(str(said).strip().splitlines()), repr(said))}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


if __name__ == "__main__":
    print("\n" + json.dumps(asdict(look(Path(sys.argv[1]), json.loads(sys.argv[2])))))
