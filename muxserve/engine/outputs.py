"""Tokens from an engine straight to the gateway."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

import zmq
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackEncoder

from muxserve.net.sockets import NetworkError, connect
from muxserve.spec import Keys
from muxserve.wire import TokensHeader, encode

log = logging.getLogger(__name__)


class TokenReceiver(Protocol):
    """What the sender must know of a request; `emitted` counts its output tokens sent so far and is kept here."""

    request_id: str
    attempt: int
    gateway_epoch: str
    reply_to: str
    emitted: int


class TokenSender:
    """Sends a step's outputs to the gateways that own the requests; with the fleet's `keys` also to other machines."""

    def __init__(self, context: zmq.Context, model: str, engine: int, keys: Keys | None = None) -> None:
        self._context = context
        self._keys = keys
        self._model = model
        self._engine = engine
        self._encoder = MsgpackEncoder()
        self._sockets: dict[str, zmq.Socket | None] = {}
        # Address and epoch of the gateway that was sent to last.
        self._last: tuple[str, str] | None = None

    def send(self, batch: EngineCoreOutputs, requests: Mapping[str, TokenReceiver]) -> None:
        """Send `batch`; its outputs carry internal ids and are left unchanged.

        Statistics are counted by one gateway. Without outputs that is one whose request is here, or that was sent to
        last.
        """
        by_gateway: dict[tuple[str, str], list[tuple[EngineCoreOutput, TokenReceiver]]] = {}
        for output in batch.outputs:
            request = requests.get(output.request_id)
            if request is not None:
                by_gateway.setdefault((request.reply_to, request.gateway_epoch), []).append((output, request))
        stats = batch.scheduler_stats
        if stats is not None and not by_gateway:
            owner = next(iter(requests.values()), None)
            gateway = (owner.reply_to, owner.gateway_epoch) if owner is not None else self._last
            if gateway is not None:
                by_gateway[gateway] = []
        for (address, epoch), pairs in by_gateway.items():
            self._last = address, epoch
            entries = []
            renamed = []
            for output, request in pairs:
                entries.append((request.request_id, request.attempt, request.emitted))
                request.emitted += len(output.new_token_ids)
                internal, output.request_id = output.request_id, request.request_id
                renamed.append(internal)
            message = EngineCoreOutputs(
                engine_index=self._engine,
                outputs=[output for output, _ in pairs],
                scheduler_stats=stats,
                timestamp=batch.timestamp,
            )
            header = TokensHeader(epoch, self._model, self._engine, entries)
            frames = [encode(header), *self._encoder.encode(message)]
            socket = self._socket(address)
            if socket is not None:
                socket.send_multipart(frames, zmq.NOBLOCK)
            for (output, _), internal in zip(pairs, renamed, strict=True):
                output.request_id = internal
            stats = None

    def _socket(self, address: str) -> zmq.Socket | None:
        """The connection to a gateway; None if there is no such address, which costs the gateway that named it its
        tokens and nobody else anything."""
        if address not in self._sockets:
            socket = self._sockets[address] = self._context.socket(zmq.PUSH)
            socket.linger = 0
            socket.sndhwm = 0
            try:
                connect(socket, address, self._keys)
            except (NetworkError, zmq.ZMQError) as error:
                log.warning("%r, where a gateway waits for tokens, cannot be reached: %s", address, error)
                socket.close()
                self._sockets[address] = None
        return self._sockets[address]
