"""Checkpoints whose files an engine could not open or would find broken are refused by the fleet file's check."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from muxserve.config import FleetError, parse_fleet
from muxserve.config.checkpoint_files import CheckpointError, read_json, tensors_of
from tests.support.checkpoint_files import write_checkpoint, write_safetensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def problem_of(directory: Path, options: str = "") -> str:
    """What is said of a fleet with the checkpoint in that directory; empty if nothing is."""
    more = f"\n    engine_args: {options}" if options else ""
    try:
        parse_fleet(f"models:\n  - name: a\n    path: {directory}{more}\n", "fleet.yaml", Path("/"), {})
    except FleetError as error:
        (problem,) = error.problems
        return str(problem)
    return ""


def truncated(at: Path) -> None:
    write_safetensors(at / WEIGHTS, {"a": ("F32", [10], 40)})
    os.truncate(at / WEIGHTS, (at / WEIGHTS).stat().st_size - 1)


def cut_in_the_header(at: Path) -> None:
    write_safetensors(at / WEIGHTS, {"a": ("F32", [10], 40)})
    os.truncate(at / WEIGHTS, 20)


def longer(at: Path) -> None:
    with (at / WEIGHTS).open("ab") as file:
        file.write(b"x")


def impossible(at: Path) -> None:
    write_safetensors(at / WEIGHTS, {"a": ("F32", [11], 40)})


def lfs_pointer(at: Path) -> None:
    (at / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def dangling(name: str) -> Callable[[Path], None]:
    def link(at: Path) -> None:
        (at / name).unlink(missing_ok=True)
        (at / name).symlink_to("/nowhere/at/all")

    return link


def cyclic(name: str) -> Callable[[Path], None]:
    def link(at: Path) -> None:
        (at / name).unlink(missing_ok=True)
        (at / name).symlink_to("other" + name)
        (at / ("other" + name)).symlink_to(name)

    return link


def fifo(name: str) -> Callable[[Path], None]:
    def make(at: Path) -> None:
        (at / name).unlink(missing_ok=True)
        os.mkfifo(at / name)

    return make


def write(name: str, text: str | bytes) -> Callable[[Path], None]:
    return lambda at: void((at / name).write_bytes(text.encode() if isinstance(text, str) else text))


def void(_: object) -> None:
    return None


def indexed(*names: str) -> Callable[[Path], None]:
    return write(INDEX, json.dumps({"weight_map": {str(number): name for number, name in enumerate(names)}}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (truncated, "model.safetensors is cut off: by its header it has 111 bytes, and it has 110"),
        (cut_in_the_header, "model.safetensors is cut off in its header"),
        (longer, "model.safetensors has more than its tensors"),
        (impossible, "model.safetensors says of 'a' what cannot be; it is damaged"),
        (lfs_pointer, "model.safetensors is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`"),
        (write(WEIGHTS, b""), "model.safetensors is empty"),
        (write(WEIGHTS, b"these are no weights"), "model.safetensors is not a safetensors file"),
        (dangling(WEIGHTS), "model.safetensors is a link to /nowhere/at/all, which is not there"),
        (cyclic(WEIGHTS), "model.safetensors is a link that leads back to itself"),
        (fifo(WEIGHTS), "model.safetensors is a FIFO, not a regular file"),
        (fifo("more.safetensors"), "more.safetensors is a FIFO, not a regular file"),
        (fifo("optimizer.pt"), "optimizer.pt is a FIFO, not a regular file"),
        (fifo("config.json"), "has no config.json; is it a Hugging Face checkpoint?"),
        (fifo("generation_config.json"), "generation_config.json is a FIFO, not a regular file"),
        (dangling("chat_template.jinja"), "chat_template.jinja is a link to /nowhere/at/all, which is not there"),
        (indexed(WEIGHTS, "model-2.safetensors"), "model-2.safetensors is not there"),
        (indexed("../b/model.safetensors"), "names '../b/model.safetensors', which is not a file beside it"),
        (indexed("/etc/passwd"), "names '/etc/passwd', which is not a file beside it"),
        (write(INDEX, "{}"), "has no weight_map from tensors to files"),
        (write(INDEX, "["), "index.json is not JSON"),
        (lambda at: (at / "tokenizer.json").unlink(), "has no tokenizer (tokenizer.json, tokenizer.model or the like)"),
        (write("tokenizer.json", b""), "tokenizer.json is empty"),
        (write("tokenizer.json", '{"version": "1.0", "tr'), "tokenizer.json is cut off, or not JSON"),
        (write("config.json", b"\xef\xbb\xbf{}"), "config.json begins with a byte order mark, which vLLM cannot read"),
        (write("config.json", '{"a": ' * 65 + "1" + "}" * 65), "config.json is nested too deeply"),
        (write("config.json", "[" * 100_000), "config.json is nested too deeply"),
        (write("config.json", "[]"), "config.json is not a JSON object"),
        (write("config.json", "{"), "config.json is not JSON"),
        (write("config.json", b"\xff{}"), "config.json is not UTF-8 text"),
        (write("config.json", '{"hidden_size": ' + "9" * 10_000 + "}"), "config.json is not JSON"),
    ],
)
def test_what_cannot_be_opened_or_is_not_whole_is_refused(
    spoil: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "a")
    assert not problem_of(directory)
    spoil(directory)
    said = problem_of(directory)
    assert said.startswith(f"fleet.yaml:3: models[0].path: {directory}")
    assert words in said


@pytest.mark.parametrize(
    ("spoil", "options"),
    [
        (lambda at: (at / "tokenizer.json").unlink(), "{tokenizer: org/other}"),
        (lambda at: (at / "tokenizer.json").unlink(), "{skip_tokenizer_init: true}"),
        (lambda at: (at / "tokenizer.json").rename(at / "qwen.tiktoken"), ""),
        (truncated, "{load_format: dummy}"),
        (indexed(WEIGHTS), ""),
        # As the hub's cache has them.
        (lambda at: (at / WEIGHTS).rename(at / ".blob") and (at / WEIGHTS).symlink_to(".blob"), ""),
        # Others of the same directory are not loaded.
        (write("optimizer.pt", b""), ""),
        (dangling("README.md"), ""),
    ],
)
def test_what_can_be_loaded_is_not_refused(spoil: Callable[[Path], None], options: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "a")
    spoil(directory)
    assert problem_of(directory, options) == ""


def test_a_path_that_the_system_cannot_take(tmp_path: Path) -> None:
    assert "File name too long" in problem_of(tmp_path / ("x" * 5000))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gateway: {api_keys: 'file:fifo'}", "fifo has no key, or cannot be read"),
        ("tenants: {a: {keys: ['file:fifo']}}", "fifo has no key, or cannot be read"),
        ("gateway: {tls: {cert: fifo, key: fifo}}", "fifo is not there, or cannot be read"),
        ("gateway: {responses: fifo}", "responses cannot be kept in"),
        ("gateway: {usage_file: fifo}\ntenants: {a: {keys: ['file:keys']}}", "what tenants used cannot be kept in"),
    ],
)
def test_no_other_file_may_be_a_fifo(text: str, words: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "keys").write_text("sk-1\n")
    with pytest.raises(FleetError, match=words):
        parse_fleet(f"{text}\nmodels: [{{name: a, hub: org/a}}]\n", "fleet.yaml", tmp_path, {})


def test_a_device_is_not_opened() -> None:
    for read in (read_json, tensors_of):
        with pytest.raises(CheckpointError, match="/dev/zero is a device, not a regular file"):
            read(Path("/dev/zero"))


def test_bytes_of_all_types_of_numbers(tmp_path: Path) -> None:
    file = tmp_path / WEIGHTS
    write_safetensors(file, {"a": ("F4", [3, 2], 3), "b": ("BF16", [], 2), "c": ("TYPE_OF_TOMORROW", [7], 5)})
    assert list(tensors_of(file)) == ["a", "b", "c"]
