"""What is let in of images, and how long their files are kept."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder

from muxserve.gateway.front_end.engine_client import UnitEngineClient
from muxserve.gateway.front_end.images import DataUrls, RequestImages
from muxserve.gateway.http.body import check_media
from muxserve.gateway.http.errors import RequestError
from muxserve.gateway.limits.priorities import RequestLevels
from muxserve.vllm.image_files import with_pixels, without_pixels
from tests.support.tiny_checkpoint import picture
from tests.support.unit_specs import model_spec

URL = "data:image/png;base64,AA=="
IMAGE = {"type": "image_url", "image_url": {"url": URL}}


def feature(name: str) -> MultiModalFeatureSpec:
    pixels = torch.arange(float(len(name) * 1000))
    item = MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(data=pixels, field=MultiModalBatchedField())})
    return MultiModalFeatureSpec(
        data=item, modality="image", identifier=name, mm_position=PlaceholderRange(offset=3, length=5)
    )


async def test_an_image_is_kept_once_and_as_long_as_somebody_needs_it(tmp_path: Path) -> None:
    directory = tmp_path / "gateway-1"
    (tmp_path / "gateway-0").mkdir(parents=True)
    directory.mkdir()
    (directory / "left by one before").touch()
    images = RequestImages(tmp_path, 1)
    (first, held), (second, also) = await asyncio.gather(
        images.keep("m", [feature("a"), feature("bb")]), images.keep("m", [feature("a")])
    )
    assert [each.data for each in (*first, *second)] == [None] * 3
    assert first[0].mm_hash == second[0].mm_hash
    assert len(list(directory.iterdir())) == 2
    read = with_pixels(first)
    assert [len(each.data["pixel_values"].data) for each in read] == [1000, 2000]  # type: ignore[index, arg-type]
    assert [each.mm_position for each in read] == [PlaceholderRange(offset=3, length=5)] * 2
    # Another model makes something else of it.
    _, other = await images.keep("n", [feature("a")])
    assert len(list(directory.iterdir())) == 3
    before = images.bytes
    del held
    gc.collect()
    assert len(list(directory.iterdir())) == 2
    assert 0 < images.bytes < before
    del also, other
    gc.collect()
    assert not list(directory.iterdir())
    assert (tmp_path / "gateway-0").is_dir()


async def test_who_is_cancelled_leaves_nothing_and_others_their_image(tmp_path: Path) -> None:
    images = RequestImages(tmp_path, 0)
    leaves = asyncio.ensure_future(images.keep("m", [feature("a"), feature("bb")]))
    stays = asyncio.ensure_future(images.keep("m", [feature("a")]))
    await asyncio.sleep(0)
    leaves.cancel()
    (kept,), held = await stays
    await asyncio.gather(leaves, return_exceptions=True)
    del leaves
    assert len(with_pixels([kept])) == len(held) == 1

    def left() -> list[Path]:
        gc.collect()
        return list((tmp_path / "gateway-0").iterdir())

    async with asyncio.timeout(60):
        while [str(path) for path in left()] != [kept.mm_hash]:
            await asyncio.sleep(0.01)


async def test_there_is_room_for_so_many_bytes(tmp_path: Path) -> None:
    images = RequestImages(tmp_path, 0, most_bytes=4000)
    _, held = await images.keep("m", [feature("a")])
    assert images.bytes == 4000
    with pytest.raises(GracefulHTTPError, match="no room for the images"):
        await images.keep("m", [feature("b")])
    del held
    gc.collect()
    assert (await images.keep("m", [feature("b")]))[1]


def test_a_request_is_one_message_however_many_tokens_an_image_has(tmp_path: Path) -> None:
    broker: Any = SimpleNamespace(attach=lambda name, client: None)
    grammars: Any = None
    client = UnitEngineClient(model_spec("m", sees_images=True), broker, grammars, RequestImages(tmp_path, 0))
    stands = torch.arange(3000) % 65 > 0
    seen = feature("a")
    seen.mm_position = PlaceholderRange(offset=3, length=3000, is_embed=stands)
    request = EngineCoreRequest(
        request_id="front",
        prompt_token_ids=[1] * 3010,
        mm_features=[seen],
        sampling_params=SamplingParams(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    told_of = without_pixels([seen], ["file"])
    body = client._encode(request, "wire", RequestLevels(), told_of, salt="of the tenant", adapter=None)
    assert request.mm_features == [seen]
    assert request.cache_salt is None
    decoded = MsgpackDecoder(EngineCoreRequest).decode(body)
    assert (decoded.request_id, decoded.cache_salt) == ("wire", "of the tenant")
    (told,) = decoded.mm_features
    assert (told.data, told.identifier, told.mm_hash) == (None, "a", "file")
    assert told.mm_position.is_embed.tolist() == stands.tolist()


async def test_a_directory_that_cannot_be_written_is_no_room(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    images = RequestImages(tmp_path / "file", 0)
    for _ in range(2):
        with pytest.raises(GracefulHTTPError, match="no room for the images"):
            await images.keep("m", [feature("a")])


def body(part: dict[str, Any], field: str = "messages", **more: Any) -> bytes:
    return json.dumps({field: [{"role": "user", "content": [{"type": "text", "text": "Hi"}, part]}], **more}).encode()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (body({"type": "image_url", "image_url": {"url": "http://example.com/x.png"}}), "fetches nothing"),
        (body({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}), "fetches nothing"),
        (body({"type": "input_image", "image_url": "https://x/y"}, "input"), r"input\[0\].content\[1\] is input_image"),
        (body({"type": "input_image", "file_id": "f"}, "input"), "fetches nothing"),
        (body({"image_url": {"url": 3}}), "fetches nothing"),
        (body({"type": "image", "source": {"type": "url", "url": "http://x/y"}}), "fetches nothing"),
        (body(IMAGE).replace(b'"image_url"', b'"image\\u005furl"').replace(b"data:", b"http:"), "fetches nothing"),
        (body({**IMAGE, "uuid": "mine"}), "'uuid' is not served"),
        (body({"type": "image_embeds", "image_embeds": "AA=="}), "given by its `image_url`"),
        (body({"type": "image_pil"}), "given by its `image_url`"),
        (body({"type": "video_url", "video_url": {"url": URL}}), "text and images, no video"),
        (body({"type": "input_audio", "input_audio": {}}), "text and images, no audio"),
        (body(IMAGE, mm_processor_kwargs={"size": 3}), "'mm_processor_kwargs' is not served"),
        (body(IMAGE, media_io_kwargs={"image": {}}), "'media_io_kwargs' is not served"),
        (
            json.dumps({"messages": [[{"role": "user", "content": [{**IMAGE, "uuid": "x"}]}]]}).encode(),
            r"messages\[0\]\[0\].content\[0\] is image_url: 'uuid'",
        ),
        (
            json.dumps({"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]}).encode(),
            r"input\[0\].output\[0\] is input_image",
        ),
        (
            body({"type": "tool_result", "content": [{**IMAGE, "uuid": "x"}]}),
            "'uuid' is not served",
        ),
    ],
)  # fmt: skip
def test_what_a_model_that_sees_images_does_not_take(given: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check_media(given, sees_images=True)


@pytest.mark.parametrize(
    "given",
    [
        body(IMAGE),
        body({"type": "input_image", "image_url": URL, "detail": "auto"}, "input"),
        body({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}),
        body({"type": "text", "text": '"image_url": "http://x"'}),
        b'{"prompt": "image_url"}',
    ],
)
def test_what_it_takes(given: bytes) -> None:
    check_media(given, sees_images=True)


def test_a_body_that_is_nested_too_deeply_is_no_failure() -> None:
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(RequestError, match="nested too deeply"):
        check_media(deep, sees_images=True)


def encoded(image: Image.Image) -> str:
    with io.BytesIO() as file:
        image.save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9/x.png", "fetches nothing"),
        ("file:///etc/hostname", "fetches nothing"),
        ("data:image/png;base64,AAAA", "cannot be read"),
        ("data:image/png;base64,%%%", "cannot be read"),
        ("data:image/png,AAAA", "cannot be read"),
        (f"data:image/png;base64,{encoded(picture(30, 20))[:400]}", "cannot be read"),
        # Few bytes that would become many: more than Pillow opens.
        (f"data:image/png;base64,{encoded(Image.new('1', (20_000, 18_000)))}", "cannot be read"),
    ],
)
async def test_what_is_no_image_is_the_clients_to_mend(url: str, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        await DataUrls().fetch_image_async(url)
    with pytest.raises(VLLMValidationError, match=words):
        DataUrls().fetch_image(url)


async def test_a_data_url_is_read() -> None:
    url = f"data:image/png;base64,{encoded(picture(30, 20))}"
    assert (await DataUrls().fetch_image_async(url)).media.size == (30, 20)  # type: ignore[attr-defined]
