"""Benchmark the service's answers against the same call in process.

    .venv/bin/python benchmarks/serving.py --network small        (an index of a million images; 1.1 GB in the temporary folder)
    .venv/bin/python benchmarks/serving.py --network resnet18     (embeddings only, images of 224 pixels)

`dml serve` is started by its command, with batching and without, and queried over HTTP by 1, 8 and 32 clients in a separate process, each
with one JPEG at a time. The peer is what the replica does with one image, without HTTP: decode, embed, search. Weights and the
index's vectors are random: neither affects the cost of a request.
"""

import argparse
import asyncio
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from measuring import ROOT, address_in
from PIL import Image

from dml_core.config import parse
from dml_core.index.index import Index
from dml_core.index.items import Item
from dml_core.index.writing import Batch, build_index
from dml_core.models.config import ModelConfig
from dml_core.models.embedder import Embedder
from dml_core.trained import load_model, save_network

IDENTITY = "ab" * 16
NUM_CLIENTS = (1, 8, 32)
K = 10
NETWORKS: dict[str, dict[str, Any]] = {
    "small": {
        "model": {"backbone": {"name": "small_cnn", "width": 16}, "head": {"kind": "linear", "embedding_dim": 64}},
        "transform": {"crop": "padded", "crop_size": 32, "padding": 4, "flip": True, "scaling": "zero-one"},
        "pixels": (32, 32),
    },
    "resnet18": {
        "model": {"backbone": {"name": "resnet18"}, "head": {"kind": "linear", "embedding_dim": 512}},
        "transform": {"crop": "random_resized", "crop_size": 224, "flip": True},
        "pixels": (500, 375),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", choices=[*NETWORKS], default="small")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--approximate", default=None)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--batch", type=int, action="append", help="32 and 1 if left out")
    parser.add_argument("--folder", type=Path, help="where model and index are kept for another time")
    parser.add_argument("--ask", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.ask:
        url, folder, clients, seconds = chosen.ask
        print(json.dumps(asyncio.run(ask(url, Path(folder), int(clients), float(seconds)))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = chosen.folder or Path(temporary)
        make(root, chosen.network, chosen.items, chosen.approximate)
        what = f"index of {chosen.items} items ({chosen.approximate or 'exact'})" if chosen.network == "small" else "embeddings alone"
        print(f"{chosen.network}, {what}, {os.cpu_count()} cores; milliseconds a request", flush=True)
        peer = in_process(root, chosen.network, chosen.seconds)
        print(f"in process, one after another: {shown(peer)}", flush=True)
        for batch in chosen.batch or (32, 1):
            with_service(root, chosen.network, batch, chosen.seconds, peer)


def make(root: Path, network: str, num_items: int, approximate: str | None) -> None:
    """Create missing model, image and index."""
    settings = NETWORKS[network]
    model = root / network
    if not model.exists():
        torch.manual_seed(0)
        drawn = Embedder(parse(ModelConfig, {**settings["model"]}, "model"), 10)
        state = {f"model.{name}": value for name, value in drawn.state_dict().items()}
        save_network(model, settings, 10, state, IDENTITY, title=network)
        (root / "params.yaml").write_text((ROOT / "params.yaml").read_text())
        width, height = settings["pixels"]
        coarse = np.random.default_rng(0).integers(0, 256, (24, 32, 3)).astype(np.uint8)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(root / f"{network}.jpg", quality=90)
    if network == "small" and not (root / "index").exists():
        picture = io.BytesIO()
        Image.open(root / "small.jpg").save(picture, "WEBP")

        def batches() -> Iterator[Batch]:
            rng = np.random.default_rng(1)
            for start in range(0, num_items, 50_000):
                rows = rng.normal(size=(min(50_000, num_items - start), 64)).astype(np.float32)
                yield Batch(rows, [Item(f"{start + row}.jpg", f"class {row % 100}", picture.getvalue()) for row in range(len(rows))])

        build_index(root / "index", batches(), IDENTITY, approximate=approximate)


def in_process(root: Path, network: str, seconds: float) -> dict[str, float]:
    """Process one image after another, without HTTP."""
    model = load_model(root / network, "cpu")
    index = Index.open(root / "index") if network == "small" else None
    data = (root / f"{network}.jpg").read_bytes()

    def once() -> None:
        row = model.embed([data])
        if index is not None:
            _, positions = index.search(row, K)
            for position in positions[0]:
                index.item(int(position))

    times = timed(once, seconds)
    return figures(times, sum(times))


def timed(call: Callable[[], None], seconds: float) -> list[float]:
    for _ in range(5):
        call()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return times


def with_service(root: Path, network: str, batch: int, seconds: float, peer: dict[str, float]) -> None:
    """Start the service, query it with a growing number of clients, and end it."""
    what = root / ("index" if network == "small" else network)
    command = [sys.executable, "-m", "flows.cli", "serve", str(what), "--port", "0", "--batch", str(batch)]
    if network == "small":
        command += ["--model", str(root / network)]
    begun = time.perf_counter()
    service = subprocess.Popen(command, cwd=root, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        url = address_in(service.stdout)
        print(f"batches of up to {batch} (up after {time.perf_counter() - begun:.0f} s):", flush=True)
        for clients in NUM_CLIENTS:
            command = [sys.executable, __file__, "--ask", url, str(root / network), str(clients), str(seconds)]
            run = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
            found = json.loads(run.stdout)
            ratios = f"p50 {found['p50'] / peer['p50']:.2f} and rate {found['rate'] / peer['rate']:.2f} of in process"
            print(f"  {clients:2} clients: {shown(found)}; {ratios}", flush=True)
        print(f"  memory of all its processes: {memory(service.pid):.0f} MB (proportional share)", flush=True)
    finally:
        service.terminate()
        service.wait(60)


async def ask(url: str, source: Path, num_clients: int, seconds: float) -> dict[str, float]:
    """Run this many clients, each sending its next request when it has an answer; the first half second is not counted."""
    import httpx

    data = source.with_suffix(".jpg").read_bytes()
    path = "/v1/search" if source.name == "small" else "/v1/embed"
    times: list[float] = []
    begun = time.perf_counter()
    counted_from, until = begun + 0.5, begun + 0.5 + seconds

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as connection:
            while (at := time.perf_counter()) < until:
                (await connection.post(path, files={"image": data})).raise_for_status()
                if at >= counted_from:
                    times.append(time.perf_counter() - at)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return figures(times, time.perf_counter() - counted_from)


def figures(times: list[float], seconds: float) -> dict[str, float]:
    p50, p95 = np.percentile(times, [50, 95])
    return {"p50": 1000 * float(p50), "p95": 1000 * float(p95), "rate": len(times) / seconds}


def shown(found: dict[str, float]) -> str:
    return f"p50 {found['p50']:.1f}, p95 {found['p95']:.1f}, {found['rate']:.0f} a second"


def memory(pid: int) -> float:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return float(sum(process.memory_full_info().pss for process in processes) / 1e6)


if __name__ == "__main__":
    main()
