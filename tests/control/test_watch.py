"""A change of any file of a fleet is seen once, when it has settled."""

from __future__ import annotations

import os
from pathlib import Path

from muxserve.control.watch import FileWatch

FLEET = "include: teams/*.yaml\ngateway: {api_keys: file:keys}\n"


def settled(watch: FileWatch) -> bool:
    """What it says when it has looked twice."""
    assert not watch.changed()
    return watch.changed()


def test_each_file_of_the_fleet_counts(tmp_path: Path) -> None:
    (tmp_path / "teams").mkdir()
    file, team, keys = tmp_path / "fleet.yaml", tmp_path / "teams/a.yaml", tmp_path / "keys"
    file.write_text(FLEET)
    team.write_text("models: []\n")
    keys.write_text("sk-1\n")
    watch = FileWatch(file, {})
    assert not settled(watch)
    for changed in (file, team, keys):
        changed.write_text(changed.read_text() + "\n")
        assert settled(watch)
        assert not settled(watch)
    # A file that its pattern matches only now; one that others have nothing to do with.
    (tmp_path / "teams/b.yaml").write_text("models: []\n")
    assert settled(watch)
    (tmp_path / "teams/c.txt").write_text("x")
    (tmp_path / "usage.sqlite").write_text("x")
    assert not settled(watch)
    team.unlink()
    assert settled(watch)


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    watch = FileWatch(file, {})
    for part in ("a: 1\n", "b: 2\n", "c: 3\n"):
        file.write_text(file.read_text() + part)
        assert not watch.changed()
    assert watch.changed()


def test_a_broken_file_is_looked_at_until_it_is_mended(tmp_path: Path) -> None:
    file, other = tmp_path / "fleet.yaml", tmp_path / "other.yaml"
    file.write_text("include: other.yaml\n")
    other.write_text("models: [\n")
    watch = FileWatch(file, {})
    other.write_text("models: []\n")
    assert settled(watch)
    file.unlink()
    assert settled(watch)
    file.write_text("include: other.yaml\n")
    assert settled(watch)


def test_a_link_above_the_file_that_is_replaced_is_a_change(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fleet.yaml").write_text("models: []\n")
        os.utime(tmp_path / name / "fleet.yaml", (1, 1))
    (tmp_path / "data").symlink_to("1")
    (tmp_path / "fleet.yaml").symlink_to("data/fleet.yaml")
    watch = FileWatch(tmp_path / "fleet.yaml", {})
    (tmp_path / "new").symlink_to("2")
    os.rename(tmp_path / "new", tmp_path / "data")
    assert settled(watch)
