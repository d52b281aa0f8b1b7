"""A unit's process that has imported vLLM: its model parents and through them its engines are forked from it.

It is forked from the machine's parent itself (`muxserve.forks.machine_parent`), or, where the unit is alone on its
machine, started as `python -m muxserve.forks.warm_parent --unit-spec FILE --control-fd N`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muxserve.engine.rest import REST, WAKE
from muxserve.forks.family import (
    SPARE_PARENT_TITLE,
    Control,
    ForkingParent,
    adopt_orphans,
    engine_log,
    file_name,
)
from muxserve.gpu.environment import ImportsThatTouchCuda, parent_environment, refuse_cuda
from muxserve.net.heartbeat import heartbeat_file
from muxserve.net.logs import log_to_stderr
from muxserve.net.process import words
from muxserve.spec import ModelSpec, UnitSpec, load
from muxserve.spec.unit import EnginePhase
from muxserve.vllm.args import environment

log = logging.getLogger(__name__)

# What a spare one of the machine's parent does, with the fleet's file, its control socket and the lifeline.
BeSpare = Callable[[str, Control, int], None]


def preload(device: str) -> None:
    """Import what engines on `device` (cpu or cuda) need, so that a fork starts with it. Touches no GPU."""
    imports = ImportsThatTouchCuda()
    with imports if device == "cuda" else contextlib.nullcontext():
        import transformers  # noqa: F401
        import vllm.model_executor.models.llama
        import vllm.model_executor.models.qwen2
        import vllm.model_executor.models.qwen3
        import vllm.v1.engine.core
        import vllm.v1.executor.uniproc_executor  # noqa: F401

        import muxserve.engine.loop
        import muxserve.engine.ranks
        import muxserve.engine.support
        from muxserve.vllm import engine_internals

        if device == "cuda":
            from muxserve.engine.cuda.worker import prepare

            prepare()
        else:
            # Not on a GPU: vLLM's CPU worker puts stand-ins into torch when it is imported.
            import muxserve.engine.cpu.worker  # noqa: F401

            prepare_workers()
        engine_internals.check(device)
    refuse_cuda(imports.after)
    # Imports leave nothing to collect, and looking for it before the first fork takes a third of a second.
    gc.freeze()


def prepare_workers() -> None:
    """Do once what vLLM would do in every process that loads a model, for a third of a second each time."""
    import vllm.distributed.elastic_ep.elastic_execute
    import vllm.model_executor.layers.quantization.online.base  # noqa: F401
    import vllm.utils.cpu_resource_utils as cpus
    import vllm.v1.sample.logits_processor as processors
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    configure_logging_if_needed(LoggingConfig())
    load_general_plugins()
    # It asks `lscpu`, a shell and a program more each time.
    listed = cpus._get_cpu_list()
    cpus._get_cpu_list = lambda: list(listed)
    # It reads what every installed package offers.
    plugins = processors._load_logitsprocs_plugins()
    processors._load_logitsprocs_plugins = lambda: list(plugins)
    # It looks through all modules for the kernels to replace. Who imports them later finds those that were put there.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def register(models: Iterable[ModelSpec], device: str) -> None:
    """Look at the models' classes here: vLLM would start a Python process per class, the first time on a machine."""
    from muxserve.gateway.front_end import seam

    models = list(models)
    if device == "cuda" and any(model.state_blocks for model in models):
        from muxserve.engine.cuda.states import import_kernels

        # Importing the class would initialise CUDA, and this process forks.
        import_kernels()
    seam.register_architectures(model.path for model in models)


