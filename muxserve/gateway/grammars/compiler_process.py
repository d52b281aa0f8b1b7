"""The grammar compiler of a gateway: a process that forks one child for each grammar, bounded in CPU time and memory.

    gateway ── socket ── grammar compiler (tokenizers) ── one child per grammar
       └────── socket ── nursery, and a second one (vLLM, and nothing of any model), which forked the compiler

A child lets vLLM validate its grammar and compile it, and sees whether any token can be the first. The kernel ends a
child that takes too long, and the compiler one that nobody waits for any more; its memory comes back with it. A
compiler that has taken much memory itself is replaced.

Compilers are forked from nurseries, and nurseries from each other, the first two from the gateway before that has
threads. What they have imported is shared by all of them. When both nurseries have died at once, one is started
anew:

    python -m muxserve.gateway.grammars.compiler_process --socket-fd N

which imports vLLM, and takes as long as that, and as much memory.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import math
import os
import re
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar
from vllm.v1.structured_output.request import get_structured_output_key

from muxserve.engine.grammars import make_backend
from muxserve.gateway.front_end.configuration import configure
from muxserve.net.logs import log_to_stderr
from muxserve.net.process import die_with, set_title
from muxserve.net.process_memory import memory_of
from muxserve.spec import ModelSpec

log = logging.getLogger(__name__)

CHUNK = 1 << 16
# A child's CPU time ends it. One that gets no CPU, or sleeps, is ended after `WALL_FACTOR` times that.
WALL_FACTOR = 4
WALL_SECONDS = 2.0
# Behind gateways and engines.
NICENESS = 5
OUT_OF_MEMORY = 3
# A compiler with this much memory of its own ends, but not before it has compiled `LEAST_JOBS` grammars: the tokenizers
# of its models may take that memory.
MOST_BYTES = 256 << 20
LEAST_JOBS = 64
# A nursery forks within a moment; one that does not is no use.
NURSERY_SECONDS = 5.0
IMPORT_SECONDS = 120.0
_COMPILER, _NURSERY, _ALIVE = b"compiler", b"nursery", b"alive"
_TITLES = {_COMPILER: "grammar compiler", _NURSERY: "spare grammar compiler"}
# What a forked process says first, beside a descriptor of itself.
_HERE = b"."
# Where in its sources the compiler found it, before what it found.
_SOURCE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ")
_LONGEST_REASON = 500
# What most grammars are compiled by.
_USUAL = "xgrammar"

# ---------------------------------------------------------------- messages: msgpack, each behind its length

_LENGTH = struct.Struct("!I")

Outcome = Literal["accepted", "refused", "slow", "failed"]


class Constraints(msgspec.Struct, frozen=True):
    """What a request restricts its answer to: a grammar, and all else that concerns its first token."""

    # The fields of a structured output that are set.
    structured: dict[str, Any]
    # Token ids: the only ones, if not None; those that are excluded; those that end the answer.
    allowed: list[int] | None = None
    excluded: list[int] = []
    stops: list[int] = []
    # Fewer tokens than this and it cannot end.
    min_tokens: int = 0


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """Compile a grammar for `model`, within a limit of CPU time and one of memory."""

    job: int
    model: ModelSpec
    constraints: Constraints
    cpu_seconds: float
    memory_bytes: int


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Nobody wants that job any more."""

    job: int


class CompileResult(msgspec.Struct, frozen=True):
    """How a job ended.

    `refused`: the grammar is no good, or takes too much memory; `slow`: it took more than its CPU time; `failed`: the
    compiler cannot do it, whatever the grammar. `spent`: the compiler has taken much memory, and another one is to take
    its place.
    """

    job: int
    outcome: Outcome
    # Why not, for the client.
    reason: str = ""
    # Fields of the structured output that engines are to be given instead.
    changes: dict[str, Any] = {}
    spent: bool = False


Command = Compile | Drop
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_results = msgspec.msgpack.Decoder(CompileResult)


def frame(message: Command | CompileResult) -> bytes:
    """`message` as it is sent."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def command(body: bytes) -> Command:
    """What the gateway said."""
    return _commands.decode(body)


def result(body: bytes) -> CompileResult:
    """What the compiler said."""
    return _results.decode(body)


class Frames:
    """Cuts a stream of bytes into its messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete with `data`."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


# ---------------------------------------------------------------- what a child does


