"""An engine process: bound to the pool, warmed up, then in its loop of messages, leases and steps."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence

import zmq
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from muxserve.engine.binding import Binding, bind, current, private_binding
from muxserve.engine.budget import BudgetedSteps
from muxserve.engine.grammars import load_tokenizers_later, use_grammars
from muxserve.engine.lease import HeldLease, StepNews
from muxserve.engine.leased_scheduler import LeasedScheduler
from muxserve.engine.outputs import TokenSender
from muxserve.engine.pipeline import StepPipeline
from muxserve.engine.probe import probe
from muxserve.engine.requests import EngineRequests, internal_id
from muxserve.engine.rest import REST, WAKE, RestOrders
from muxserve.memory import MemoryManagerError, MemoryManagerGone
from muxserve.memory.client import MemoryClient
from muxserve.net.heartbeat import Heartbeat, heartbeat_file
from muxserve.net.inbox import ImpossibleMessageError, Inbox
from muxserve.net.logs import of_request
from muxserve.net.peer import Address, Peer
from muxserve.net.process import IdleTrim, words
from muxserve.scheduling.token_throttling import TokenThrottling
from muxserve.spec import UnitSpec
from muxserve.spec.unit import EnginePhase
from muxserve.wire import (
    Abort,
    Admit,
    Blocks,
    Detach,
    Detached,
    EngineHello,
    EngineLost,
    HandOver,
    Lease,
    Message,
    Prefilled,
    Reset,
    Returned,
    ShowBlocks,
    ShowRequests,
    StepFailed,
    Stop,
    decode,
)

log = logging.getLogger(__name__)

# A decode engine's part in live migration: it shows blocks while it goes on, and lets go of requests between steps.
#
# What is copied meanwhile are whole blocks, which nobody writes any more: KV is only ever appended. A state is copied
# again when the request is out.

# Long enough for the other side to be given up, and for the decode engine to take the request back.
HAND_OFF_SECONDS = 120.0


def shown(scheduler: LeasedScheduler, internal: str, ask: ShowBlocks) -> Blocks:
    """The blocks of the request that vLLM knows as `internal`; none if it does not run in this engine."""
    found = scheduler.running_blocks(internal)
    if found is None:
        return Blocks(ask.request_id, ask.incarnation, ask.since, [], 0)
    ids, computed_tokens = found
    return Blocks(ask.request_id, ask.incarnation, ask.since, ids[ask.since :], computed_tokens)


def detached(scheduler: LeasedScheduler, internal: str, ask: Detach, forget: Callable[[str], object]) -> Detached:
    """Take the request out of the batch and leave its blocks under `ask.key`. `forget` is called with `internal` when
    it is out.

    Raises:
        MemoryManagerGone: the memory manager died, and the request's blocks with it.
    """
    if scheduler.running_blocks(internal) is None:
        return Detached(ask.request_id, ask.incarnation, "", ask.since, [], 0, [])
    gone = scheduler.detach(internal)
    scheduler.pool.hand_off(ask.key, gone.blocks, HAND_OFF_SECONDS)
    forget(internal)
    ids = [block.block_id for block in gone.blocks]
    return Detached(
        ask.request_id, ask.incarnation, ask.key, ask.since, ids[ask.since :], gone.computed_tokens, gone.output_tokens
    )


# How long to wait for another try when nothing could run although a lease is there (a grammar still compiles, say).
STALL_MILLISECONDS = 1
# How often an engine with nothing to do looks whether its memory manager is still the one it knew.
IDLE_MILLISECONDS = 200
# Stands for a request that is not here; no internal id is like it.
GONE = "#"


class EngineLoop:
    """Runs `core` under the leases of the unit scheduler until it is told to stop.

    One thread: between two steps it handles whatever messages have come. It never waits for a message while it may
    step.

    Args:
        orders: whether it is to rest; None: it never does.
        on_up: called when it serves again after a rest.
    """

    def __init__(
        self,
        unit_spec: UnitSpec,
        binding: Binding,
        core: EngineCore,
        orders: RestOrders | None = None,
        on_up: Callable[[], None] = lambda: None,
    ) -> None:
        assert isinstance(core.scheduler, LeasedScheduler)
        self.unit_spec = unit_spec
        self.binding = binding
        self.core = core
        self.scheduler = core.scheduler
        self.scheduler.become(binding.phase)
        if binding.phase == "both" and binding.model.stages > 1:
            self.scheduler.budget = BudgetedSteps(TokenThrottling(), core.vllm_config.max_concurrent_batches)
        # The memory manager's client is another one when that has restarted.
        self._pipeline = StepPipeline(core, lambda: self.binding.client.writing())
        self._requests = EngineRequests(core)
        self._lease = HeldLease(
            self._send, core.scheduler.get_request_counts, binding.phase == "prefill", self._pipeline.take_stages
        )
        self._inbox = Inbox(log, decode)
        self._trim = IdleTrim()
        # When the last step was over, if the engine has had something to do ever since.
        self._over: float | None = None
        self._stalled = False
        self._stopping = False
        # The part of the SMs on which the engine computes, where leases say which.
        self._region = 0
        # Beats once per step: a step that takes far longer than any before hangs.
        self._heartbeat = Heartbeat(heartbeat_file(unit_spec.run_dir, f"engine-{binding.model.name}-{binding.phase}"))
        self._hand_offs = 0

        self._orders = orders
        self._ordered = False
        self._on_up = on_up
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        if orders is not None:
            self._poller.register(orders.fileno(), zmq.POLLIN)
        self._unit = self._connected()
        self._tokens = TokenSender(
            self._context, binding.model.name, engine=0 if binding.phase == "prefill" else 1, keys=unit_spec.keys
        )

    def _connected(self) -> Peer:
        """Its connection to the unit scheduler, which hears that there is a new engine."""
        # A restarted unit scheduler knows no engine. Messages to the one before do it no harm, and may name
        # hand-offs that it is to give up.
        name, phase = self.binding.model.name, self.binding.phase
        return Peer(
            self._context,
            self._poller,
            Address("the unit scheduler", self.unit_spec.unit_address, f"{name}/{phase}"),
            hello=EngineHello(name, phase, os.getpid()),
            keeps=True,
        )

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until `Stop`."""
        while not self._stopping:
            self._heartbeat.beat()
            if not self._may_step():
                # It waits for a lease, or for something to do under the one that it has.
                self._over = None
            self._receive(self._patience())
            if self._ordered and self._orders is not None:
                self._ordered = False
                if self._orders.received(REST):
                    self._rest(self._orders)
            if self.binding.view.counters.generation != self.binding.client.generation:
                self._recover_memory()
            if self._may_step():
                self._step(self._lease.usable())
                self._trim.busy()
            else:
                self._lease.tell_untold()
                self._tell_statistics()
                self._trim.idle(time.monotonic())

    def _may_step(self) -> bool:
        # What is in the pipeline comes out of it whatever the lease says.
        return self._pipeline.busy or (self._lease.usable() and self.scheduler.has_work())

    def _patience(self) -> int:
        """Milliseconds to wait for messages."""
        if not self._may_step():
            return IDLE_MILLISECONDS
        return STALL_MILLISECONDS if self._stalled else 0

    def _receive(self, patience: int) -> None:
        for socket, _ in self._poller.poll(patience):
            if isinstance(socket, int):
                self._ordered = True  # which is read when all else is done
                continue
            if socket is self._unit.monitor:
                self._unit.ended()
                continue
            for message in self._unit.messages():
                self._inbox.handle(message, self._unit.at.name, self._handle, message)

    def _send(self, message: Message) -> None:
        self._unit.send(message)

    def _tell_statistics(self) -> None:
        """Nothing can be computed for now: what steps left untold would come with the next burst, or never."""
        stats = self.scheduler.take_untold()
        if stats is not None:
            self._tokens.send(EngineCoreOutputs(scheduler_stats=stats), self._requests.there)

    # ------------------------------------------------------------ messages

    def _handle(self, message: object) -> None:
        match message:
            case Lease():
                if message.share < self._lease.share or (self.unit_spec.share_steps and message.region != self._region):
                    self._drain()
                self.scheduler.alone = ""
                told = self._lease.take(message)
                if self.unit_spec.share_steps and message.region != self._region:
                    self._region = message.region
                    self.core.model_executor.collective_rpc("compute_on", args=(message.region,))
                self.scheduler.step_tokens = message.tokens
                if self.binding.phase == "both":
                    self.scheduler.lease_phase = message.phase
                for admit in message.admit:
                    self._admit(admit)
                if message.alone:
                    self.scheduler.alone = self._requests.last(message.alone) or GONE
                    self._mind_alone()
                    # Should this engine fail, the unit scheduler must know with what.
                    told = True
                if told:
                    self._lease.ended_outside([])
            case Abort():
                self._abort(message)
            case ShowRequests():
                self._send(self._requests.held(self._lease.lease_id))
            case ShowBlocks():
                self._send(shown(self.scheduler, internal_id(message.request_id, message.incarnation), message))
            case Detach():
                self._detach(message)
            case Reset():
                log.info("unit scheduler %s: dropping %d requests", message.epoch, len(self._requests))
                self._lease.drop()
                if self._requests:
                    self._end([*self._requests.there])
            case Stop():
                self._stopping = True
            case _:
                raise ImpossibleMessageError("an engine has no use for it")

    def _admit(self, admit: Admit) -> None:
        if internal_id(admit.request_id, admit.incarnation) in self._requests.there:
            self._inbox.drop("Admit", f"request {admit.request_id} is admitted a second time: ignored")
            return
        internal = self._requests.add(admit)
        try:
            blocks = None if admit.hand_off is None else self.scheduler.pool.adopt(admit.hand_off.key)
        except MemoryManagerError as error:
            self._requests.forget(internal)
            self._send(EngineLost([admit.request_id], f"the prefilled blocks are gone: {error}"))
            return
        except MemoryManagerGone:
            self._recover_memory()
            return
        try:
            self._requests.begin(internal, admit, blocks)
        except Exception:
            log.exception("request %s cannot be run", admit.request_id, extra=of_request(admit.request_id))
            if blocks is not None:
                self.scheduler.pool.free_blocks(blocks)
                self.scheduler.pool.end_step()
            self._fail(internal)

    def _fail(self, internal: str) -> None:
        """End a request that vLLM refuses; the front end answers with an error."""
        output = EngineCoreOutput(request_id=internal, new_token_ids=[], finish_reason=FinishReason.ERROR)
        self._tokens.send(EngineCoreOutputs(outputs=[output]), self._requests.there)
        self._lease.ended_outside([self._requests.forget(internal).request_id])

    def _abort(self, abort: Abort) -> None:
        internal = self._requests.meant(abort)
        if internal and self._end(internal):
            self._mind_alone()
            # Not one of which a later life goes on.
            self._lease.ended_outside([r for r in abort.request_ids if r not in self._requests])

    def _end(self, internal: list[str]) -> bool:
        """Drop these requests; False if the memory manager turned out to be gone, and everything with it."""
        self.core.abort_requests(internal)
        for each in internal:
            self._requests.forget(each)
        try:
            self.scheduler.pool.end_step()
        except MemoryManagerGone:
            self._recover_memory()
            return False
        return True

    def _detach(self, ask: Detach) -> None:
        internal = internal_id(ask.request_id, ask.incarnation)
        # Stages may still write its blocks. A bubble now and then costs less than asking for it later again.
        self._drain(lambda: self.scheduler.is_in_flight(internal))
        try:
            self._send(detached(self.scheduler, internal, ask, self._requests.forget))
        except MemoryManagerGone:
            self._recover_memory()
            return
        self._mind_alone(tell=True)

    def _drain(self, needed: Callable[[], bool] = lambda: True) -> None:
        """Wait for what is in flight, and begin nothing, as long as that is `needed`."""
        while self._pipeline.busy and needed():
            self._heartbeat.beat()
            self._step(may_begin=False)

    def _mind_alone(self, tell: bool = False) -> None:
        """Under a lease for one request alone there is nothing more to do when that has left; `tell` if nothing else is
        going to."""
        if self.scheduler.alone and self.scheduler.alone not in self._requests.there:
            self.scheduler.alone = ""
            self._lease.end()
            if tell:
                self._lease.ended_outside([])

    # ------------------------------------------------------------ a step

    def _step(self, may_begin: bool) -> None:
        """Run a step; without `may_begin` only what is in the pipeline already."""
        began = time.monotonic()
        between = 0.0 if self._over is None else began - self._over
        finished: list[str] = []
        try:
            try:
                # Others that are in flight still would not let one be alone.
                apart = bool(self.scheduler.alone) and self._pipeline.busy
                outputs, ran, in_vain = self._pipeline.step(may_begin and not apart)
            except MemoryManagerGone:
                raise
            except Exception as error:
                self._give_up_step(error)
                return
            # Tokens before bookkeeping: a client waits for them, and nobody for the pages.
            for batch in outputs.values():
                self._tokens.send(batch, self._requests.there)
                ended = [output.request_id for output in batch.outputs if output.finish_reason is not None]
                finished += [self._requests.forget(internal).request_id for internal in ended]
            handed = self._hand_over()
            self.scheduler.pool.end_step()
        except MemoryManagerGone:
            self._recover_memory(finished)
            return
        self._over = time.monotonic()
        seconds = self._over - began
        self._stalled = in_vain

        news = StepNews(finished, handed)
        for each in self.scheduler.take_started():
            admitted = self._requests.there[each.request_id]
            news.prefilled.append(Prefilled(admitted.request_id, admitted.incarnation, each.output_tokens))
        for each in self.scheduler.take_preempted():
            admitted = self._requests.forget(each.request_id)
            news.returned.append(Returned(admitted.request_id, admitted.incarnation, each.output_tokens))
        for hand_over in handed:
            self._requests.forget(internal_id(hand_over.request_id, hand_over.incarnation))
        self._mind_alone()
        if ran or in_vain:
            prefill_tokens = self.scheduler.last_prefill_tokens if self.binding.phase == "both" else 0
            batch = self.scheduler.last_batch if ran else None
            self._lease.stepped(seconds, self.scheduler.last_scheduled_tokens, news, prefill_tokens, batch, between)
        else:
            self._lease.drained(seconds, news)

    def _hand_over(self) -> list[HandOver]:
        handed = []
        for each in self.scheduler.take_prefilled():
            admitted = self._requests.there[each.request_id]
            self._hand_offs += 1
            key = f"{each.request_id}:{os.getpid()}:{self._hand_offs}"
            self.scheduler.pool.hand_off(key, each.blocks, HAND_OFF_SECONDS)
            handed.append(
                HandOver(
                    admitted.request_id,
                    admitted.incarnation,
                    key,
                    len(each.blocks),
                    each.computed_tokens,
                    each.output_tokens,
                )
            )
        return handed

    # ------------------------------------------------------------ a step that raises

    def _give_up_step(self, error: Exception) -> None:
        """A step raised an exception. Give up what was in it, see that the engine still computes, and go on.

        Raises:
            Exception: the engine is broken, or has workers, which end with such a step.
            MemoryManagerGone: the memory manager died meanwhile.
        """
        if self.core.vllm_config.parallel_config.world_size > 1:
            raise error
        log.exception("a step failed")
        self._pipeline.forget()
        self._lease.drop()
        self.scheduler.alone = ""
        there = self._requests.there
        blamed = [there[internal] for internal in self.scheduler.give_up_step() if internal in there]
        self.core.model_executor.collective_rpc("forget_step")
        try:
            probe(self.core, 1, self.binding.client.writing)
        except MemoryManagerGone:
            raise
        except Exception:
            log.exception("the engine computes nothing any more since a step failed")
            raise error from None
        # Also whoever ended or was preempted in that step, of which nobody has heard.
        gone = [internal for internal in there if internal not in self.scheduler.requests]
        forgotten = [self._requests.forget(internal) for internal in gone]
        lost = [each.request_id for each in forgotten if each not in blamed]
        log.warning("%d requests were in the step that failed", len(blamed))
        ids, incarnations = [each.request_id for each in blamed], [each.incarnation for each in blamed]
        self._send(StepFailed(ids, incarnations, words(error), lost))

    # ------------------------------------------------------------ rest

    def _rest(self, orders: RestOrders) -> None:
        """The model sleeps: leave the unit without the weights, until the model is woken. What is still here is lost to
        this unit, as in a death. A memory manager that dies meanwhile is noticed afterwards."""
        self._drain()
        self._lease.drop()
        self.scheduler.alone = ""
        if self._requests:
            self._end([*self._requests.there])
        self._unit.close()
        executor = self.core.model_executor
        executor.collective_rpc("release_weights")
        log.info("resting")
        orders.on_rest()
        while not orders.received(WAKE, IDLE_MILLISECONDS):
            self._heartbeat.beat()
        began = time.monotonic()
        executor.collective_rpc("map_weights")
        self._unit = self._connected()
        log.info("back after %.3f s", time.monotonic() - began)
        self._on_up()

    # ------------------------------------------------------------ a dead memory manager

    def _recover_memory(self, finished: Sequence[str] = ()) -> None:
        """Drop everything, since no block is ours any more, and bind to the memory manager that comes up next.

        `finished` are requests that ended in the present step, which the unit scheduler still counts as in here.
        """
        self._pipeline.forget()
        self.scheduler.alone = ""
        self.scheduler.forget_all()
        lost = [*finished, *self._requests.clear()]
        self._lease.drop()
        log.warning("the memory manager is gone; %d requests lost, waiting for a new one", len(lost))
        self._send(EngineLost(lost, "the memory manager died"))
        self.binding.client.close()
        connect(self.unit_spec, self.binding, self._heartbeat.beat)
        self.core.model_executor.collective_rpc("rebind_pool")
        log.info("bound to the new memory manager")