class WarmParent:
    """Forks engines and holders of weights or, where model parents fork the engines, these, to which it passes the
    orders for engines on.

    `path` is the unit's file: what is forked here later reads it anew, since the sizes of pools on GPUs are known
    only when the weights are loaded.
    """

    def __init__(self, path: str, unit_spec: UnitSpec, control: Control, be_spare: BeSpare | None = None) -> None:
        self.path = path
        self.unit_spec = unit_spec
        self.control = control
        self._be_spare = be_spare
        self._model_parents: dict[str, tuple[int, socket.socket]] = {}
        # Engines that were forked here: by model and phase.
        self._engines: dict[tuple[str, str], _ForkedChild] = {}
        # What copies weights back.
        self._copier: _ForkedChild | None = None
        self._parent = ForkingParent(
            control, control, self._handle, self._on_exit, heartbeat_file(unit_spec.run_dir, "warm_parent")
        )

    def run(self) -> None:
        """Serve the controller until it goes away."""
        adopt_orphans()
        self.control.event("ready")
        self._parent.run()

    def _handle(self, command: dict[str, Any]) -> None:
        operation = command.get("op")
        if operation == "end":
            self._end_model_parent(command["model"])
        elif operation == "hibernate":
            self._hibernate(command["model"])
        elif operation == "prefetch":
            self._prefetch(command["model"])
        elif operation == "pin":
            self._tell_copier(f"pin {command['model']}")
        elif operation == "forget":
            if self._copier is not None:
                self._copier.tell(f"forget {command['model']}".encode())
        elif operation == "rest":
            self._rest(command["model"], command["phase"])
        elif operation != "fork":
            log.warning("unknown command %r", command)
        elif command["kind"] == "spare":
            self._fork_spare(command["fleet"], Path(command["log"]), command["fds"])
        else:
            self._know(command["model"])
            self._fork(command)

    def _know(self, model: str) -> None:
        """A model may have joined the unit since it was started."""
        if all(each.name != model for each in self.unit_spec.models):
            self.unit_spec = load(self.path)
            os.environ.update(parent_environment(self.unit_spec))
            try:
                register([self.unit_spec.model(model)], self.unit_spec.device)
            except Exception:
                # Its engines say why they cannot start; those of the others go on.
                log.exception("%s cannot be looked at", model)

    def _fork(self, command: dict[str, Any]) -> None:
        if command["kind"] == "weights":
            self._fork_holder(command["model"], command.get("weights", ""))
        elif shares_by_forking(self.unit_spec):
            self._order_engine(command["model"], json.dumps(command).encode())
        else:
            self._fork_engine(command["model"], command["phase"])

    def _fork_spare(self, fleet_file: str, log_file: Path, fds: Sequence[int]) -> None:
        """A process that can take the place of the machine's parent, which has died, and its spare one as well."""
        be_spare = self._be_spare
        assert be_spare is not None, "only warm parents that the machine's parent forks are asked for a spare one"
        control_fd, lifeline_fd = fds

        def child() -> None:
            # It outlives the unit.
            os.setpgid(0, 0)
            self._close_sockets()
            self.control.close()
            be_spare(fleet_file, Control(socket.socket(fileno=control_fd)), lifeline_fd)

        pid = self._parent.fork(SPARE_PARENT_TITLE, log_file, child, die_with_parent=False)
        with contextlib.suppress(OSError):  # whoever of the two comes first
            os.setpgid(pid, pid)
        for fd in fds:
            os.close(fd)
        self.control.event("forked", kind="spare", pid=pid)

    def _fork_engine(self, model: str, phase: EnginePhase) -> None:
        """Have back the one that rests, or fork another."""
        known = self._engines.get((model, phase))
        if known is not None and known.rests and known.tell(WAKE):
            known.rests = False
            self.control.event("forked", kind="engine", model=model, phase=phase, pid=known.pid)
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def child() -> None:
            from muxserve.forks.direct import run_direct_engine

            ours.close()
            self._close_sockets()
            run_direct_engine(load(self.path), model, phase, self.control, theirs)

        log_file = engine_log(self.unit_spec, model, phase)
        pid = self._parent.fork(f"engine {model}/{phase}", log_file, child)
        theirs.close()
        if known is not None:
            known.orders.close()
        self._engines[model, phase] = _ForkedChild(pid, ours)
        self.control.event("forked", kind="engine", model=model, phase=phase, pid=pid)

    def _rest(self, model: str, phase: str) -> None:
        """The model sleeps; the engine says when it rests."""
        known = self._engines.get((model, phase))
        if known is not None and known.tell(REST):
            known.rests = True

    def _tell_copier(self, order: str) -> int:
        """Have what copies weights back, or fork it; its pid."""
        if self._copier is not None and self._copier.tell(order.encode()):
            return self._copier.pid
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def child() -> None:
            from muxserve.engine.cuda.weight_copier import run_copier

            ours.close()
            self._close_sockets()
            run_copier(self.path, self.control, theirs)

        pid = self._parent.fork("weight copier", self.unit_spec.log_dir / "weight-copier.log", child)
        theirs.close()
        if self._copier is not None:
            self._copier.orders.close()
        self._copier = _ForkedChild(pid, ours)
        self._copier.tell(order.encode())
        return pid

    def _fork_holder(self, model: str, how: str) -> None:
        """`how`: empty, `copy` or `restore`, as of `cluster.starts.WeightSource`."""
        if how == "restore":
            pid = self._tell_copier(f"restore {model}")
            self.control.event("forked", kind="weights", model=model, phase="", pid=pid)
            return

        def child() -> None:
            from muxserve.engine.cuda.weight_holder import run_holder

            self._close_sockets()
            run_holder(load(self.path), model, self.control, copies=how == "copy")

        log_file = self.unit_spec.log_dir / f"weights-{file_name(model)}.log"
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
            from muxserve.forks import model_parent

            ours.close()
            self._close_sockets()
            model_parent.run_model_parent(self.unit_spec, model, theirs, self.control)

        from muxserve.forks import model_parent

        pid = self._parent.fork(f"model {model}", model_parent.log_file(self.unit_spec, model), child)
        theirs.close()
        self.control.event("forked", kind="model", model=model, phase="", pid=pid)
        self._model_parents[model] = (pid, ours)
        return ours

    def _end_model_parent(self, model: str) -> None:
        """The model is not served here for now: its weights go. The process ends when it cannot get orders any more."""
        known = self._model_parents.pop(model, None)
        if known is not None:
            known[1].close()

    def _hibernate(self, model: str) -> None:
        """The model sleeps; its parent says when its memory has moved."""
        known = self._model_parents.get(model)
        try:
            if known is None:
                raise OSError("nobody has loaded it")
            known[1].send(json.dumps({"op": "hibernate"}).encode())
        except OSError as error:
            self.control.event("hibernates", model=model, error=words(error))

    def _prefetch(self, model: str) -> None:
        """A model that sleeps in a file will be woken soon."""
        known = self._model_parents.get(model)
        if known is not None:
            with contextlib.suppress(OSError):  # it has died: the next one loads the model
                known[1].send(json.dumps({"op": "prefetch"}).encode())

    def _close_sockets(self) -> None:
        """In a child: orders to others are not its business."""
        for _, sock in self._model_parents.values():
            sock.close()
        for child in (*self._engines.values(), *([self._copier] if self._copier is not None else [])):
            child.orders.close()

    def _on_exit(self, pid: int, status: int) -> None:
        for model, (parent_pid, sock) in list(self._model_parents.items()):
            if parent_pid == pid:
                sock.close()
                del self._model_parents[model]
        for place, engine in list(self._engines.items()):
            if engine.pid == pid:
                engine.orders.close()
                del self._engines[place]
        if self._copier is not None and self._copier.pid == pid:
            self._copier.orders.close()
            self._copier = None


