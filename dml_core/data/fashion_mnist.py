"""Fashion-MNIST: 70,000 images of ten kinds of clothing (Xiao et al., 2017), class-disjoint: 0 to 4 train, 5 to 9 test."""

from typing import ClassVar

from dml_core.data.idx_dataset import IdxDataset


class FashionMnist(IdxDataset):
    """The four IDX files; Debian's package `dataset-fashion-mnist` has them."""

    how_to_get: ClassVar[str] = "run `dml data fetch fashion-mnist`, or install Debian's dataset-fashion-mnist"
    class_names: ClassVar[tuple[str, ...]] = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )
    debian_folder: ClassVar[str] = "fashion-mnist"
    torchvision_class: ClassVar[str] = "FashionMNIST"