def connect(unit_spec: UnitSpec, binding: Binding, beat: Callable[[], None]) -> None:
    """Connect `binding` to the memory manager, waiting for one to come up, and map its memory. `beat` is called again
    and again meanwhile."""
    while True:
        beat()
        try:
            client = MemoryClient(unit_spec.memory_socket, f"{binding.model.name}/{binding.phase}")
            view = client.map(binding.model.name)
        except (MemoryManagerGone, OSError):
            time.sleep(0.02)  # nothing to wait on: the socket appears when the controller has started a new manager
            continue
        binding.client, binding.view = client, view
        return


def run_engine(
    unit_spec: UnitSpec,
    model: str,
    phase: EnginePhase,
    config: VllmConfig,
    executor_of: Callable[[VllmConfig], Executor],
    on_up: Callable[[], None],
    awaited: bool = False,
    orders: RestOrders | None = None,
) -> None:
    """Bind to the pool, warm up, call `on_up`, serve until told to stop. With `orders` it rests when it is told to, and
    calls `on_up` again when it serves again.

    `executor_of` makes the executor, or has one with the model loaded: on CPU the process then shares the memory of the
    weights with the model's other engine until one of them writes, and neither does. An engine that is `awaited` by
    requests does not warm up: its first step is slow in either case, and is better one of theirs.
    """
    deployed = unit_spec.model(model)
    if deployed.private:
        binding = private_binding(deployed, phase)
    else:
        client = MemoryClient(unit_spec.memory_socket, f"{model}/{phase}")
        binding = Binding(deployed, phase, client, client.map(model))
    bind(binding)
    if deployed.state_blocks:
        # When vLLM made the configuration it was off: it would have kept states in a way of its own.
        config.cache_config.enable_prefix_caching = deployed.prefix_caching
    load_tokenizers_later()
    core = EngineCore(config, executor_of, log_stats=True)
    use_grammars(core)
    if config.speculative_config is not None and phase == "prefill":
        core.model_executor.collective_rpc("propose_nothing")
    if not awaited:
        warm_up(core, phase)
    loop = EngineLoop(unit_spec, binding, core, orders, on_up)
    on_up()
    loop.run()
    binding.client.close()


def warm_up(core: EngineCore, phase: EnginePhase) -> None:
    """Run one short request through what the engine is for: the first steps of a process are slow."""
    began = time.monotonic()
    probe(core, 1 if phase == "prefill" else 2, lambda: current().client.writing())
    log.info("warmed up in %.2f s", time.monotonic() - began)
