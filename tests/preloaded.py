"""What forked processes need, imported once before any of them is forked, and left out of every later search for garbage.

Importing this takes a process 8 seconds, and a search for garbage through all of it, which copies its memory, half a second.
"""

import gc
from importlib import import_module

from flows.cli.app import VERBS

gc.disable()
for _module in (
    "flows.cli.exits", *(f"flows.cli.{module}" for module, _ in VERBS.values()), "torch", "torch._dynamo", "torch.distributed", "faiss",
    "plotly", "pyarrow.parquet", "dml_core.data.prepare", "dml_core.evaluation", "dml_core.index.writing", "dml_core.losses.discriminative",
    "dml_core.losses.pml", "dml_core.training.loop", "tasks.data", "tasks.gc", "tasks.plans.plan", "tasks.reports.run_pages",
    "tasks.reports.table_pages", "tasks.scores.scoring", "tasks.models.embed", "tasks.models.export", "tasks.models.indexing",
    "tasks.models.searching", "boto3", "tests.conftest",
):  # fmt: skip
    import_module(_module)
gc.freeze()
gc.enable()
