"""A searchable index: its files are memory-mapped, so that a million items open instantly and processes share them.

    index = Index.open(Path("birds.index"))
    scores_Qk, positions_Qk = index.search(model.embed(["bird.jpg"]), k=10)
    index.item(positions_Qk[0, 0]).name

Shapes: N items, Q queries, D dimensions, k neighbours.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dml_core.errors import ConfigError, StoreError, first_line
from dml_core.evaluation.inputs import checked_embeddings
from dml_core.evaluation.retrieval.geometry import as_points, as_similarities, centred
from dml_core.evaluation.retrieval.neighbours import NUM_SPARE_CANDIDATES, in_order
from dml_core.index.items import Item, open_items
from dml_core.index.layout import APPROXIMATE, ITEMS, REMEDY, VECTORS, IndexInfo, read_info, verify

NUM_CANDIDATES = 8  # candidates of compressed vectors per requested neighbour, reordered by the whole vectors
NUM_ATTEMPTS = 5


class Index:
    """An index in a folder with verified files (see `open`). Thread-safe for searching; later changes are not visible.

    Attributes:
        model_identity: identity of the embeddings' network, as `TrainedModel` has it.
        num_items, num_dimensions: N and the embedding dimension D.
        metric: metric of the search.
        kind: "exact", or the kind of approximation.

    Raises:
        StoreError: the files do not fit `info`, the folder's `index.json`.
    """

    def __init__(self, folder: Path, info: IndexInfo) -> None:
        self.folder, self.info = folder, info
        self.model_identity, self.metric, self.kind = info.model_identity, info.metric, info.kind
        self.num_items, self.num_dimensions = info.num_items, info.num_dimensions
        self.vectors_ND = mapped_vectors(folder, info)
        self.items = open_items(info.path(folder, ITEMS))
        if self.items.num_rows != info.num_items:
            raise StoreError(f"{info.path(folder, ITEMS)}: {self.items.num_rows} items where {info.num_items} are expected; {REMEDY}")
        self._approximate: Any = None if info.kind == "exact" else read_approximate(info.path(folder, APPROXIMATE), mapped=True)
        if self._approximate is not None and (self._approximate.ntotal, self._approximate.d) != self.vectors_ND.shape:
            raise StoreError(f"{info.path(folder, APPROXIMATE)}: of other vectors than the index has; {REMEDY}")
        if info.kind == "pq":
            self._approximate = _refined(self._approximate, self.vectors_ND)

    @classmethod
    def open(cls, folder: str | Path) -> "Index":
        """Return the index of a folder, with every file verified by its SHA-256 (about 1.5 GB a second).

        Raises:
            ConfigError: no index there.
            StoreError: the index is damaged or of a newer format.
        """
        folder, missing = Path(folder), FileNotFoundError()
        for _ in range(NUM_ATTEMPTS):
            info = read_info(folder)
            try:
                verify(folder, info)
                return cls(folder, info)
            except FileNotFoundError as error:
                missing = error  # or the index was changed after `index.json` was read
        raise StoreError(f"{missing.filename or folder}: a file of the index is missing; {REMEDY}")

    def check_model(self, identity: str, weights_sha256: str | None = None) -> None:
        """Reject embeddings of another model.

        Args:
            weights_sha256: hash of its weights: trained again, a model may have others under the same identity. None if unknown.

        Raises:
            ConfigError: the model is another one.
        """
        if identity != self.model_identity:
            called = f" ({self.info.model_source})" if self.info.model_source else ""
            raise ConfigError(
                f"{self.folder}: of model {self.model_identity}{called}; embeddings of model {identity} do not compare with it;"
                " use its own model, or build an index with this one"
            )
        if None not in (weights_sha256, self.info.weights_sha256) and weights_sha256 != self.info.weights_sha256:
            raise ConfigError(
                f"{self.folder}: of model {identity} with other weights: it was trained again since, and its new embeddings do not compare"
                f" with the old ones; {REMEDY}"
            )

    def search(self, embeddings: ArrayLike, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the nearest items of each query, nearest first.

        An approximate index may miss some of them (`info.found` measures this), but still returns k, with their exact scores. Equal scores
        are ordered by position. Which of more than eight are among the k is arbitrary if their scores are equal or, among hundreds of
        queries at once, differ by less than float32's rounding, about 1e-7.

        Args:
            embeddings: (Q, D), of the index's own model; of any length for cosine.
            k: number of neighbours; fewer if the index has fewer items.

        Returns:
            scores (Q, k): cosines, or negative distances for Euclidean; positions (Q, k).

        Raises:
            EvaluationError: embeddings cannot be compared.
            ConfigError: the number of dimensions differs, or k is no whole number from 1.
        """
        rows_QD = self._comparable(embeddings)
        if not isinstance(k, int | np.integer) or k < 1:
            raise ConfigError(f"k = {k} neighbours were asked for; ask for 1 or more")
        k = min(int(k), self.num_items)  # FAISS refuses numpy's integers
        if self._approximate is None:
            distances_Qk, positions_Qk = self._exactly(rows_QD, k)
        else:
            distances_Qk, positions_Qk = self.approximately(rows_QD, k)
            short = np.flatnonzero(positions_Qk[:, -1] < 0)  # the lists searched had fewer
            if len(short):
                distances_Qk[short], positions_Qk[short] = self._exactly(rows_QD[short], k)
        order_Qk = np.lexsort((positions_Qk, distances_Qk))
        scores_Qk = as_similarities(np.take_along_axis(distances_Qk, order_Qk, axis=1), self.metric)
        return scores_Qk, np.take_along_axis(positions_Qk, order_Qk, axis=1)

    def approximately(self, rows_QD: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Search only the approximate index, for rows in the form of the stored vectors; missing neighbours are -1 at the end.

        Returns:
            squared distances (Q, k), exact, as they are those of whole vectors; positions (Q, k).
        """
        found: tuple[NDArray[np.float32], NDArray[np.int64]] = self._approximate.search(rows_QD, k)
        return found

    def item(self, position: int) -> Item:
        """Return the item at a position, 0 to N - 1.

        Raises:
            IndexError: no such position.
        """
        return Item(**self.items.slice(int(position), 1).to_pylist()[0])

    def names(self) -> list[str]:
        """Return the name of every item, in order."""
        return list(self.items["name"].to_pylist())

    @cached_property
    def nbytes(self) -> int:
        """Total size of its files in bytes."""
        return sum(path.stat().st_size for path in self.info.files(self.folder))

    def _comparable(self, embeddings: ArrayLike) -> NDArray[np.float32]:
        """Return the checked embeddings in the form of the stored vectors."""
        points = as_points(checked_embeddings(embeddings, "queries"), self.metric)
        if points.raw.shape[1] != self.num_dimensions:
            raise ConfigError(f"{self.folder}: of {self.num_dimensions} dimensions, and the queries have {points.raw.shape[1]}")
        return centred(points, np.zeros(self.num_dimensions))

    def _exactly(self, rows_QD: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Search by FAISS's brute force over the mapped vectors, without copying them, and order what it finds by exact distances.

        FAISS orders equal distances by chance, and of many queries it computes them from products, whose errors would set an image apart
        from its own copy: the same query would have other neighbours among other queries, or with another k. The distances of unit vectors
        order them as their cosines do, but still differ in float32 where the cosines of a nearly collapsed network are equal.
        """
        candidates_Qm = faiss.knn(rows_QD, self.vectors_ND, min(k + NUM_SPARE_CANDIDATES, self.num_items))[1]
        vectors, queries = as_points(self.vectors_ND, "euclidean"), as_points(rows_QD, "euclidean")  # of unit length if for cosine
        positions_Qk, distances_Qk = in_order(vectors, queries, np.arange(len(queries)), candidates_Qm, k)
        return distances_Qk, positions_Qk


def read_approximate(path: Path, mapped: bool) -> Any:
    """Read FAISS's index from a file, mapped or into memory; a mapped one cannot be changed.

    Raises:
        FileNotFoundError: no such file.
        StoreError: the file is damaged.
    """
    path.stat()
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mapped else 0)
    except RuntimeError as error:
        raise StoreError(f"{path}: damaged ({first_line(error)[-120:]}); {REMEDY}") from None