class Checker:
    """Compiles grammars for one model with the tokenizer and the backends that its engines have.

    Raises:
        ValueError: vLLM refuses the model or its options.
        OSError: the tokenizer cannot be read.
    """

    def __init__(self, model: ModelSpec) -> None:
        _, self._config = configure(model)
        self._tokenizer = cached_tokenizer_from_config(model_config=self._config.model_config)
        self._backends: dict[str, StructuredOutputBackend] = {}
        configured = self._config.structured_outputs_config.backend
        self.prepare(_USUAL if configured == "auto" else configured)

    def prepare(self, backend: str) -> StructuredOutputBackend:
        """The part of compiling that does not depend on a grammar."""
        if backend not in self._backends:
            self._backends[backend] = make_backend(backend, self._config, self._tokenizer)
        return self._backends[backend]

    def check(self, job: int, constraints: Constraints) -> CompileResult:
        """Compile. What a grammar may have wrong is an answer.

        Raises:
            MemoryError: there was not enough.
        """
        try:
            structured = StructuredOutputsParams(**constraints.structured)
            before = dict(vars(structured))
            params = SamplingParams(structured_outputs=structured)
            params._validate_structured_outputs(
                self._config.model_config, self._config.structured_outputs_config, self._tokenizer
            )
            assert structured._backend is not None
            backend = self.prepare(structured._backend)
            stops = set(constraints.stops)
            grammar = backend.compile_grammar(*get_structured_output_key(structured), stop_token_ids=stops or None)
            nothing = _no_first_token(backend, grammar, constraints)
        except MemoryError:
            raise
        except Exception as error:  # each compiler has types of its own
            if "bad_alloc" in str(error):
                raise MemoryError from error
            return CompileResult(job, "refused", _tidy(str(error) or type(error).__name__))
        if nothing:
            return CompileResult(job, "refused", nothing)
        changes = {name: value for name, value in vars(structured).items() if value != before[name]}
        return CompileResult(job, "accepted", changes=changes)


def _no_first_token(
    backend: StructuredOutputBackend, grammar: StructuredOutputGrammar, constraints: Constraints
) -> str:
    """Why no token can be the first; empty if one can."""
    mask = backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(mask, 0)
    # llguidance says only now what it failed with.
    matcher: Any = getattr(grammar, "ll_matcher", None)
    if matcher is not None and (error := matcher.get_error()):
        return _tidy(error)
    left = _tokens(mask.numpy())
    if not left.any():
        return "the grammar allows no token: it is empty, or refers to nothing but itself"
    if constraints.allowed is not None:
        only = np.zeros_like(left)
        only[_within(left, constraints.allowed)] = True
        left &= only
    left[_within(left, constraints.excluded)] = False
    if constraints.min_tokens > 0:
        left[_within(left, constraints.stops)] = False
    if not left.any():
        return (
            "no token can be the first of the answer: the structured output together with allowed_token_ids, "
            "bad_words, min_tokens and the tokens that end an answer excludes them all"
        )
    return ""


def _within(tokens: npt.NDArray[np.bool_], ids: list[int]) -> list[int]:
    return [token for token in ids if 0 <= token < len(tokens)]


