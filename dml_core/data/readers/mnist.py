"""MNIST: 70,000 handwritten digits (LeCun et al., 1998), split by class (0 to 4 train, 5 to 9 test) or by image."""

from typing import ClassVar

from dml_core.data.readers.shared.idx_dataset import IdxDataset


class Mnist(IdxDataset):
    """The four IDX files."""

    how_to_get: ClassVar[str] = "run `dml data fetch mnist`, or put the four IDX files there"
    class_names: ClassVar[tuple[str, ...]] = tuple("0123456789")
    torchvision_class: ClassVar[str] = "MNIST"
