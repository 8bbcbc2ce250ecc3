"""The environment of a run's result names what changes its last bits."""

import os
import subprocess
import sys

from tests.conftest import ROOT

CODE = """
import numpy as np
from tasks.runs.surroundings import surroundings
values = np.random.default_rng(0).standard_normal((5, 1000))
print(surroundings("cpu", 1)["processor"], [float(a @ b).hex() for a in values for b in values], sep="|")
"""


def with_kernels(core: str) -> list[str]:
    """Return the processor and some products of NumPy in a process whose OpenBLAS takes the kernels of a core."""
    environment = os.environ | {"OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    return ran.stdout.split("|")


def test_processors_whose_products_of_numpy_differ_are_different_environments() -> None:
    """As two generations of AMD EPYC: for the older one OpenBLAS takes its kernels of Skylake, for the newer one those of Haswell."""
    (old, products), (new, others) = with_kernels("Nehalem"), with_kernels("Haswell")
    assert products != others
    assert (old.rpartition(", ")[2], new.rpartition(", ")[2]) == ("OpenBLAS Nehalem)", "OpenBLAS Haswell)")
