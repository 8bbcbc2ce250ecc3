"""`dml claims`: measure every claim of `flows/tables/claims.yaml`, one process a core, print the table and write `docs/claims.md`."""

import tempfile
from pathlib import Path

from dml_core.config import parse, read_yaml
from tasks.environment import find_project
from tasks.side.claims import Bench, ClaimsSpec, claims_history, claims_table, measure_claims
from tasks.side.local_runs import pack_here

SPEC = Path(__file__).parents[1] / "tables" / "claims.yaml"
PAGE = """# The papers' claims, measured here

Made by `dml claims` from `flows/tables/claims.yaml`; do not edit. A small network on drawn images and on Fashion-MNIST, seeds {seeds};
mean and half the 95 % interval. A claim holds where the interval of the difference, paired by seed, lies on the claimed side of 0, is
refuted where it lies on the other, and is not shown where it holds 0. What a small network shows says little of a large one.

{table}

## History

What was changed after a first look, and what that look had shown. Nothing was changed after the second, which is the table above.

{history}
"""


def main() -> None:
    """Measure all claims and write the page."""
    project = find_project()
    spec = parse(ClaimsSpec, read_yaml(SPEC), SPEC.name)
    with tempfile.TemporaryDirectory() as folder:
        packed = {name: pack_here(dataset, project.root, Path(folder) / name) for name, dataset in spec.datasets.items()}
        verdicts = measure_claims(spec, Bench(packed, spec.protocol), lambda line: print(line, flush=True))
    table = claims_table(verdicts)
    print(table)
    page = PAGE.format(seeds=", ".join(map(str, spec.seeds)), table=table, history=claims_history(spec))
    (project.root / "docs" / "claims.md").write_text(page)


if __name__ == "__main__":
    main()