def _tokens(mask: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Which tokens a row of a bit mask allows."""
    return np.unpackbits(mask.reshape(-1).view(np.uint8), bitorder="little").astype(np.bool_)


def _tidy(text: str) -> str:
    text = _SOURCE.sub("", text).strip()
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


# ---------------------------------------------------------------- the process


@dataclass(slots=True)
class Child:
    """A process that compiles a grammar; what it says comes through `pipe`."""

    job: int
    model: str
    pid: int
    pipe: int
    deadline: float
    said: bytes = b""
    wanted: bool = True
    late: bool = False


class GrammarCompiler:
    """Serves one gateway until that closes its end of `sock`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._checkers: dict[str, tuple[ModelSpec, Checker]] = {}
        self._children: dict[int, Child] = {}
        self._frames = Frames()
        self._selector = selectors.DefaultSelector()
        self._jobs = 0

    def run(self) -> None:
        """Serve."""
        self._selector.register(self._socket, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is not self._socket:
                    self._read(self._children[key.fd])
                    continue
                data = self._socket.recv(CHUNK)
                if not data:
                    for child in self._children.values():
                        kill(child.pid)
                    return
                for body in self._frames.feed(data):
                    self._handle(command(body))
            now = time.monotonic()
            for child in self._children.values():
                if now >= child.deadline and not child.late:
                    child.late = True
                    kill(child.pid)

    def _patience(self) -> float | None:
        ends = [child.deadline for child in self._children.values() if not child.late]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _handle(self, message: Command) -> None:
        if isinstance(message, Drop):
            for child in self._children.values():
                if child.job == message.job:
                    child.wanted = False
                    kill(child.pid)
            return
        try:
            self._start(message)
        except Exception as error:
            log.exception("the grammar of a request of %s cannot be compiled", message.model.name)
            self._tell(CompileResult(message.job, "failed", f"{type(error).__name__}: {error}"))

    def _start(self, ask: Compile) -> None:
        checker = self._checker(ask.model)
        reader, writer = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.close(reader)
                self._socket.close()
                status = _compile(checker, ask, writer, parent)
            except MemoryError:
                status = OUT_OF_MEMORY
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writer)
        deadline = time.monotonic() + WALL_FACTOR * ask.cpu_seconds + WALL_SECONDS
        self._children[reader] = Child(ask.job, ask.model.name, pid, reader, deadline)
        self._selector.register(reader, selectors.EVENT_READ)

    def _checker(self, model: ModelSpec) -> Checker:
        known = self._checkers.get(model.name)
        if known is None or known[0] != model:
            known = self._checkers[model.name] = model, Checker(model)
            # What is here now stays: without the collector's touch its pages remain shared with the children.
            gc.collect()
            gc.freeze()
        return known[1]

    def _read(self, child: Child) -> None:
        data = os.read(child.pipe, CHUNK)
        if data:
            child.said += data
            return
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.pipe]
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        if child.wanted:
            self._tell(self._outcome(child, status))

    def _outcome(self, child: Child, status: int) -> CompileResult:
        if status == 0:
            compiled = result(child.said)
            if compiled.outcome == "accepted":
                # For those that come after it, if it was the first with that backend.
                self._checkers[child.model][1].prepare(compiled.changes["_backend"])
            return self._with_account(compiled)
        if status in (-signal.SIGPROF, -signal.SIGXCPU) or child.late:
            return CompileResult(child.job, "slow")
        if status in (OUT_OF_MEMORY, -signal.SIGABRT):
            return CompileResult(child.job, "refused", "compiling the grammar takes too much memory")
        if status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE):
            name = signal.Signals(-status).name
            return CompileResult(child.job, "refused", f"the grammar ends its compiler ({name}); try a simpler one")
        return CompileResult(child.job, "failed", f"the process that compiled the grammar ended with {status}")

    def _with_account(self, compiled: CompileResult) -> CompileResult:
        """The same, with whether this process has taken enough."""
        self._jobs += 1
        if self._jobs % LEAST_JOBS or memory_of(os.getpid()).private < MOST_BYTES:
            return compiled
        return msgspec.structs.replace(compiled, spent=True)

    def _tell(self, compiled: CompileResult) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the next read says that the gateway is gone
            self._socket.sendall(frame(compiled))


def _compile(checker: Checker, ask: Compile, writer: int, parent: int) -> int:
    """A child's whole life, which ends with that of `parent`; returns its exit status.

    Raises:
        MemoryError: there was not enough.
    """
    die_with(parent)
    os.nice(NICENESS)
    # The first to go when the machine runs out of memory.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (taken + ask.memory_bytes,) * 2)
    # The timer is exact and its signal ends the process, whatever that does; the limit is for one that ignores it.
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(ask.cpu_seconds) + 1,) * 2)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, ask.cpu_seconds)
    body = memoryview(_body(checker.check(ask.job, ask.constraints)))
    while body:
        body = body[os.write(writer, body) :]
    return 0


def _body(compiled: CompileResult) -> bytes:
    return b"".join(Frames().feed(frame(compiled)))


