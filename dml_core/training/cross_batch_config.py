"""The settings of a cross-batch memory (`cross_batch.py` is one); light to import."""

from pydantic import Field

from dml_core.config import Config


class CrossBatchConfig(Config):
    """Options.

    Attributes:
        size: samples that are kept, a batch at least.
        after_epochs: so many epochs compare within the batch alone, until embeddings drift slowly (the paper takes 1,000 steps). The memory
            fills meanwhile.
    """

    size: int = Field(ge=1)
    after_epochs: int = Field(default=1, ge=0)
