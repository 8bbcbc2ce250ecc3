"""Over HTTP, embeddings equal those computed in process, and search results equal the index's."""

import base64
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from dml_core.index.index import Index
from tests.tasks.serving.conftest import IDENTITY, Made, Service

pytestmark = pytest.mark.slow
WITHIN = 1e-5


def as_json(files: list[bytes]) -> list[str]:
    return [base64.b64encode(data).decode() for data in files]


@pytest.mark.parametrize("kind", ["service", pytest.param("ray_service", marks=pytest.mark.proof)])
def test_embeddings_and_hits_over_http_are_those_in_process(made: Made, request: pytest.FixtureRequest, kind: str) -> None:
    """Embeddings as JSON and as a form; neighbours equal the index's, with names, classes and thumbnails."""
    service: Service = request.getfixturevalue(kind)
    expected = made.load().embed(made.files)
    data = [path.read_bytes() for path in made.files]

    def ask(path: str, **what: Any) -> Any:
        return service.client.post(path, **what).raise_for_status().json()

    by_json = ask("/v1/embed", json={"images": as_json(data)})
    by_form = ask("/v1/embed", files=[("image", (path.name, path.read_bytes())) for path in made.files])
    np.testing.assert_allclose(by_json["embeddings"], expected, rtol=0, atol=WITHIN)
    np.testing.assert_allclose(by_form["embeddings"], expected, rtol=0, atol=WITHIN)
    assert by_json["model"] == IDENTITY
    assert by_json["num_dimensions"] == expected.shape[1]

    index = Index.open(made.index)
    scores, positions = index.search(expected, 7)
    found = ask("/v1/search", json={"images": as_json(data), "k": 7, "thumbnails": True})["results"]
    assert [[hit["position"] for hit in hits] for hits in found] == positions.tolist()
    np.testing.assert_allclose([[hit["score"] for hit in hits] for hits in found], scores, rtol=0, atol=WITHIN)
    first = index.item(int(positions[0, 0]))
    assert (found[0][0]["name"], found[0][0]["class_name"]) == (first.name, first.class_name)
    assert first.name == made.files[0].name
    assert base64.b64decode(found[0][0]["thumbnail"].partition(",")[2]) == first.thumbnail
    (others,) = service.client.get("/v1/neighbours", params={"position": 5, "k": 6}).raise_for_status().json()["results"]
    assert [hit["position"] for hit in others] == positions[5, 1:].tolist()
    more = ask("/v1/search", json={"images": as_json(data[:1]), "k": 1000})["results"]
    assert len(more[0]) == len(made.files)

    health = service.client.get("/v1/health").raise_for_status().json()
    assert health["status"] == "ok"
    assert health["num_items"] == len(made.files)
    paths = set(service.client.get("/openapi.json").raise_for_status().json()["paths"])
    assert paths == {
        "/v1/embed",
        "/v1/search",
        "/v1/neighbours",
        "/v1/health",
        "/metrics",
    }


def test_one_replica_here_starts_no_other_process(service: Service) -> None:
    """Ray takes several times as long to start as the network."""
    (worker,) = service.descendants()
    assert not [library.path for library in worker.memory_maps() if "/ray/" in library.path]


@pytest.mark.proof
def test_what_is_batched_with_others_is_the_same(made: Made, service: Service) -> None:
    """Sixteen concurrent clients let the network process images of several requests together, which the metrics confirm."""
    expected = made.load().embed(made.files)

    def ask(number: int) -> list[float]:
        place = number % len(made.files)
        answer = httpx.post(f"{service.url}/v1/embed", files={"image": made.files[place].read_bytes()}, timeout=60).raise_for_status()
        row: list[float] = answer.json()["embeddings"][0]
        return row

    with ThreadPoolExecutor(16) as clients:
        rows = list(clients.map(ask, range(400)))
    np.testing.assert_allclose(rows, [expected[number % len(made.files)] for number in range(400)], rtol=0, atol=WITHIN)
    metrics = dict(line.rsplit(" ", 1) for line in service.client.get("/metrics").text.splitlines() if not line.startswith("#"))
    assert float(metrics["dml_batch_images_count"]) < float(metrics["dml_batch_images_sum"])
    assert float(metrics["dml_images_total"]) == float(metrics["dml_batch_images_sum"])
    assert float(metrics['dml_requests_total{path="/v1/embed",status="200"}']) >= 400


@pytest.mark.proof
def test_without_an_index_there_is_nothing_to_search(made: Made, start: Callable[..., Service]) -> None:
    service = start(str(made.model), "--batch", "1")
    data = made.files[0].read_bytes()
    rows = service.client.post("/v1/embed", files={"image": data}).raise_for_status().json()["embeddings"]
    np.testing.assert_allclose(rows, made.load().embed([data]), rtol=0, atol=WITHIN)
    refused = service.client.post("/v1/search", files={"image": data})
    assert (refused.status_code, list(refused.json())) == (404, ["error"])
    assert service.client.get("/v1/health").json()["num_items"] is None
    service.end()
