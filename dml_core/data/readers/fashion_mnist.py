"""Fashion-MNIST: 70,000 images of ten kinds of clothing (Xiao et al., 2017), split by class (0 to 4 train, 5 to 9 test) or by image."""

from typing import ClassVar, Literal

from dml_core.data.readers.shared.idx_dataset import IdxDataset


class FashionMnist(IdxDataset):
    """The four IDX files, available in Debian's package `dataset-fashion-mnist`. `sha256` is of the unzipped files."""

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
    package_manager: ClassVar[Literal["debian", "npm"]] = "debian"
    package: ClassVar[str] = "dataset-fashion-mnist"
    package_folder: ClassVar[str] = "usr/share/datasets/fashion-mnist"
    sha256: ClassVar[frozenset[str]] = frozenset(
        {
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",  # train images
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",  # train labels
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",  # test images
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",  # test labels
        }
    )
    torchvision_class: ClassVar[str] = "FashionMNIST"