def kill(pid: int) -> None:
    """Kill a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------- how a gateway starts it


@dataclass(frozen=True, slots=True)
class Helper:
    """A compiler or a nursery, and the gateway's end of its socket. `handle` is a descriptor of the process: its number
    may be another's by the time that it is killed."""

    handle: int
    socket: socket.socket

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def end(self) -> None:
        """Kill it; its children end with it."""
        self.socket.close()
        self.kill()
        os.set_blocking(self.handle, True)  # an event loop that watched it has changed that
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self.handle, os.WEXITED)
        os.close(self.handle)

    def until_ready(self) -> None:
        """Wait until a nursery has imported vLLM.

        Raises:
            OSError: it has died, or takes too long.
        """
        self.socket.settimeout(IMPORT_SECONDS)
        if not self.socket.recv(CHUNK):
            raise ConnectionResetError("the nursery of grammar compilers has died")

    def check(self) -> None:
        """Ask a nursery for a sign of life.

        Raises:
            OSError: it has died, or does not answer.
        """
        self.socket.settimeout(NURSERY_SECONDS)
        self.socket.send(_ALIVE)
        if not self.socket.recv(CHUNK):
            raise ConnectionResetError("the nursery of grammar compilers has died")

    def forks(self, what: bytes) -> Helper:
        """Have a nursery fork another process. That shows itself at a socket of its own, and so is there for the
        gateway also if the nursery dies right behind the fork.

        Raises:
            OSError: the nursery has died, or does not answer.
        """
        ours, theirs = _pair(what)
        try:
            with theirs:
                self.socket.settimeout(NURSERY_SECONDS)
                socket.send_fds(self.socket, [what], [theirs.fileno()])
            ours.settimeout(NURSERY_SECONDS)
            _, found, _, _ = socket.recv_fds(ours, len(_HERE), 1)
            if len(found) != 1:
                raise ConnectionResetError("the nursery of grammar compilers has died")
        except OSError:
            ours.close()
            raise
        ours.settimeout(None)
        return Helper(found[0], ours)


def _pair(what: bytes) -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET if what == _NURSERY else socket.SOCK_STREAM)


def fork_nursery() -> Helper:
    """A nursery; only for a process of one thread, which has imported vLLM."""
    ours, theirs = _pair(_NURSERY)
    with theirs:
        pid = _fork(_NURSERY, theirs, dies_with=os.getpid())
    return Helper(os.pidfd_open(pid), ours)


def compiler_of(nursery: Helper) -> Helper:
    """A compiler that has imported vLLM already.

    Raises:
        OSError: the nursery has died, or does not answer.
    """
    return nursery.forks(_COMPILER)


def nursery_of(nursery: Helper) -> Helper:
    """Another nursery.

    Raises:
        OSError: the nursery has died, or does not answer.
    """
    return nursery.forks(_NURSERY)


def _fork(what: bytes, sock: socket.socket, dies_with: int | None = None) -> int:
    """Fork a process that serves at `sock`; returns its pid. It shows itself there, unless it dies with its parent,
    which then knows it."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if dies_with is not None:
            die_with(dies_with)
        _close_others(sock.fileno())
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        set_title(_TITLES[what])
        if dies_with is None:
            handle = os.pidfd_open(os.getpid())
            socket.send_fds(sock, [_HERE], [handle])
            os.close(handle)
        (_nurse if what == _NURSERY else run)(sock)
        status = 0
    except ConnectionError:  # the gateway is gone
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _nurse(sock: socket.socket) -> None:
    """Be a nursery for the gateway at the other end of `sock`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects the forked processes
    while True:
        what, found, _, _ = socket.recv_fds(sock, CHUNK, 1)
        if not what:
            return
        if what == _ALIVE:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.send(what)  # if the gateway is gone, the next read says so
            continue
        with socket.socket(fileno=found[0]) as theirs:
            _fork(what, theirs)


def start_nursery() -> Helper:
    """A nursery that has to import vLLM first.

    Raises:
        OSError: no process can be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        line = [sys.executable, "-m", "muxserve.gateway.grammars.compiler_process", "--socket-fd", str(theirs.fileno())]
        try:
            process = subprocess.Popen(line, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        except OSError:
            ours.close()
            raise
    process.returncode = 0  # `Helper.end` collects it
    helper = Helper(os.pidfd_open(process.pid), ours)
    try:
        helper.until_ready()
    except OSError:
        helper.end()
        raise
    return helper


def run(sock: socket.socket) -> None:
    """Be the grammar compiler at the other end of `sock`."""
    GrammarCompiler(sock).run()


def _close_others(kept: int) -> None:
    """Close inherited descriptors that are not ours: listeners, lifelines, connections of others."""
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles the grammars of a gateway's requests.")
    parser.add_argument("--socket-fd", type=int, required=True)
    args = parser.parse_args()
    parent = os.getppid()
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to_stderr()
    set_title(_TITLES[_NURSERY])
    gc.collect()  # what is imported by now is shared by its children
    gc.freeze()
    with socket.socket(fileno=args.socket_fd) as sock:
        sock.send(_NURSERY)
        _nurse(sock)


if __name__ == "__main__":
    main()
