"""Benchmark a loader that reads images from a bucket against the local packed file, in the same run.

    .venv/bin/python benchmarks/streaming.py      (0.5 GB in the temporary folder)

The images are JPEGs of 30 to 100 KB. A server in another process answers requests for byte ranges as S3 does, with 0 and with 50 ms of
latency. It is small because moto's takes 40 ms per request; it neither authenticates nor encrypts. Each epoch draws every image once, in
random order. A cold cache is empty and takes all images; a warm one has all; a quarter is a bound of a quarter of the images, in the
second epoch. Without look-ahead is the first epoch again, in which a batch is requested when it is needed. CPU time is this process's,
which other work on the machine hardly changes; with loader processes it is theirs, and not shown.
"""

import argparse
import asyncio
import hashlib
import os
import shutil
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from measuring import drawn_photograph

from dml_core.data.prepare import pack
from dml_core.data.store.info import IMAGES_FILE, read_info
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.ranges import RANGES_FILE, image_ranges
from dml_core.data.store.rows import Manifest, Row
from dml_core.data.views import batches as batches_module
from dml_core.data.views.batches import Loader, TrainView
from dml_core.data.views.transform_config import TransformConfig
from tasks.remote_images.reading import CACHE_FOLDER, GB, RemoteImages

NUM_IMAGES, NUM_DRAWN, BATCH_SIZE = 2000, 200, 64
VIEW = TrainView(TransformConfig(crop="random_resized", crop_size=224, flip=True), 0, 0)
LATENCIES = (0.0, 0.05)
KEY = "data/photographs"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=NUM_IMAGES)
    num_images = parser.parse_args().images
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        sizes = write_photographs(root / "packed", num_images)
        print(f"{num_images} JPEGs of {min(sizes) // 1000} to {max(sizes) // 1000} KB, {sum(sizes) / GB:.2f} GB; batches of {BATCH_SIZE};")
        print("images per second of an epoch, and CPU time per image")
        prepare_machine(root)
        for num_loader_workers in (0, 2):
            measure(root, num_images, sum(sizes), num_loader_workers)


def measure(root: Path, num_images: int, num_bytes: int, num_loader_workers: int) -> None:
    local = PackedDataset(root / "packed", "train")
    rate(local, num_images, 0, num_loader_workers)  # reads the file into the page cache
    print(f"loader processes: {num_loader_workers}")
    print(f"  local file                      {rate(local, num_images, 1, num_loader_workers)}")
    for latency in LATENCIES:
        with Server(root / "packed" / IMAGES_FILE, latency) as server:
            os.environ |= {"AWS_ENDPOINT_URL": server.address, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
            os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
            cold = opened(root, 2.0 * num_bytes)
            figures = {"cold cache": rate(cold, num_images, 1, num_loader_workers)}
            figures["warm cache"] = rate(cold, num_images, 2, num_loader_workers)
            quarter = opened(root, num_bytes / 4)
            rate(quarter, num_images, 1, num_loader_workers)
            figures["cache of a quarter"] = rate(quarter, num_images, 2, num_loader_workers)
            figures["cold, without look-ahead"] = rate(opened(root, 2.0 * num_bytes), num_images, 1, num_loader_workers, ahead=False)
        for name, figure in figures.items():
            print(f"  {1000 * latency:2.0f} ms, {name:24}  {figure}", flush=True)


def opened(root: Path, cache_bytes: float) -> PackedDataset:
    """Return the dataset in the bucket, with an empty cache."""
    shutil.rmtree(root / "machine" / CACHE_FOLDER, ignore_errors=True)
    images = RemoteImages("s3://bucket", root / "machine", KEY, cache_bytes / GB)
    return PackedDataset(root / "machine" / KEY, "train", source=images)


def rate(dataset: PackedDataset, num_images: int, epoch: int, num_loader_workers: int, ahead: bool = True) -> str:
    """Return images per second of an epoch, and CPU time per image; the start of processes and of connections is not counted."""
    order = np.random.default_rng(epoch).permutation(num_images)
    batches = np.split(order, range(BATCH_SIZE, num_images, BATCH_SIZE))
    loader = Loader(dataset, num_loader_workers)
    for _ in loader.batches([batches[0][:2]] * max(1, num_loader_workers), VIEW):
        pass
    following = batches_module._following
    if not ahead:
        batches_module._following = lambda *arguments: ()
    start, cpu_start = time.perf_counter(), time.process_time()
    num_loaded = sum(len(indices) for _, indices in loader.batches(batches, VIEW))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    batches_module._following = following
    loader.close()
    cpu = "" if num_loader_workers else f"  {1000 * cpu_seconds / num_loaded:5.1f} ms CPU"
    return f"{num_loaded / seconds:5.0f}{cpu}"


def write_photographs(folder: Path, num_images: int) -> list[int]:
    """Pack drawn images, each several times; return their sizes."""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(min(NUM_DRAWN, num_images)):
        width, height = int(rng.integers(300, 520)), int(rng.integers(260, 400))
        drawn.append(drawn_photograph(rng, width, height, grain=rng.uniform(8, 14)))
    rows = [Row(str(number), number % 100, f"class {number % 100}", "train") for number in range(num_images)]
    pack("folder", {}, Manifest(rows, lambda row: drawn[int(row.path) % len(drawn)]), folder)
    return [len(drawn[number % len(drawn)]) for number in range(num_images)]


def prepare_machine(root: Path) -> None:
    """Give the reading machine the dataset without its images."""
    folder = root / "machine" / KEY
    folder.mkdir(parents=True)
    for path in (root / "packed").iterdir():
        if path.name != IMAGES_FILE:
            shutil.copy(path, folder)
    np.save(folder / RANGES_FILE, image_ranges(root / "packed"))


class Server:
    """A server of one object in another process, over HTTP/1.1: HEAD, and GET with a range and an ETag."""

    def __init__(self, path: Path, latency: float) -> None:
        context = get_context("spawn")
        port, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(path, latency, theirs), daemon=True)
        self._process.start()
        self.address = f"http://127.0.0.1:{port.recv()}"

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def _serve(path: Path, latency: float, port: Connection) -> None:
    file, size, sha256 = path.open("rb"), path.stat().st_size, read_info(path.parent).images_sha256
    etag = f'"{hashlib.md5(sha256.encode()).hexdigest()}"'
    common = f"ETag: {etag}\r\nx-amz-meta-sha256: {sha256}\r\nAccept-Ranges: bytes\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readline():
            headers = {}
            while (line := await reader.readline()).strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            if latency:
                await asyncio.sleep(latency)
            if request.startswith(b"HEAD"):
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n{common}\r\n".encode())
            else:
                assert headers["if-match"] == etag
                start, stop = (int(word) for word in headers["range"].removeprefix("bytes=").split("-"))
                data = os.pread(file.fileno(), stop + 1 - start, start)
                place = f"Content-Range: bytes {start}-{stop}/{size}\r\n"
                writer.write(f"HTTP/1.1 206 Partial Content\r\nContent-Length: {len(data)}\r\n{place}{common}\r\n".encode() + data)
            await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


if __name__ == "__main__":
    main()