@dataclass(slots=True)
class _ForkedChild:
    """A process that was forked from the warm parent and takes orders, the socket for these, and whether it was told to
    rest."""

    pid: int
    orders: socket.socket
    rests: bool = False

    def tell(self, order: bytes) -> bool:
        """Whether it could be told."""
        try:
            self.orders.send(order)
        except OSError:
            return False
        return True


def shares_by_forking(unit_spec: UnitSpec) -> bool:
    """Whether a model's engines share its weights by being forked from a process that has loaded them."""
    return unit_spec.device == "cpu" and unit_spec.ranks == 1


def run(file: str, control: Control, be_spare: BeSpare | None = None) -> None:
    """Serve the unit whose spec is in `file` from a process that has done `preload`, until the controller goes
    away. `be_spare`: what a forked spare one of the machine's parent does; None where there is no such parent."""
    unit_spec = load(file)
    os.environ.update(parent_environment(unit_spec))
    try:
        register(unit_spec.models, unit_spec.device)
    except Exception as error:
        control.event("failed", kind="warm_parent", error=words(error))
        raise
    WarmParent(file, unit_spec, control, be_spare).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unit-spec", required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches everyone; the controller decides
    log_to_stderr()
    unit_spec = load(args.unit_spec)
    os.environ.update({**environment(), **parent_environment(unit_spec)})
    control = Control(socket.socket(fileno=args.control_fd))
    try:
        preload(unit_spec.device)
    except Exception as error:
        control.event("failed", kind="warm_parent", error=words(error))
        raise
    run(args.unit_spec, control)


if __name__ == "__main__":
    main()
