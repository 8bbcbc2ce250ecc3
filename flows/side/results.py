"""`dml results`: train every row of `flows/tables/fashion_mnist.yaml`, one process a core, and write `docs/results.md`."""

import os
import platform
import tempfile
from pathlib import Path

import torch

from dml_core.config import parse, read_yaml
from tasks.environment import find_project, git_tags
from tasks.side.local_runs import pack_here
from tasks.side.results import ResultsSpec, against_untrained, measure, table

SPEC = Path(__file__).parents[1] / "tables" / "fashion_mnist.yaml"
PAGE = """# Results on a CPU

Made by `dml results` from `flows/tables/fashion_mnist.yaml`; do not edit. Commit {commit}, torch {torch}, {processor}.

Fashion-MNIST, {counts}: train classes 0 to 4, test classes 5 to 9, never seen in training. Every row has the same small network, images,
batches, augmentation, optimiser and {epochs} epochs; only the loss differs, and the head where a loss is defined on its own. Per cent over
seeds {seeds}: mean and half the 95 % interval (Student's t, so wide for few seeds). `untrained` is the same network, pooling and head with
the random weights that the rows with that head start from, its BatchNorm averages those of the training images.

{chosen}

A twin is pytorch-metric-learning's implementation of the same loss, trained by the same loop from the same seeds. Within noise: 0 lies
in the 95 % interval of the difference, paired by seed.

{table}

{against_untrained}
"""


def main() -> None:
    """Run everything and write the page."""
    project = find_project()
    spec = parse(ResultsSpec, read_yaml(SPEC), SPEC.name)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(spec, pack_here(spec.dataset, project.root, Path(folder) / "packed"), lambda line: print(line, flush=True))
    page = PAGE.format(
        commit=git_tags(project)["git_commit"][:12],
        torch=torch.__version__,
        processor=f"{platform.machine()}, {os.cpu_count()} cores",
        counts=f"{spec.dataset.options['images_per_class']} images of each class",
        epochs=spec.protocol["num_epochs"],
        seeds=", ".join(map(str, spec.seeds)),
        chosen=spec.chosen.strip(),
        table=table(spec, found),
        against_untrained=against_untrained(spec, found),
    )
    (project.root / "docs" / "results.md").write_text(page)


if __name__ == "__main__":
    main()
