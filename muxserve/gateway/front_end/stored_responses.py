"""vLLM's Responses API over the fleet's store: what its front end keeps in dictionaries of its own, for ever and in one
process, is kept there."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse, serialize_messages
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.renderers.online_renderer import OpenAIMessage
from vllm.utils import random_uuid

from muxserve.gateway.http.errors import RequestError, shortened
from muxserve.gateway.http.http_request import HttpRequest, current_http
from muxserve.gateway.http.responses import ResponseStore, StoredResponse, not_kept

# The number of ended background streams whose events can be read again.
ENDED_STREAMS = 8

log = logging.getLogger(__name__)

Events = tuple[deque[Any], asyncio.Event]


def attach(handler: OpenAIServingResponses, model: str, gateway: int, store: ResponseStore | None) -> None:
    """Let `handler`, the front end of `model` in this gateway, keep its responses in `store`; None: nowhere."""
    create = handler.create_responses
    handler.enable_store = store is not None
    kept = None if store is None else _ModelResponses(handler, model, gateway, store)

    async def checked(request: ResponsesRequest, raw_request: Any = None) -> Any:
        try:
            if kept is not None:
                kept.check(request)
            elif request.previous_response_id is not None:
                raise not_kept(request.previous_response_id)
            elif request.background:
                raise RequestError(
                    HTTPStatus.BAD_REQUEST,
                    "responses in the background need a place where they are kept; set gateway.responses in the fleet "
                    "file of this server",
                    param="background",
                )
        except RequestError as error:
            return handler.create_error_response(
                err_type="invalid_request_error", message=error.message, status_code=error.status, param=error.param
            )
        return await create(request, raw_request)

    handler.create_responses = checked


class _ModelResponses:
    """The responses of one model in one gateway: what they stand for in vLLM's front end."""

    def __init__(self, handler: OpenAIServingResponses, model: str, gateway: int, store: ResponseStore) -> None:
        self.store = store
        self.model = model
        self.gateway = gateway
        self.format = "harmony" if handler.use_harmony else "chat"
        # Background responses: vLLM changes them where they are.
        self.live: dict[str, ResponsesResponse] = {}
        self.events: dict[str, Events] = {}
        handler.response_store = _Responses(self)
        handler.msg_store = _Messages(self)
        handler.event_store = self.events
        handler.background_tasks = self.tasks = _Tasks(self)
        handler.responses_background_stream_generator = self.stream
        self._retrieve = handler.retrieve_responses
        self._refuse = handler.create_error_response
        handler.retrieve_responses = self.retrieve

    def check(self, request: ResponsesRequest) -> None:
        """Refuse what cannot be gone on from.

        Raises:
            RequestError: the response before it is not complete, or comes from a model of another kind.
        """
        if request.store:
            request.request_id = f"resp_{random_uuid()}"  # a client's own could be another's
        before = request.previous_response_id
        found = None if before is None else self.find(before)
        if before is None or found is None:
            return
        why = ""
        if found.is_running:
            why = f"{shortened(before)} is not complete yet"
        elif found.format != self.format:
            why = f"{shortened(before)} comes from {found.model}, and {self.model} cannot read its messages"
        if why:
            raise RequestError(HTTPStatus.BAD_REQUEST, why, param="previous_response_id")

    def find(self, name: str) -> StoredResponse | None:
        """A response of who is asking."""
        return self.store.find(_http().owner, name)

    def save(self, response: ResponsesResponse) -> None:
        """Keep `response` as it is now, with the messages before it."""
        http = _http()
        messages = json.dumps(serialize_messages(http.conversation) or [], default=_plain)
        made = response.model_dump_json(by_alias=True)
        stored = StoredResponse(self.model, self.format, self.gateway, response.status, made, messages)
        self.store.save(http.owner, response.id, stored)

    def ended(self, name: str) -> None:
        """The task of a background response is done; readers of its events hear of it."""
        response = self.live.pop(name)
        if response.status in ("queued", "in_progress"):
            response.status = "failed"
        self.save(response)
        if name in self.events:
            self.events[name][1].set()
        ended = [each for each in self.events if each not in self.tasks]
        for each in ended[: max(0, len(ended) - ENDED_STREAMS)]:
            del self.events[each]

    async def retrieve(self, response_id: str, starting_after: int | None, stream: bool | None) -> Any:
        """Stands for the front end's own, which has events of all responses that were streams."""
        if stream and response_id not in self.events:
            return self._refuse(
                err_type="invalid_request_error",
                message=f"the events of {shortened(response_id)} are not kept: it was no stream in the "
                "background, or it ended some time ago; ask for it without stream",
                param="stream",
            )
        return await self._retrieve(response_id, starting_after=starting_after, stream=stream)

    async def stream(self, response_id: str, starting_after: int | None = None) -> AsyncIterator[Any]:
        """The events of a background response, running or ended. vLLM's own goes on for ever when the response
        is cancelled or fails."""
        while response_id in self.tasks and response_id not in self.events:
            await asyncio.sleep(0)  # it was asked for just now, and its task has not begun
        if response_id not in self.events:
            return
        events, more = self.events[response_id]
        at = 0 if starting_after is None else starting_after + 1
        while True:
            more.clear()
            running = response_id in self.tasks
            while at < len(events):
                yield events[at]
                at += 1
            if not running:
                return
            await more.wait()


class _Responses:
    """Stands for vLLM's `response_store`."""

    def __init__(self, kept: _ModelResponses) -> None:
        self._kept = kept

    def get(self, name: str) -> ResponsesResponse | None:
        live = self._kept.live.get(name)
        if live is not None:
            return live
        found = self._kept.find(name)
        return None if found is None else ResponsesResponse.model_validate_json(found.response)

    def __setitem__(self, name: str, response: ResponsesResponse) -> None:
        if response.background:
            self._kept.live[name] = response
        self._kept.save(response)


class _Messages:
    """Stands for vLLM's `msg_store`. Those of a new response are written with it, since its answer may join them."""

    def __init__(self, kept: _ModelResponses) -> None:
        self._kept = kept

    def get(self, name: str) -> list[Any] | None:
        found = self._kept.find(name)
        if found is None:
            return None
        messages: list[Any] = json.loads(found.messages)
        return [OpenAIMessage.from_dict(each) for each in messages] if found.format == "harmony" else messages

    def __getitem__(self, name: str) -> list[Any]:
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def __setitem__(self, name: str, messages: list[Any]) -> None:
        _http().conversation = messages


class _Tasks(dict[str, "asyncio.Task[Any]"]):
    """Stands for vLLM's `background_tasks`: the request of such a task is in service until the task is done."""

    def __init__(self, kept: _ModelResponses) -> None:
        super().__init__()
        self._kept = kept

    def __setitem__(self, name: str, task: asyncio.Task[Any]) -> None:
        super().__setitem__(name, task)
        _http().background = task
        task.add_done_callback(lambda _: self._done(name, task))

    def _done(self, name: str, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("response %s of %s failed: %s", name, self._kept.model, error)
        del self[name]
        self._kept.ended(name)


def _http() -> HttpRequest:
    http = current_http.get()
    assert http is not None, "a response answers a request"
    return http


def _plain(value: Any) -> Any:
    """What JSON does not know, in messages of requests."""
    return value.model_dump(mode="json", by_alias=True) if hasattr(value, "model_dump") else list(value)
