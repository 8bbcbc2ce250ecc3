"""Packages that only some parts of the library need, and the extra of the distribution `dml-core` that installs each."""

from importlib.util import find_spec

from dml_core.errors import DmlError

EXTRAS = {
    "faiss": "index",
    "matplotlib": "figures",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
    "pytorch_metric_learning": "pml",
    "timm": "timm",
    "google.protobuf": "caffe",
    "fontTools": "drawn",
    "resvg_py": "drawn",
}


class MissingPackageError(DmlError, ImportError):
    """An optional package that is not installed; the message has the command that installs it."""


def require(*modules: str) -> None:
    """Check that optional modules, keys of `EXTRAS`, are installed, without importing them.

    Raises:
        MissingPackageError: one is not; the message has the command that installs it.
    """
    for module in modules:
        if not _is_installed(module):
            raise MissingPackageError(f"{module} is not installed; install it: pip install 'dml-core[{EXTRAS[module]}]'")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
