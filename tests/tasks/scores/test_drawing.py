"""The hash of a drawing: equal for equal figures wherever their files are, and another one for each thing that they show."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dml_core.data.store.split_config import ValidationConfig
from tasks.runs.records import FileRecord
from tasks.scores.drawing import Drawing, titled

DRAWING = Drawing("d / softmax / seed 0: Recall@1 50.0 %", "cosine", 0, [{"loss": 1.0}], Path("packed"), Path("embedded"))
FILES = (FileRecord(name="test-0.npy", num_bytes=1, sha256="a"), FileRecord(name="manifest.json", num_bytes=1, sha256="b"))


def content(drawing: Drawing = DRAWING, files: Sequence[FileRecord] = FILES, digest: str = "images", sources: str = "code") -> str:
    return drawing.content(files, digest, sources)


def test_places_and_the_order_of_files_do_not_count() -> None:
    assert content() == content(replace(DRAWING, dataset=Path("elsewhere"), embeddings=Path("elsewhere")), FILES[::-1])


def test_everything_that_figures_show_counts() -> None:
    changed = [
        content(replace(DRAWING, title="d / softmax / seed 0: Recall@1 51.0 %")),
        content(replace(DRAWING, metric="euclidean")),
        content(replace(DRAWING, seed=1)),
        content(replace(DRAWING, history=[{"loss": 2.0}])),
        content(replace(DRAWING, validation=ValidationConfig(share=0.5))),
        content(files=(FILES[0].model_copy(update={"sha256": "c"}), FILES[1])),
        content(files=FILES[:1]),
        content(digest="other images"),
        content(sources="other code"),
    ]
    assert len({content(), *changed}) == 1 + len(changed)


def test_the_title_has_recall_at_the_smallest_k() -> None:
    metrics = {"recall@4": 0.75, "recall@2": 0.5, "recall@1_class_mean": 0.3, "nmi": 0.1}
    assert titled("d / softmax / seed 0", metrics, (4, 2)) == "d / softmax / seed 0: Recall@2 50.0 %"
