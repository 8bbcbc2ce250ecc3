"""Disk and memory in a plan: from published sizes and the files in the raw folder, with a remedy for a shortage."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dml_core.data.registry import materialise
from flows.cli import main
from tasks.environment import Project
from tasks.plans.known_memory import Memory
from tasks.plans.plan import plan_tables
from tasks.plans.resources import DiskNeed, Resources, dataset_disk, resources_of
from tasks.tables.choice import Choice
from tasks.workers.placement import Placement
from tests.tasks.plans.conftest import DRAWN, look

CUB_ARCHIVE = 1_150_585_339
MB = 10**6


def test_a_dataset_takes_its_archive_and_its_images_three_times(tmp_path: Path) -> None:
    assert dataset_disk("cub200", None) == DiskNeed("cub200 as archive, unpacked, packed, and DVC's copy", 4 * CUB_ARCHIVE)
    assert dataset_disk("sop", None) == DiskNeed("sop as archive, unpacked, packed, and DVC's copy", None)
    assert dataset_disk("folder", tmp_path) is None
    (tmp_path / "CUB_200_2011.tgz").write_bytes(bytes(5000))
    assert dataset_disk("cub200", tmp_path) == DiskNeed("cub200 unpacked, packed, and DVC's copy", 15_000)
    materialise("synthetic", DRAWN, tmp_path / "drawn")
    size = sum(path.stat().st_size for path in (tmp_path / "drawn").rglob("*") if path.is_file())
    assert dataset_disk("cub200", tmp_path) == DiskNeed("cub200 packed, and DVC's copy", 2 * size)


def test_a_plan_of_a_table_counts_each_run_and_each_dataset_once(project: Project) -> None:
    here = look(project)
    one, five = (resources_of(here, plan_tables(here, ["softtriple/table1"], Choice(seeds=seeds))) for seeds in ((0,), (0, 1, 2, 3, 4)))
    assert [need.what for need in one.disk] == ["2 trained networks with embeddings"], "cub200 is prepared"
    assert five.disk == (DiskNeed("10 trained networks with embeddings", 5 * (one.disk[0].num_bytes or 0)),)
    assert one.memory == five.memory
    assert one.memory is not None
    assert one.memory.num_images == 12, "the drawn dataset has no more, the batch would be 32"
    others = resources_of(here, plan_tables(here, ["softtriple/table3", "softtriple/table4", "softtriple/table5"], Choice()))
    assert [need.what for need in others.disk[:-1]] == [
        "cars196 as archive, unpacked, packed, and DVC's copy",
        "sop as archive, unpacked, packed, and DVC's copy",
    ]
    assert others.memory is not None
    assert others.memory.num_images == 32
    assert others.memory_of == "bn_inception, 32 images of 224 pixels at a time"


@pytest.mark.parametrize(
    ("runs_per_gpu", "num_groups", "memory"), [(1, 1, 80 * 10**9), (1, 2, 80 * 10**9), (8, 8, 10**10), (8, 16, 10**10), (8, 2, 40 * 10**9)]
)
def test_runs_that_share_a_gpu_divide_its_memory(
    runs_per_gpu: int, num_groups: int, memory: int, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = look(project)
    vars(here)["placement"] = Placement("cuda", 1, num_groups, runs_per_gpu=runs_per_gpu)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 10**9))
    assert resources_of(here, plan_tables(here, ["softtriple/table1"], Choice(seeds=(0,)))).memory_here == memory


def test_what_is_said_and_what_to_do_where_it_is_short() -> None:
    memory = Memory(32, weights=41 * MB, gradients=41 * MB, optimiser=82 * MB, activations=1400 * MB, trained=369 * MB, embedding_dim=64)
    disk = (DiskNeed("cub200 packed", 1_200_000_000), DiskNeed("sop as archive, unpacked and packed", None))
    enough = Resources(disk, 10**12, memory, "bn_inception, 32 images of 224 pixels at a time", 8 * 10**9, "cuda").lines()
    assert enough == [
        "disk: about 1.2 GB (cub200 packed 1.2 GB); 1000.0 GB are free",
        "disk: unknown for sop as archive, unpacked and packed: the publisher states no size",
        "GPU memory: about 1.6 GB in addition to the libraries' own (bn_inception, 32 images of 224 pixels at a time: "
        "activations 1.4 GB, weights 41 MB, gradients and optimiser 123 MB)",
    ]
    short = Resources(disk[:1], 10**9, memory, "x", 10**9, "cuda").lines()
    assert [line.partition(",")[0] for line in short if "not enough" in line or "only" in line] == [
        "disk: not enough space: choose another disk (raw in params.yaml",
        "GPU memory: only 1.0 GB available for each run: split each batch over more workers (scale: {num_workers: 2",
    ]
    assert Resources((), 1, None, "", None, "cpu").lines() == []


def test_dml_plan_prints_it(project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["dml", "plan", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    printed = plan("softtriple/table5")
    assert "disk: unknown for sop as archive, unpacked, packed, and DVC's copy: the publisher states no size\n" in printed
    assert "memory: about " in printed
    found = json.loads(plan("softtriple/table5", "--json"))
    assert found["disk_unknown"] == ["sop as archive, unpacked, packed, and DVC's copy"]
    assert found["memory_bytes"] > 10**9


def test_a_plan_for_a_cluster_names_it_and_compares_no_memory_with_this_machine(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.plans.resources.memory_bytes", lambda: MB)
    for address, is_cluster in (("local", False), ("10.0.0.1:6379", True)):
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(sys, "argv", ["dml", "plan", "softtriple/table5"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        printed = capsys.readouterr()
        assert ("memory: only " in printed.out) != is_cluster
        assert "memory: about " in printed.out
        assert (f"note: planned for this machine, not for the Ray cluster at {address}\n" in printed.err) == is_cluster


def test_a_finished_run_leaves_its_checkpoint_twice_its_network_and_its_embeddings_twice(project: Project) -> None:
    """12 test images have 64 numbers each; the store and MLflow keep checkpoint and embeddings, MLflow also the network."""
    found = resources_of(look(project), plan_tables(look(project), ["softtriple/table1"], Choice(rows=("softtriple",))))
    assert found.memory is not None
    weights, optimiser = found.memory.weights, found.memory.optimiser
    assert [need.num_bytes for need in found.disk] == [3 * weights + 2 * optimiser + 2 * 12 * 64 * 4]


def test_another_epoch_of_a_training_writes_its_own_embeddings_and_its_own_run_in_mlflow(project: Project) -> None:
    here, epochs = look(project), (("last", "oracle"), ("last",))
    plans = (plan_tables(here, ["softtriple/table1"], Choice(rows=("softtriple",), epochs=of_plan)) for of_plan in epochs)
    both, last = (resources_of(here, plan) for plan in plans)
    assert both.memory is not None
    weights, optimiser = both.memory.weights, both.memory.optimiser
    assert both.disk_bytes - last.disk_bytes == 2 * weights + optimiser + 2 * 12 * 64 * 4
