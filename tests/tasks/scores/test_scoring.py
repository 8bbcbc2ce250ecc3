"""Scoring from files: a folder of shards gives the scores of its arrays, streamed or not; inconsistent files are refused in one line."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dml_core.errors import ConfigError, EvaluationError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import evaluate
from tasks.scores.evaluation import evaluate_run
from tasks.scores.scoring import Files, approximation_of, score_files

CONFIG = EvaluationConfig(recall_at=(1, 5))


def write_role(folder: Path, role: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Write three shards of unequal sizes, and return all embeddings and labels."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 12, 90)
    embeddings = (np.random.default_rng(9).standard_normal((12, 8))[labels] + generator.standard_normal((90, 8))).astype(np.float32)
    names = []
    for number, rows in enumerate(np.split(np.arange(90), [50, 51])):
        names.append(f"{role}-{number}.npy")
        np.save(folder / names[-1], embeddings[rows])
    np.save(folder / f"{role}-labels.npy", labels)
    manifest = folder / "manifest.json"
    entries = json.loads(manifest.read_text()) if manifest.exists() else {}
    manifest.write_text(json.dumps(entries | {role: {"rows": 90, "dimensions": 8, "shards": names, "labels": f"{role}-labels.npy"}}))
    return embeddings, labels


def only(folder: Path) -> Files:
    return Files(folder, None, None, None)


def test_a_folder_gives_the_numbers_of_its_arrays_streamed_or_not(tmp_path: Path) -> None:
    expected = evaluate(*write_role(tmp_path, "test", 0), CONFIG)
    assert score_files(only(tmp_path), CONFIG, stream=False, approximation=None) == expected
    streamed = score_files(only(tmp_path), CONFIG, stream=True, approximation=None)
    assert streamed.items() <= expected.items()
    assert "map@r" in streamed
    assert "nmi" not in streamed


def test_a_measurement_without_a_value_is_no_score(tmp_path: Path) -> None:
    """A NaN is written as null, which no table reads back."""
    write_role(tmp_path, "test", 0)
    measured = {"pair_cosine_gap": math.nan, "other": math.inf, "kept": 0.5}
    scores = evaluate_run(CONFIG, 0, [], tmp_path, tmp_path / "out", measured)
    assert scores == json.loads((tmp_path / "out/metrics.json").read_text())
    assert scores["kept"] == 0.5
    assert not {"pair_cosine_gap", "other"} & scores.keys()


def test_queries_and_gallery_of_a_folder_are_told_apart_by_role(tmp_path: Path) -> None:
    queries, gallery = write_role(tmp_path, "query", 0), write_role(tmp_path, "gallery", 1)
    expected = evaluate(*gallery, CONFIG, *queries)
    assert score_files(only(tmp_path), CONFIG, stream=False, approximation=None) == expected
    through_index = score_files(only(tmp_path), CONFIG, stream=False, approximation=approximation_of("ivf", ["num_probes=1024"]))
    assert through_index["recall@5"] == expected["recall@5"]
    assert through_index["index_recall@5"] == through_index["is_approximate"] == 1


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_role(tmp_path, "test", 0)
    array, objects, text = tmp_path / "test-0.npy", tmp_path / "objects.npy", tmp_path / "text.npy"
    np.save(objects, np.array(["a", None], dtype=object))
    text.write_text("no array")
    cases = [
        (only(tmp_path / "empty"), "no manifest.json there"),
        (only(array), "needs --labels; only the output of `dml embed` or of a run has its own$"),
        (Files(array, objects, None, None), r"of numbers or strings saved by numpy.save \(it holds Python objects, or is no .npy file\)$"),
        (Files(array, text, None, None), r"it holds Python objects, or is no .npy file\)$"),
        (Files(tmp_path, array, None, None), "has its own labels"),
        (Files(array, array, array, None), "go together"),
        (only(tmp_path / "none"), "no such file or folder"),
    ]
    for files, pattern in cases:
        with pytest.raises(EvaluationError, match=pattern) as caught:
            score_files(files, CONFIG, stream=True, approximation=None)
        assert "\n" not in str(caught.value)
    array.unlink()
    with pytest.raises(EvaluationError, match=r"test-0\.npy: no such file"):
        score_files(only(tmp_path), CONFIG, stream=True, approximation=None)
    np.save(array, np.ones((3, 8), dtype=np.float32))
    with pytest.raises(EvaluationError, match="43 embeddings but 90 labels"):
        score_files(only(tmp_path), CONFIG, stream=True, approximation=None)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(EvaluationError, match="not the manifest"):
        score_files(only(tmp_path), CONFIG, stream=True, approximation=None)


@pytest.mark.parametrize("stream", [False, True])
def test_damaged_arrays_are_refused_in_one_line(tmp_path: Path, stream: bool) -> None:
    """Each byte of the header is changed, and a truncated archive has the name of an array."""
    write_role(tmp_path, "test", 0)
    array, labels, damaged = tmp_path / "test-0.npy", tmp_path / "labels.npy", tmp_path / "damaged.npy"
    np.save(labels, np.zeros(50, dtype=np.int64))
    content = array.read_bytes()
    np.savez(tmp_path / "archive.npz", embeddings=np.ones((50, 8)))
    others = [(tmp_path / "archive.npz").read_bytes()[:90]]
    others += [content[:at] + bytes([byte]) + content[at + 1 :] for at in range(0, 128, 3) for byte in b"\x00 (]\xff\n{"]
    refusals = []
    for other in others:
        damaged.write_bytes(other)
        try:
            score_files(Files(damaged, labels, None, None), CONFIG, stream, approximation=None)
        except EvaluationError as error:
            refusals.append(str(error))
    assert len(refusals) > 180
    assert not [refusal for refusal in refusals if "\n" in refusal]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("rows", "kind", "why"),
    [
        ([[1.0, 2.0], None, [3.0, 4.0], None], pa.list_(pa.float32()), "rows without an embedding, or of different sizes"),
        ([[1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [7.0, 8.0]], pa.list_(pa.float32()), "rows without an embedding, or of different sizes"),
        ([[1.0, 2.0], None, [3.0, 4.0], None], pa.list_(pa.float32(), 2), "size=2"),
        ([1.0, 2.0, 3.0, 4.0], pa.float32(), "list"),
        ([], pa.list_(pa.float32(), 2), "no embeddings"),
    ],
)
def test_a_parquet_file_that_somebody_rewrote_is_not_scored_with_shifted_rows(
    tmp_path: Path, stream: bool, rows: list, kind: pa.DataType, why: str
) -> None:
    names, labels = ["a", "b", "c", "d"][: len(rows)], ["x", "x", "y", "y"][: len(rows)]
    table = pa.table({"name": pa.array(names, pa.string()), "label": pa.array(labels, pa.string()), "embedding": pa.array(rows, kind)})
    parquet.write_table(table, tmp_path / "rewritten.parquet")
    with pytest.raises(EvaluationError, match=why):
        score_files(only(tmp_path / "rewritten.parquet"), EvaluationConfig(recall_at=(1,)), stream, approximation=None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_file_of_one_number_or_of_several_arrays_is_no_array(tmp_path: Path, stream: bool) -> None:
    write_role(tmp_path, "test", 0)
    array, labels, number, archive = (tmp_path / name for name in ("test-0.npy", "labels.npy", "number.npy", "archive.npz"))
    np.save(labels, np.zeros(50, dtype=np.int64))
    np.save(number, np.float32(3.0))
    np.savez(archive, labels=np.zeros(50, dtype=np.int64))
    for files in (Files(number, labels, None, None), Files(array, number, None, None), Files(array, archive, None, None)):
        with pytest.raises(EvaluationError, match=r"(number\.npy|archive\.npz): a single number, or an archive of arrays"):
            score_files(files, CONFIG, stream, approximation=None)


@pytest.mark.parametrize(
    ("index", "options", "pattern"),
    [
        ("lsh", [], "one of ivf, pq, hnsw"),
        ("ivf", ["num_probes"], "name=number"),
        ("ivf", ["num_probe=3"], "num_probes"),
        ("pq", ["num_lists=0"], "num_lists"),
        ("hnsw", ["num_probes=3"], "num_probes: index 'hnsw' does not read it; it reads num_links, num_sampled_queries, num_visited$"),
        ("hnsw", ["num_visited=99999999999"], "num_visited: Input should be less than 2147483648, found 99999999999"),
        ("ivf", ["num_code_bytes=32"], "num_code_bytes: index 'ivf' does not read it"),
        ("ivf", ["num_probes=3", "num_probes=7"], "num_probes is given twice"),
    ],
)
def test_indexes_and_options_that_do_not_exist_are_refused(index: str, options: list[str], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        approximation_of(index, options)
