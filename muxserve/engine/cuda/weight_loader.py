"""vLLM's model loader that maps the weights of the model's holder."""

from __future__ import annotations

import dataclasses
import socket
import time
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.distributed import get_world_group
from vllm.model_executor.model_loader.weight_cache.ipc_loader import IpcModelLoader
from vllm.model_executor.model_loader.weight_cache.protocol import WeightCacheState

from muxserve.engine.cuda import weight_wire as wire
from muxserve.engine.cuda import weights
from muxserve.engine.cuda.weight_tensors import mapped

# How long a holder may take to come up; engines are started after it, so it is there unless it is being restarted.
WAIT_SECONDS = 120.0


class HeldWeightsLoader(IpcModelLoader):
    """Builds the model of tensors that lie in its holder's memory. It never loads from disk: a second copy of the
    weights is not in the unit's memory budget."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra: Any = load_config.model_loader_extra_config
        self._sockets: list[str] = list(extra["sockets"])
        self._seconds = float(extra.get("wait_seconds", WAIT_SECONDS))
        super().__init__(dataclasses.replace(load_config, model_loader_extra_config={"fallback": False}))

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        return 0  # an engine asks for no part of the GPU's memory, see `PooledGPUWorker`

    def download_model(self, model_config: ModelConfig) -> None:
        """The holder has the weights."""

    def _fetch_entries(self, model_config: ModelConfig) -> WeightCacheState:
        # A holder listens by its rank among all, over every stage of a pipeline.
        rank = get_world_group().rank_in_group
        found = fetch(self._sockets[rank], weights.fingerprint(model_config), self._seconds)
        return WeightCacheState(entries=mapped(found, self._device()), aliases=found.aliases, attrs={})

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.accelerator.current_device_index())


def fetch(path: str, fingerprint: dict[str, str], seconds: float) -> wire.Weights:
    """Ask the holder at `path`, waiting at most `seconds` for it to come up.

    Raises:
        TimeoutError: it did not come up.
        RuntimeError: it holds other weights; the message says what differs.
    """
    end = time.monotonic() + seconds
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.connect(path)
                wire.send(sock, wire.Ask(fingerprint))
                answer = wire.receive(sock)
            except (ConnectionError, FileNotFoundError) as error:
                if time.monotonic() >= end:
                    raise TimeoutError(
                        f"the process that holds the weights did not answer at {path} within {seconds:.0f} s "
                        f"({error}); see its log"
                    ) from error
                time.sleep(0.05)  # the socket appears when the holder has loaded and measured
                continue
        if isinstance(answer, wire.Weights):
            return answer
        raise RuntimeError(answer.error if isinstance(answer, wire.WeightsRefused) else f"unexpected answer {answer!r}")
