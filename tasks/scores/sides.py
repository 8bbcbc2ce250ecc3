"""Opening of a run's embeddings with their images."""

from pathlib import Path

from dml_core.data.store.embedded import EmbeddedImages
from dml_core.data.store.split_config import ValidationConfig
from dml_core.data.store.splits import open_role
from tasks.runs.embeddings import load_embeddings, query_and_gallery


def open_sides(embeddings: Path, dataset: Path, validation: ValidationConfig | None) -> tuple[EmbeddedImages, EmbeddedImages]:
    """Return queries and gallery of a run; one object if a role is searched in itself.

    Args:
        embeddings: folder of the extracted embeddings.
        dataset: folder of the packed dataset.
        validation: the training classes that the run held out.

    Raises:
        StoreError: embeddings are missing or damaged.
    """

    def opened(role: str) -> EmbeddedImages:
        return EmbeddedImages(role, open_role(dataset, role, validation), *load_embeddings(embeddings, role))

    query_role, gallery_role = query_and_gallery(embeddings)
    gallery = opened(gallery_role)
    return (gallery if query_role == gallery_role else opened(query_role)), gallery
