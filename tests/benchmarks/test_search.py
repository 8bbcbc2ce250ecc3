"""The search benchmark with few items: every kind of index compared with plain FAISS."""

import json
from pathlib import Path

import pytest

from benchmarks import search

SIZE = ["--items", "1500", "--dimensions", "16", "--queries", "5"]


def test_every_kind_is_measured_beside_faiss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [f"--kind={kind}" for kind in ("exact", "ivf", "pq", "hnsw")]
    monkeypatch.setattr("sys.argv", ["search.py", *SIZE, *kinds, "--folder", str(tmp_path / "kept"), "--json", str(tmp_path / "found")])
    search.main()
    assert capsys.readouterr().out.count("built in") == 4
    found = json.loads((tmp_path / "found").read_text())
    assert [result["kind"] for result in found] == ["exact", "ivf", "pq", "hnsw"]
    assert all(result["ours_p50_ms"] > 0 and result["faiss_p50_ms"] > 0 and result["items"] == 1500 for result in found)
    assert [result["refined_p50_ms"] is not None for result in found] == [False, False, True, False]
    assert found[0]["recalls"] is None
    assert found[3]["recalls"]["10"] > 0.9