def _refined(compressed: Any, vectors_ND: NDArray[np.float32]) -> Any:
    """Return an index of compressed vectors whose candidates FAISS reorders by the whole vectors, read in place."""
    view: Any = faiss.MaybeOwnedVectorUInt8()  # its own `create_view` cannot be called from Python
    view.is_owned = False
    view.view_data = view.c_ptr = faiss.swig_ptr(vectors_ND.view(np.uint8))
    view.view_size = view.c_size = vectors_ND.nbytes
    whole = faiss.IndexFlatL2(vectors_ND.shape[1])
    whole.codes, whole.ntotal = view, len(vectors_ND)
    refined = faiss.IndexRefine(compressed, whole)
    refined.k_factor = NUM_CANDIDATES
    return refined


def mapped_vectors(folder: Path, info: IndexInfo) -> NDArray[np.float32]:
    """Return the stored vectors (N, D), memory-mapped.

    Raises:
        FileNotFoundError: no such file.
        StoreError: the file has another size than `info` gives.
    """
    path, expected = info.path(folder, VECTORS), 4 * info.num_items * info.num_dimensions
    if path.stat().st_size != expected:
        raise StoreError(f"{path}: {path.stat().st_size} bytes where {expected} are expected; {REMEDY}")
    mapped_ND = np.memmap(path, dtype=np.float32, mode="r", shape=(info.num_items, info.num_dimensions))
    return np.asarray(mapped_ND)  # indexing a plain array is cheaper
