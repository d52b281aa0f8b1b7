"""Makes requests of given lengths, as the gateway's front end would encode them: `python -m muxserve.engine.synthetic`.

Reads `RequestsWanted` from standard input and answers with `RequestBodies` on standard output, one after another, each
a msgpack frame behind its length (4 bytes, little endian). A process of its own, so that whoever needs the requests
need not load vLLM.
"""

from __future__ import annotations

import os
import random
import sys
from typing import TYPE_CHECKING, BinaryIO

import msgspec

if TYPE_CHECKING:
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

_LENGTH_BYTES = 4


class RequestsWanted(msgspec.Struct):
    """`count` requests with random prompts of `prompt_tokens` tokens below `vocabulary`, greedy, which end after
    `max_tokens` tokens and not before. The same `seed` gives the same prompts."""

    count: int
    prompt_tokens: int
    max_tokens: int
    vocabulary: int
    seed: int


class RequestBodies(msgspec.Struct):
    """vLLM's encoding of each request."""

    bodies: list[bytes]


def tokens_request(
    request_id: str,
    prompt: list[int],
    sampling: SamplingParams | None,
    pooling: PoolingParams | None = None,
    cache_salt: str | None = None,
) -> EngineCoreRequest:
    """vLLM's request for a prompt of tokens and nothing else."""
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=pooling,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=cache_salt,
        data_parallel_rank=None,
    )


def frame(message: msgspec.Struct) -> bytes:
    """A message as it is written."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def main() -> None:
    """Answer until standard input ends."""
    source = sys.stdin.buffer
    # vLLM may print while it is imported; that must not get between the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from muxserve.vllm.args import environment

    os.environ.update(environment())
    encoder = Encoder()
    answers.write(frame(RequestBodies([])))  # ready
    answers.flush()
    while (data := _read(source)) is not None:
        answers.write(frame(encoder.make(msgspec.msgpack.decode(data, type=RequestsWanted))))
        answers.flush()


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    return source.read(int.from_bytes(head, "little"))


class Encoder:
    """What `main` answers with, for those who have vLLM imported."""

    def __init__(self) -> None:
        from vllm.v1.serial_utils import MsgpackEncoder

        self._encoder = MsgpackEncoder()

    def make(self, wanted: RequestsWanted) -> RequestBodies:
        from vllm.sampling_params import SamplingParams

        draw = random.Random(wanted.seed)
        bodies = []
        for number in range(wanted.count):
            params = SamplingParams(temperature=0.0, max_tokens=wanted.max_tokens, ignore_eos=True)
            params.update_from_generation_config({}, None)
            prompt = [draw.randrange(wanted.vocabulary) for _ in range(wanted.prompt_tokens)]
            request = tokens_request(f"synthetic-{number}", prompt, params)
            bodies.append(b"".join(bytes(part) for part in self._encoder.encode(request)))
        return RequestBodies(bodies)


if __name__ == "__main__":
    main()
