"""vLLM's statistics reach a gateway once, whole: no engine, no processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from muxserve.engine.leased_scheduler import STATS_INTERVAL_SECONDS
from muxserve.engine.outputs import TokenSender
from muxserve.engine.requests import AdmittedRequest
from muxserve.engine.scheduler import PhaseScheduler
from muxserve.net.sockets import bind_local
from muxserve.wire import TokensHeader, decode
from tests.support.patience import PATIENCE


class Gateways:
    """Two gateways, and an engine's sender to them."""

    def __init__(self, directory: Path) -> None:
        self.context = zmq.Context()
        self.addresses = [f"ipc://{directory}/{index}" for index in range(2)]
        self.sockets = [self.context.socket(zmq.PULL) for _ in self.addresses]
        for socket, address in zip(self.sockets, self.addresses, strict=True):
            bind_local(socket, address)
        self.sender = TokenSender(self.context, "m", engine=0)
        self._decoder = MsgpackDecoder(EngineCoreOutputs)

    def request(self, name: str, gateway: int) -> AdmittedRequest:
        return AdmittedRequest(name, 1, 1, f"epoch {gateway}", self.addresses[gateway], 0)

    def received(self, gateway: int) -> tuple[TokensHeader, EngineCoreOutputs]:
        assert self.sockets[gateway].poll(int(1000 * PATIENCE)), "nothing came"
        header, *frames = self.sockets[gateway].recv_multipart()
        message = decode(header)
        assert isinstance(message, TokensHeader)
        return message, self._decoder.decode(frames)


@pytest.fixture
def gateways(tmp_path: Path) -> Any:
    found = Gateways(tmp_path)
    yield found
    found.context.destroy(linger=0)


def stats(hits: int) -> SchedulerStats:
    found = SchedulerStats()
    found.prefix_cache_stats.hits = hits
    return found


def test_statistics_of_a_step_without_a_token_go_to_the_owner_of_a_request(gateways: Gateways) -> None:
    """A chunk in the middle of a prompt gives no token; what was found in the cache counts all the same."""
    there = {"r#1": gateways.request("r", 1)}
    gateways.sender.send(EngineCoreOutputs(scheduler_stats=stats(16)), there)
    header, batch = gateways.received(1)
    assert (header.gateway_epoch, header.entries, batch.outputs) == ("epoch 1", [], [])
    assert batch.scheduler_stats is not None
    assert batch.scheduler_stats.prefix_cache_stats.hits == 16


def test_statistics_of_an_idle_engine_go_where_its_last_tokens_went(gateways: Gateways) -> None:
    gateways.sender.send(EngineCoreOutputs(scheduler_stats=stats(1)), {})  # nobody is known yet
    outputs = [EngineCoreOutput(request_id=name, new_token_ids=[7]) for name in ("a#1", "b#1")]
    there = {"a#1": gateways.request("a", 0), "b#1": gateways.request("b", 1)}
    gateways.sender.send(EngineCoreOutputs(outputs=outputs, scheduler_stats=stats(2)), there)
    told = [gateways.received(index)[1].scheduler_stats for index in range(2)]
    assert sum(each is not None for each in told) == 1, "two gateways would count it twice"
    gateways.sender.send(EngineCoreOutputs(scheduler_stats=stats(3)), {})
    last = gateways.received(1)[1].scheduler_stats
    assert last is not None
    assert last.prefix_cache_stats.hits == 3


# ------------------------------------------------------------ steps that follow one another closely


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose statistics are those of the steps that `cached` and `drafted` since they were asked for last."""
    found: Any = PhaseScheduler.__new__(PhaseScheduler)
    found.log_stats, found.num_spec_tokens = True, 2
    found._stats_due, found._untold, found._untold_proposals = 0.0, False, None
    found.now = 100.0
    monkeypatch.setattr("muxserve.engine.leased_scheduler.time", SimpleNamespace(monotonic=lambda: found.now))

    def make_stats(self: Any, proposals: SpecDecodingStats | None = None, *_: Any, **__: Any) -> SchedulerStats:
        return SchedulerStats(spec_decoding_stats=proposals)

    monkeypatch.setattr(Scheduler, "make_stats", make_stats)
    return found


def step(scheduler: Any, drafted: int, accepted: int) -> SchedulerStats | None:
    proposals = scheduler.make_spec_decoding_stats(None, drafted, accepted, None, "r")
    made: SchedulerStats | None = scheduler.make_stats(proposals, None, None, None, ec_connector_stats=None)
    return made


def test_proposals_of_steps_in_quick_succession_are_all_counted(scheduler: Any) -> None:
    first = step(scheduler, 2, 1)
    assert first is not None
    assert first.spec_decoding_stats is not None
    assert (first.spec_decoding_stats.num_drafts, first.spec_decoding_stats.num_accepted_tokens) == (1, 1)
    assert step(scheduler, 2, 2) is None
    assert step(scheduler, 0, 0) is None
    scheduler.now += STATS_INTERVAL_SECONDS
    later = step(scheduler, 1, 0)
    assert later is not None
    assert later.spec_decoding_stats is not None
    assert (later.spec_decoding_stats.num_drafts, later.spec_decoding_stats.num_draft_tokens) == (2, 3)
    assert later.spec_decoding_stats.num_accepted_tokens == 2
    assert scheduler.take_untold() is None


def test_the_last_steps_of_a_burst_are_told_when_it_is_over(scheduler: Any) -> None:
    assert step(scheduler, 2, 1) is not None
    assert step(scheduler, 2, 2) is None
    rest = scheduler.take_untold()
    assert rest is not None
    assert rest.spec_decoding_stats is not None
    assert rest.spec_decoding_stats.num_accepted_tokens == 2
    assert scheduler.take_untold() is None
