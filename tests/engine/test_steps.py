"""What a micro-batch may hold, what is published when, and how bubbles are counted: no engine, no processes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from muxserve.engine.block_pool import PooledBlockPool
from muxserve.engine.budget import BudgetedSteps
from muxserve.engine.requests import EngineRequests
from muxserve.engine.scheduler import PhaseScheduler
from muxserve.engine.stage_clock import StageClocks
from muxserve.engine.states import StatefulBlocks
from muxserve.scheduling.token_throttling import Throttle, TokenThrottling
from muxserve.wire import Admit, HandOff


@dataclass
class Known:
    """What a budget reads of vLLM's request, and the one thing that it writes."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    next_decode_eligible_step: int = 0


def decodes(name: str, in_flight: bool = False) -> Any:
    return Known(name, 11, 11 if in_flight else 10)


def prompt(name: str, tokens: int, computed: int = 0) -> Any:
    return Known(name, tokens, computed)


def throttled(**changes: Any) -> BudgetedSteps:
    return BudgetedSteps(TokenThrottling(Throttle(**changes)), depth=2)


def test_those_that_decoded_last_sit_the_next_micro_batch_out() -> None:
    steps = throttled()
    running = [decodes(name) for name in "abcd"]
    assert steps.tokens(running, 0, [], (), 1.0, step=1) - 32 == 2
    assert [r.next_decode_eligible_step for r in running] == [0, 0, 2, 2]
    steps.scheduled(["a", "b"], 1)
    running = [decodes("a", in_flight=True), decodes("b", in_flight=True), decodes("c"), decodes("d")]
    assert steps.tokens(running, 0, [], (), 1.0, step=2) - 32 == 2
    assert [r.next_decode_eligible_step for r in running] == [0, 0, 0, 0]
    steps.scheduled(["c", "d"], 2)
    running = [decodes(name) for name in "abcd"]
    steps.tokens(running, 0, [], (), 1.0, step=3)
    assert [r.next_decode_eligible_step for r in running] == [0, 0, 4, 4]


def test_prompts_that_wait_and_that_are_half_through_count_alike_and_come_behind_sequences() -> None:
    steps = throttled(iterations=4, min_prefill=1)
    running = [prompt("p", 300, 100), decodes("a"), decodes("b"), prompt("last chunk in flight", 50, 50)]
    most = steps.tokens(running, 3, [prompt("q", 200)], {"p", "q", "last chunk in flight"}, 1.0, step=1)
    # #WP = 200 + 200, a quarter of it; one of the two sequences; three that were adopted.
    assert most == 100 + 1 + 3
    assert [r.request_id for r in running] == ["a", "b", "p", "last chunk in flight"]


# ---------------------------------------------------------------- published blocks


@dataclass
class Manager:
    """The memory manager's client: notes what is published and released."""

    published: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def step(self, view: object, publish_ids: Any, release: Any, reserve: int, lookups: Any, **rest: Any) -> Any:
        self.post(view, publish_ids, release=release)
        import numpy as np

        return SimpleNamespace(lookups=[[] for _ in lookups], reserved=np.arange(1, reserve + 1))

    def post(self, view: object, publish_ids: Any, publish_hashes: bytes = b"", release: Any = ()) -> None:
        self.published += list(publish_ids)
        self.released += list(release)


def test_blocks_are_published_when_their_micro_batch_is_through_all_stages() -> None:
    manager = Manager()
    binding: Any = SimpleNamespace(client=manager, view=None)
    pool = PooledBlockPool(10, True, 16, binding)
    request: Any = SimpleNamespace(block_hashes=[b"x" * 32, b"y" * 32, b"z" * 32])
    pool.begin_step(2)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 1, 16, 0)
    first = pool.take_filled()
    pool.end_step()
    pool.cache_full_blocks(request, blocks, 1, 2, 16, 0)
    second = pool.take_filled()
    pool.end_step()
    assert manager.published == []
    pool.publish(first)
    pool.end_step()
    assert manager.published == [blocks[0].block_id]
    pool.publish(second)
    pool.end_step()
    assert manager.published == [block.block_id for block in blocks]


# ---------------------------------------------------------------- bubbles


class Time:
    def __init__(self) -> None:
        self.seconds = 5

    def __call__(self) -> int:
        return self.seconds * 10**9


def test_bubbles_are_the_seconds_in_which_a_stage_waits_for_another() -> None:
    now = Time()
    clocks = StageClocks(2, now)
    first, second = clocks.clock(0), clocks.clock(1)
    now.seconds += 100  # nothing in flight: nobody's bubble
    clocks.in_flight(True)
    first.start()
    now.seconds += 3
    first.stop()
    second.start()

    def arrives() -> str:
        now.seconds += 1
        return "tensors"

    assert second.paused(arrives)() == "tensors"
    now.seconds += 4
    second.stop()
    clocks.in_flight(False)
    now.seconds += 100
    assert clocks.take().bubbles == pytest.approx([5.0, 4.0])
    assert clocks.take().bubbles == [0.0, 0.0]
    clocks.in_flight(True)
    now.seconds += 2
    clocks.in_flight(True)
    assert clocks.take().bubbles == pytest.approx([2.0, 2.0])
    clocks.reset()
    assert clocks.take().bubbles == [0.0, 0.0]


def test_waiting_outside_of_a_step_starts_no_clock() -> None:
    now = Time()
    clocks = StageClocks(1, now)
    clock = clocks.clock(0)
    clocks.in_flight(True)

    def wait() -> None:
        now.seconds += 7

    clock.paused(wait)()
    now.seconds += 1
    clocks.in_flight(True)
    assert clocks.take().bubbles == pytest.approx([8.0])


def test_of_a_request_that_is_refused_after_it_adopted_blocks_nothing_is_kept() -> None:
    """The blocks are given back by whoever asked for it; nobody would ever take the other entries away."""
    blocks = StatefulBlocks.__new__(StatefulBlocks)
    blocks.state_blocks, blocks.states, blocks._fresh = 2, {}, set()
    blocks.req_to_blocks, blocks.num_cached_block, blocks._partial_hit_reqs = defaultdict(list), {}, {}
    scheduler = PhaseScheduler.__new__(PhaseScheduler)
    scheduler._states = scheduler._blocks_of = blocks
    scheduler.block_size, scheduler._window = 16, 0

    class Refusing:
        def __init__(self) -> None:
            self.scheduler = scheduler

        def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Any, int]:
            return SimpleNamespace(request_id=request.request_id), 0

        def add_request(self, request: Any, wave: int) -> None:
            assert blocks.states.keys() == blocks.req_to_blocks.keys() == {request.request_id}
            raise ValueError("it is refused")

    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1] * 20, mm_features=None, sampling_params=None, pooling_params=None,
        arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    body = b"".join(bytes(frame) for frame in MsgpackEncoder().encode(request))
    admit = Admit("r", 1, 1, gateway_epoch="g", reply_to="", body=body, hand_off=HandOff("key", 20))
    requests = EngineRequests(Refusing())  # type: ignore[arg-type]
    internal = requests.add(admit)
    with pytest.raises(ValueError, match="it is refused"):
        requests.begin(internal, admit, [KVCacheBlock(i) for i in range(1, 5)])
    assert not blocks.states
    assert not blocks.req_to_blocks
    assert not blocks.num_cached_block
