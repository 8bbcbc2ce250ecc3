"""The cache of images: its bound holds at every moment, with several processes, killed ones and a full disk."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.remote_images.cache import ENTRY_BYTES, IMAGES, INDEX, ImageCache
from tests.forked import forked_on_small_disk

NUM_IMAGES = 200
INDEX_BYTES = ENTRY_BYTES * NUM_IMAGES


def image(position: int) -> bytes:
    return random.Random(position).randbytes(300 + position)


NUM_BYTES = sum(len(image(position)) for position in range(NUM_IMAGES))


def cache(root: Path, max_bytes: int, name: str = "one") -> ImageCache:
    return ImageCache(root, name, NUM_IMAGES, NUM_BYTES, max_bytes)


def used(root: Path) -> int:
    """Return the bytes of all files below a folder; those removed meanwhile count 0."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            total += path.stat().st_size if path.exists() and name != ".lock" else 0
    return total


def stored(held: ImageCache) -> set[int]:
    """Return the positions of the stored images, after comparing their bytes."""
    positions = {position for position in range(NUM_IMAGES) if position in held}
    for position in positions:
        assert held.read(position, len(image(position))) == image(position)
    return positions


def test_images_are_stored_until_the_next_would_exceed_the_bound_and_stay(tmp_path: Path) -> None:
    bound = INDEX_BYTES + sum(len(image(position)) for position in range(3)) + 10
    held = cache(tmp_path, bound)
    for position in range(10):
        held.add({position: image(position)})
        assert used(tmp_path) <= bound
    assert stored(held) == {0, 1, 2}
    assert held.read(5, len(image(5))) is None
    again = cache(tmp_path, bound)
    again.add({7: image(7)})
    assert stored(again) == {0, 1, 2}
    again.forget(1)
    assert stored(held) == {0, 2}


@pytest.mark.parametrize("damage", ["random", "ones", "cut", "images cut"])
def test_damaged_files_of_the_cache_raise_nothing_and_keep_what_is_intact(tmp_path: Path, damage: str) -> None:
    held = cache(tmp_path, 2 * NUM_BYTES)
    held.add({position: image(position) for position in range(20)})
    index, images = (tmp_path / "one" / name for name in (INDEX, IMAGES))
    changed = {"random": random.Random(0).randbytes(INDEX_BYTES), "ones": b"\xff" * INDEX_BYTES, "cut": index.read_bytes()[:44]}
    if damage == "images cut":
        images.write_bytes(images.read_bytes()[:700])
    else:
        index.write_bytes(changed[damage])
    found = {position: held.read(position, len(image(position))) for position in range(NUM_IMAGES)}
    intact = {position for position, data in found.items() if data == image(position)}
    assert intact == {"random": set(), "ones": set(), "cut": {0, 1, 2, 3, 4, 5}, "images cut": {0, 1}}[damage]
    held.add({30: image(30)})


def test_a_bound_below_the_index_stores_nothing(tmp_path: Path) -> None:
    held = cache(tmp_path, INDEX_BYTES - 1)
    held.add({0: image(0)})
    held.forget(0)
    assert stored(held) == set()
    assert used(tmp_path) == 0


def test_only_datasets_that_nobody_uses_make_room(tmp_path: Path) -> None:
    bound = 2 * (INDEX_BYTES + NUM_BYTES)
    everything = {position: image(position) for position in range(NUM_IMAGES)}
    in_use, unused, oldest = (cache(tmp_path, bound, name) for name in ("in use", "unused", "oldest"))
    in_use.add(everything)
    unused.add({0: image(0)})
    del unused, oldest
    os.utime(tmp_path / "oldest", (0, 0))
    another = cache(tmp_path, bound, "another")
    another.add(everything)
    assert used(tmp_path) <= bound
    assert stored(in_use) == stored(another) == set(range(NUM_IMAGES))
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "in use", "another"}
    late = cache(tmp_path, bound, "late")
    late.add(everything)
    assert stored(late) == set()
    assert used(tmp_path) <= bound


def test_the_least_recently_used_dataset_goes_first_and_no_more_than_needed(tmp_path: Path) -> None:
    whole = INDEX_BYTES + NUM_BYTES
    for age, name in enumerate(("newer", "older"), 1):
        cache(tmp_path, 2 * whole, name).add({position: image(position) for position in range(NUM_IMAGES)})
        os.utime(tmp_path / name, (time.time() - age, time.time() - age))
    cache(tmp_path, 2 * whole, "one")
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "newer", "one"}


def test_a_lowered_bound_empties_the_dataset_s_own_cache(tmp_path: Path) -> None:
    cache(tmp_path, 10 * NUM_BYTES).add({position: image(position) for position in range(NUM_IMAGES)})
    held = cache(tmp_path, INDEX_BYTES + 1000)
    assert stored(held) == set()
    held.add({1: image(1)})
    assert stored(held) == {1}
    assert used(tmp_path) <= INDEX_BYTES + 1000


def fill_the_disk(root: Path) -> None:
    """Add all images, and compare the only log line."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    held = cache(root, 10 * NUM_BYTES)
    for position in range(NUM_IMAGES):
        held.add({position: image(position)})
    assert 1 <= len(stored(held)) < 10
    assert [record.getMessage().endswith("further images are not cached (disk full)") for record in records] == [True]


def test_a_disk_that_is_full_is_as_a_bound_that_is_reached(tmp_path: Path) -> None:
    """A limit on the sizes of a process's files stands for the disk: both make a write fail or end early."""
    assert forked_on_small_disk(INDEX_BYTES + 1000, fill_the_disk, tmp_path) == 0


WRITER = """
import os, random, sys
from pathlib import Path
from tests.tasks.remote_images.test_cache import NUM_IMAGES, cache, image
held = cache(Path(sys.argv[1]), int(sys.argv[2]))
print("ready", flush=True)
for position in random.sample(range(NUM_IMAGES), NUM_IMAGES):
    held.add({position: image(position)})
"""


@pytest.mark.slow
def test_processes_share_the_images_and_the_bound_and_may_be_killed(tmp_path: Path) -> None:
    bound = INDEX_BYTES + NUM_BYTES // 3
    for number in range(4):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(bound)], stdout=subprocess.PIPE, text=True) for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        until = time.monotonic() + 0.002 * number
        while time.monotonic() < until:
            assert used(tmp_path) <= bound
        writers[0].send_signal(signal.SIGKILL)
        while writers[1].poll() is None:
            assert used(tmp_path) <= bound
        for writer in writers:
            writer.communicate()
        assert writers[1].returncode == 0
        assert stored(cache(tmp_path, bound))
    held = cache(tmp_path, bound)
    assert used(tmp_path) > bound - 2 * max(len(image(position)) for position in range(NUM_IMAGES))
    assert sum(len(image(position)) for position in stored(held)) > NUM_BYTES // 3 - 12 * 500, "a kill wastes at most an image or two"
