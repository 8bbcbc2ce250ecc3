"""`python -m flows.claims`: measure every claim of `flows/claims.yaml` in this process, print the table and write `docs/claims.md`."""

import tempfile
from pathlib import Path

import torch

from dml_core.config import parse, read_yaml
from tasks.claims import Bench, ClaimsSpec, Verdict, claims_table, measure_claims
from tasks.environment import find_project
from tasks.local_runs import pack_here

SPEC = Path(__file__).parent / "claims.yaml"
PAGE = """# The papers' claims, measured here

Made by `python -m flows.claims` from `flows/claims.yaml`; do not edit. A small network on drawn images and on Fashion-MNIST, seeds {seeds};
mean and half the 95 % interval. A claim holds where the interval of the difference, paired by seed, lies on the claimed side of 0, is
refuted where it lies on the other, and is not shown where it holds 0. What a small network shows says little of a large one.

{table}
"""


def main() -> None:
    """Measure all claims and write the page."""
    torch.set_num_threads(1)
    project = find_project()
    spec = parse(ClaimsSpec, read_yaml(SPEC), SPEC.name)
    with tempfile.TemporaryDirectory() as folder:
        packed = {name: pack_here(dataset, project.root, Path(folder) / name) for name, dataset in spec.datasets.items()}
        verdicts = measure_claims(spec, Bench(packed, spec.protocol), _watch)
    table = claims_table(verdicts)
    print(table)
    (project.root / "docs" / "claims.md").write_text(PAGE.format(seeds=", ".join(map(str, spec.seeds)), table=table))


def _watch(found: Verdict) -> None:
    print(f"{found.claim.id}: {found.verdict}", flush=True)


if __name__ == "__main__":
    main()
