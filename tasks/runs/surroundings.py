"""The machine's part in a run's result: its processor or GPU, threads, Python and the versions of the libraries that compute."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (  # distributions whose code computes a result
    "torch",
    "torchvision",
    "numpy",
    "scipy",
    "scikit-learn",
    "faiss-gpu",
    "faiss-cpu",
    "pillow",
    "pyarrow",
    "timm",
    "pytorch-metric-learning",
)
MISSING = "missing"  # in place of a version
SURROUNDINGS = "surroundings"  # fact of a training on a cluster: those of its first worker


def surroundings(device: str, threads: int) -> dict[str, Any]:
    """Return the fields of `tasks.watch.records.Environment` that depend on the machine of this process; `device` is "cpu" or "cuda"."""
    import torch

    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    kernels = [torch.backends.cpu.get_cpu_capability(), *([f"oneDNN {limit}"] if limit else []), *_kernels_of_numpy()]
    return {
        "python": platform.python_version(),
        "packages": versions(),
        "processor": f"{processor()} ({', '.join(kernels)})",
        "device": "cpu" if device == "cpu" else gpu(),
        "threads": threads,
    }


def versions() -> dict[str, str]:
    """Return the version of each of PACKAGES that is installed."""
    return {name: number for name in PACKAGES if (number := version_of(name)) != MISSING}


def version_of(name: str) -> str:
    """Return the installed version of a distribution, or MISSING."""
    try:
        return version(name)
    except PackageNotFoundError:
        return MISSING


def processor() -> str:
    """Return the name of the machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _kernels_of_numpy() -> list[str]:
    """Return the kernels that NumPy's OpenBLAS has chosen: two processors of one name, as AMD's of 2022 and 2024, may have others."""
    import numpy as np
    from threadpoolctl import threadpool_info

    own = f"{Path(np.__file__).parent}."  # a wheel's libraries are in numpy.libs
    return [f"OpenBLAS {library['architecture']}" for library in threadpool_info() if library["filepath"].startswith(own)]


def gpu() -> str:
    """Return the name of the machine's GPU with its driver."""
    import torch

    path = Path("/sys/module/nvidia/version")
    driver = path.read_text().strip() if path.is_file() else "unknown"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "GPU of a cluster"
    return f"{name}, driver {driver}, CUDA {torch.version.cuda}"
