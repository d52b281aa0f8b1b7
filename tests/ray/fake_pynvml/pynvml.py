"""Stands in for the module `pynvml` in processes of a node: the GPUs that are listed in $FAKE_GPUS (JSON)."""

import json
import os
from typing import Any

from tests.gpu_control.fake_nvml import FakeGpu, FakeNvml
from tests.gpu_control.fake_nvml import NVMLError as NVMLError

_FAKE = FakeNvml(*(FakeGpu(**each) for each in json.loads(os.environ.get("FAKE_GPUS", "[]"))))


def __getattr__(name: str) -> Any:
    return getattr(_FAKE, name)
