"""Settings of the cross-batch memory (implemented in `cross_batch.py`); light to import."""

from pydantic import Field

from dml_core.config import Config


class CrossBatchConfig(Config):
    """Settings of the cross-batch memory.

    Attributes:
        size: number of samples kept, at least one batch.
        after_epochs: initial epochs that compare only within the batch, until embeddings drift slowly (the paper takes 1,000 steps). The
            memory fills meanwhile.
    """

    size: int = Field(ge=1)
    after_epochs: int = Field(default=1, ge=0)
