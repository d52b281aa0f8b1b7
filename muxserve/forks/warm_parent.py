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
    engine_log,
    file_name,
)
from muxserve.gpu.environment import ImportsThatTouchCuda, parent_environment, refuse_cuda
from muxserve.net.heartbeat import heartbeat_file
from muxserve.net.logs import log_to_stderr
from muxserve.net.process import adopt_orphans, words
from muxserve.spec import ModelSpec, UnitSpec, load
from muxserve.spec.unit import EnginePhase
from muxserve.vllm.args import environment

log = logging.getLogger(__name__)

_COPIER = ("copier",)
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
        from muxserve.vllm import engine_internals, engine_seam

        if device == "cuda":
            from muxserve.engine.cuda.worker import prepare

            prepare()
        else:
            # Not on a GPU: vLLM's CPU worker puts stand-ins into torch when it is imported.
            import muxserve.engine.cpu.worker  # noqa: F401

            prepare_workers()
        engine_internals.check(device)
        os.environ.update(engine_seam.runner_choice(device))
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
    seam.register_architectures({model.path: model.text_only for model in models})


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
        # Children that take orders: model parents and engines, by kind, model and phase; and what copies weights back.
        self._children: dict[tuple[str, ...], _ForkedChild] = {}
        self._parent = ForkingParent(
            control, control, self._handle, self._on_exit, heartbeat_file(unit_spec.run_dir, "warm_parent")
        )

    def run(self) -> None:
        """Serve the controller until it goes away."""
        adopt_orphans()
        self.control.event("ready")
        self._parent.run()

    def _handle(self, command: dict[str, Any]) -> None:
        match command.get("op"):
            case "end":
                # The model's weights go: its parent ends when it cannot get orders any more.
                self._drop("model", command["model"])
            case "pin":
                self._tell_copier(f"pin {command['model']}")
            case "forget":
                self._tell(_COPIER, f"forget {command['model']}".encode())
            case "rest":
                engine = "engine", command["model"], command["phase"]
                if self._tell(engine, REST):  # the engine says when it rests
                    self._children[engine].rests = True
            case "fork" if command["kind"] == "spare":
                self._fork_spare(command["fleet"], Path(command["log"]), command["fds"])
            case "fork":
                self._know(command["model"])
                self._fork(command)
            case _:
                log.warning("unknown command %r", command)

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
        engine = "engine", model, phase
        known = self._children.get(engine)
        if known is not None and known.rests and known.tell(WAKE):
            known.rests = False
        else:

            def child(orders: socket.socket) -> None:
                from muxserve.forks.direct import run_direct_engine

                run_direct_engine(load(self.path), model, phase, self.control, orders)

            known = self._fork_child(engine, f"engine {model}/{phase}", engine_log(self.unit_spec, model, phase), child)
        self.control.event("forked", kind="engine", model=model, phase=phase, pid=known.pid)

    def _tell_copier(self, order: str) -> int:
        """Have what copies weights back, or fork it; its pid."""
        if not self._tell(_COPIER, order.encode()):

            def child(orders: socket.socket) -> None:
                from muxserve.engine.cuda.weight_copier import run_copier

                run_copier(self.path, self.control, orders)

            log_file = self.unit_spec.log_dir / "weight-copier.log"
            self._fork_child(_COPIER, "weight copier", log_file, child).tell(order.encode())
        return self._children[_COPIER].pid

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
        if self._tell(("model", model), order):
            return
        from muxserve.forks import model_parent

        def child(orders: socket.socket) -> None:
            model_parent.run_model_parent(self.unit_spec, model, orders, self.control)

        log_file = model_parent.log_file(self.unit_spec, model)
        parent = self._fork_child(("model", model), f"model {model}", log_file, child)
        self.control.event("forked", kind="model", model=model, phase="", pid=parent.pid)
        parent.tell(order)

    # ------------------------------------------------------------ children that take orders

    def _fork_child(
        self, who: tuple[str, ...], name: str, log_file: Path, run: Callable[[socket.socket], None]
    ) -> _ForkedChild:
        """Fork a process that takes orders, in place of the one that did before; `run` gets its end of the socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def child() -> None:
            ours.close()
            self._close_sockets()
            run(theirs)

        pid = self._parent.fork(name, log_file, child)
        theirs.close()
        self._drop(*who)
        forked = self._children[who] = _ForkedChild(pid, ours)
        return forked

    def _tell(self, who: tuple[str, ...], order: bytes) -> bool:
        """Whether there is such a child, and it could be told. One that has died may not have been collected yet."""
        return who in self._children and self._children[who].tell(order)

    def _drop(self, *who: str) -> None:
        if known := self._children.pop(who, None):
            known.orders.close()

    def _close_sockets(self) -> None:
        """In a child: orders to others are not its business."""
        for child in self._children.values():
            child.orders.close()

    def _on_exit(self, pid: int, status: int) -> None:
        for who in [who for who, child in self._children.items() if child.pid == pid]:
            self._drop(*who)


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
