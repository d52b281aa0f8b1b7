"""The process that imports vLLM once; the gateway, the model parents and through them the engines are forked from it.

python -m muxserve.engine.warm_parent --deployment FILE --control-fd N --lifeline-fd M
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import signal
import socket
from typing import Any, Literal

from muxserve.deployment import Deployment, fleet_of, load
from muxserve.engine.family import Control, ForkingParent, adopt_orphans, engine_log, file_name, refuse_cuda

log = logging.getLogger(__name__)


def environment() -> dict[str, str]:
    """What vLLM must find in the environment before it is imported."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # An engine that may use more threads makes its team after it was forked.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM salts its block hashes with this; engines that share a prefix index must agree, also after a restart.
        "PYTHONHASHSEED": str(int.from_bytes(secrets.token_bytes(4), "little")),
    }


def preload(device: str) -> None:
    """Import what engines on `device` (cpu or cuda) and gateway need, so that a fork starts with it. Touches no GPU."""
    import transformers  # noqa: F401
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen2
    import vllm.model_executor.models.qwen3
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor  # noqa: F401

    import muxserve.engine.process
    import muxserve.engine.ranks
    from muxserve.engine import vllm_seam
    from muxserve.gateway import main as gateway

    if device == "cuda":
        import muxserve.engine.cuda.worker
    else:
        # Not on a GPU: vLLM's CPU worker puts stand-ins into torch when it is imported.
        import muxserve.engine.cpu.worker  # noqa: F401
    vllm_seam.check(device)
    gateway.preload()
    refuse_cuda()


def _register(deployment: Deployment) -> None:
    """Look at the models' classes here: vLLM would start a Python process per class, the first time on a machine."""
    from muxserve.gateway import seam

    seam.register_architectures(deployment.models)


class WarmParent:
    """Forks the gateway, and engines and holders of weights or, where these fork their engines, model parents, to which
    it passes the orders for engines on.

    `path` is the deployment's file: what is forked here later reads it anew, since the sizes of pools on GPUs are known
    only when the weights are loaded.
    """

    def __init__(self, path: str, deployment: Deployment, control: Control, lifeline_fd: int | None) -> None:
        self.path = path
        self.deployment = deployment
        self.control = control
        self.lifeline_fd = lifeline_fd
        self._model_parents: dict[str, tuple[int, socket.socket]] = {}
        self._parent = ForkingParent(control, control, self._handle, self._on_exit)

    def run(self) -> None:
        """Serve the controller until it goes away."""
        adopt_orphans()
        self.control.event("ready")
        self._parent.run()

    def _handle(self, command: dict[str, Any]) -> None:
        if command.get("op") != "fork":
            log.warning("unknown command %r", command)
        elif command["kind"] == "gateway":
            self._fork_gateway()
        elif command["kind"] == "weights":
            self._fork_holder(command["model"])
        elif shares_by_forking(self.deployment):
            self._order_engine(command["model"], json.dumps(command).encode())
        else:
            self._fork_engine(command["model"], command["phase"])

    def _fork_gateway(self) -> None:
        def child() -> None:
            from muxserve.gateway.main import run

            def on_up() -> None:
                self.control.event("up", kind="gateway", model="", phase="", pid=os.getpid())

            self._close_model_parents()
            try:
                run(fleet_of(deployment := load(self.path), deployment.gateway), 0, self.lifeline_fd, on_up)
            except Exception as error:
                self.control.event(
                    "failed", kind="gateway", model="", phase="", error=f"{type(error).__name__}: {error}"
                )
                raise

        # The gateway outlives this process, since it holds the clients' connections; its lifeline is the controller.
        log_file = self.deployment.log_dir / "gateway.log"
        pid = self._parent.fork("gateway", log_file, child, die_with_parent=False)
        self.control.event("forked", kind="gateway", model="", phase="", pid=pid)

    def _fork_engine(self, model: str, phase: Literal["prefill", "decode"]) -> None:
        def child() -> None:
            from muxserve.engine.direct import run_direct_engine

            run_direct_engine(load(self.path), model, phase, self.control)

        log_file = engine_log(self.deployment, model, phase)
        pid = self._parent.fork(f"engine {model}/{phase}", log_file, child)
        self.control.event("forked", kind="engine", model=model, phase=phase, pid=pid)

    def _fork_holder(self, model: str) -> None:
        def child() -> None:
            from muxserve.engine.cuda.weights import run_holder

            run_holder(load(self.path), model, self.control)

        log_file = self.deployment.log_dir / f"weights-{file_name(model)}.log"
        pid = self._parent.fork(f"weights {model}", log_file, child)
        self.control.event("forked", kind="weights", model=model, phase="", pid=pid)

    def _order_engine(self, model: str, order: bytes) -> None:
        known = self._model_parents.get(model)
        if known is not None:
            try:
                known[1].send(order)
                return
            except OSError:
                # It died, and its end has not been collected yet.
                known[1].close()
                del self._model_parents[model]
        self._fork_model_parent(model).send(order)

    def _fork_model_parent(self, model: str) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def child() -> None:
            from muxserve.engine import model_parent

            ours.close()
            self._close_model_parents()
            model_parent.run_model_parent(self.deployment, model, theirs, self.control)

        from muxserve.engine import model_parent

        pid = self._parent.fork(f"model {model}", model_parent.log_file(self.deployment, model), child)
        theirs.close()
        self.control.event("forked", kind="model", model=model, phase="", pid=pid)
        self._model_parents[model] = (pid, ours)
        return ours

    def _close_model_parents(self) -> None:
        for _, sock in self._model_parents.values():
            sock.close()

    def _on_exit(self, pid: int, status: int) -> None:
        for model, (parent_pid, sock) in list(self._model_parents.items()):
            if parent_pid == pid:
                sock.close()
                del self._model_parents[model]


def shares_by_forking(deployment: Deployment) -> bool:
    """Whether a model's engines share its weights by being forked from a process that has loaded them."""
    return deployment.device == "cpu" and deployment.ranks == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deployment", required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches everyone; the controller decides
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    deployment = load(args.deployment)
    os.environ.update(environment())
    if deployment.gpu is not None:
        # Engines, their workers and the holders of weights number the unit's GPUs by rank.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(deployment.gpu.uuids)
    control = Control(socket.socket(fileno=args.control_fd))
    try:
        preload(deployment.device)
        _register(deployment)
    except Exception as error:
        control.event("failed", kind="warm_parent", model="", phase="", error=f"{type(error).__name__}: {error}")
        raise
    WarmParent(args.deployment, deployment, control, args.lifeline_fd).run()


if __name__ == "__main__":
    main()
