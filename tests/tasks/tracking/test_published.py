"""Reading what MLflow holds: every page of a search, not only the first."""

from typing import Any

import pytest

from tasks.tracking import published
from tasks.tracking.published import SEED_TAG, VARIANT_TAG, published_runs
from tasks.tracking.reading import all_pages

NUM_RUNS, PAGE = 132, 50


class Page(list[int]):
    """One page of a search as MLflow's client gives it."""

    token: str | None = None


def test_all_pages_of_a_search_are_read() -> None:
    def search(max_results: int, page_token: str | None) -> Page:
        start = int(page_token or 0)
        page = Page(range(start, min(start + PAGE, NUM_RUNS)))
        page.token = str(start + PAGE) if start + PAGE < NUM_RUNS else None
        return page

    assert all_pages(search) == list(range(NUM_RUNS))


def test_a_server_is_asked_for_all_pages_of_a_comparison_s_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(uri: str, call: str, **body: Any) -> dict[str, Any]:
        if call == "experiments/search":
            return {"experiments": [{"experiment_id": "1"}]}
        start = int(body.get("page_token", 0))
        runs = [_run(number) for number in range(start, min(start + PAGE, NUM_RUNS))]
        return {"runs": runs, **({"next_page_token": str(start + PAGE)} if start + PAGE < NUM_RUNS else {})}

    monkeypatch.setattr(published, "_post", answer)
    monkeypatch.setattr(published, "check_available", lambda uri: None)
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
    found = published_runs("http://mlflow", "d", "comparison on d")
    assert [(run.variant, run.seed) for run in found] == [("a", seed) for seed in range(NUM_RUNS)]


def _run(seed: int) -> dict[str, Any]:
    tags = [{"key": VARIANT_TAG, "value": "a"}, {"key": SEED_TAG, "value": str(seed)}]
    return {"info": {"run_id": f"r{seed}"}, "data": {"metrics": [{"key": "recall_at_1", "value": 0.5}], "tags": tags}}
