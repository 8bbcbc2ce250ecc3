"""Checkpoints are verified before training resumes: in one process, and with two workers that have different folders."""

import io
import os
import resource
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dml_core.data.store.packed import PackedDataset
from dml_core.errors import StoreError
from dml_core.training.checkpoints.file import CHECKPOINT_FILE, load_checkpoint, save_checkpoint
from dml_core.training.history import HISTORY_FILE, Progress
from dml_core.training.loop import fit
from dml_core.training.parallel.workers import state_from_rank_zero
from tests.conftest import small_training
from tests.damage import DAMAGE, contents, flip
from tests.forked import forked, forked_on_small_disk
from tests.training.stopping import StoppedError, stop_after
from tests.workers import spawn

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
CONFIG = small_training("softtriple", num_epochs=2, optimiser={"name": "adam", "momentum": 0.0})


def train(packed: Path, folder: Path, report=lambda progress: None, identity: str = "a run") -> None:
    fit(CONFIG, PackedDataset(packed, "train"), 0, folder, CPU, report=report, identity=identity)


@pytest.fixture(scope="module")
def undisturbed(one_thread: None, packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(packed, folder)
    return folder


@pytest.fixture(scope="module")
def unfinished(one_thread: None, packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unfinished")
    with pytest.raises(StoppedError):
        train(packed, folder, stop_after(1))
    return folder


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", [CHECKPOINT_FILE, HISTORY_FILE])
@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_whatever_is_damaged_the_run_ends_with_the_same_bytes(
    packed: Path, undisturbed: Path, unfinished: Path, tmp_path: Path, how: str, name: str, state: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed if state == "finished" else unfinished, folder)
    DAMAGE[how](folder / name)
    messages: list[Progress] = []
    train(packed, folder, messages.append)
    assert contents(folder) == contents(undisturbed)
    begun_anew = name == CHECKPOINT_FILE
    assert len([m for m in messages if m.epoch_ended]) == (2 if begun_anew else int(state == "unfinished"))
    notes = [message.note for message in messages if message.note]
    assert len(notes) == (begun_anew and how != "remove")
    assert (folder / ".checkpoint.pt.damaged-1").exists() == bool(notes)
    assert all(str(folder / CHECKPOINT_FILE) in note and "initial weights" in note and "\n" not in note for note in notes)


def test_every_byte_of_the_file_is_proven(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, {"identity": "x", "tensor": torch.arange(5.0)})
    whole = path.read_bytes()
    assert zipfile.ZipFile(io.BytesIO(whole)).comment.startswith(b"sha256:")
    assert torch.equal(torch.load(path)["tensor"], torch.arange(5.0))  # readable as any other file of torch.save
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(StoreError, match="damaged"):
            load_checkpoint(tmp_path)


def test_another_run_s_whole_checkpoint_is_not_gone_on_from(packed: Path, undisturbed: Path, tmp_path: Path) -> None:
    fit(CONFIG, PackedDataset(packed, "train"), 1, tmp_path, CPU, identity="the run of seed 1")
    notes: list[str] = []
    train(packed, tmp_path, lambda message: notes.append(message.note) if message.note else None)
    assert contents(tmp_path) == contents(undisturbed)
    assert len(notes) == 1
    assert "another run's (the run of seed 1)" in notes[0]


def test_a_checkpoint_that_cannot_be_opened_is_kept_and_named(packed: Path, tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT_FILE).mkdir()
    with pytest.raises(StoreError, match=rf"{CHECKPOINT_FILE}: the checkpoint cannot be read"):
        train(packed, tmp_path)


def load_and_measure(folder: Path) -> None:
    """Write by how many bytes the peak memory of this process grows, and the sum of the loaded tensor."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = load_checkpoint(folder)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert state is not None
    (folder / "measured").write_text(f"{grown} {int(state['tensor'].sum())}")


def test_loading_takes_memory_for_the_weights_alone(tmp_path: Path) -> None:
    num_bytes = 4 * 2**25
    save_checkpoint(tmp_path, {"identity": "x", "tensor": torch.ones(num_bytes // 4)})
    assert forked(load_and_measure, tmp_path) == 0
    grown, total = map(int, (tmp_path / "measured").read_text().split())
    assert total == num_bytes // 4
    assert 0.9 * num_bytes < grown < 1.3 * num_bytes


def layouts(random: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of several shapes in every layout, and some views of others."""
    for shape in [(2, 3, 4, 5), (4, 3, 1, 1), (1, 3, 4, 4), (4, 1, 3, 3), (1, 1, 1, 1), (0, 3, 1, 1)]:
        tensor = torch.randn(*shape, generator=random)
        for layout in (torch.contiguous_format, torch.channels_last):
            yield f"{shape} {layout}", tensor.clone(memory_format=layout)
    yield "scalar", torch.tensor(2.5)
    yield "transposed", torch.randn(3, 4, generator=random).T
    yield "every other", torch.randn(6, generator=random)[::2]
    yield "expanded", torch.randn(1, 4, generator=random).expand(3, 4)


def share_state(rank: int, folder: Path) -> None:
    """Check that every worker receives rank 0's state, but of "spread" keeps only its own row."""
    random = torch.Generator().manual_seed(0)
    state = {
        "identity": "x",
        "rates": [1.0, 0.5],
        "system": {
            "spread": torch.randn(2, 3, generator=random),
            "half": torch.randn(5, generator=random).bfloat16(),
            "flags": torch.tensor([True, False]),
            **dict(layouts(random)),
        },
        "optimiser": {"state": {0: {"step": torch.tensor(3.0), "momentum_buffer": None}}, "param_groups": [{"betas": (0.9, 0.99)}]},
        "averaged": None,
        "under_way": {"rows": [], "negatives": torch.empty(0, 2, dtype=torch.int64)},
    }
    kept = lambda path, whole: whole[rank : rank + 1].clone() if path == ("system", "spread") else whole  # noqa: E731
    received = state_from_rank_zero(state if rank == 0 else None, CPU, kept)
    expected = state | {"system": state["system"] | {"spread": state["system"]["spread"][rank : rank + 1]}}
    assert str(received) == str(expected)
    for name, value in expected["system"].items():
        assert torch.equal(received["system"][name], value), name
        assert received["system"][name].dtype == value.dtype
        if name.startswith("("):
            assert received["system"][name].stride() == value.stride(), name
    (folder / str(rank)).touch()


@pytest.mark.slow
def test_every_worker_receives_rank_0_s_state_and_keeps_its_part(tmp_path: Path) -> None:
    spawn(share_state, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


CASES = {"rank 0 has a damaged one": "rank0", "rank 1 has a damaged one": "rank1", "rank 1 has none": None}


def train_beside(rank: int, packed: Path, folder: Path) -> None:
    """Train an undisturbed run, then each case from a copy of it; each rank has its own folder, as on machines with local caches."""
    train(packed, folder / "undisturbed" / f"rank{rank}")
    for case, damaged in CASES.items():
        dist.barrier()
        mine = folder / case / f"rank{rank}"
        if rank == 0 or damaged is not None:
            shutil.copytree(folder / "undisturbed/rank0", mine)
        if damaged == mine.name:
            flip(mine / CHECKPOINT_FILE)
        train(packed, mine)


@pytest.mark.slow
def test_two_workers_go_on_from_what_rank_0_read_whatever_is_in_the_other_s_folder(packed: Path, tmp_path: Path) -> None:
    spawn(train_beside, 2, packed, tmp_path)
    expected = contents(tmp_path / "undisturbed/rank0")
    assert set(expected) == {CHECKPOINT_FILE, HISTORY_FILE}
    for case, damaged in CASES.items():
        assert contents(tmp_path / case / "rank0") == expected, case
        assert (tmp_path / case / "rank0" / ".checkpoint.pt.damaged-1").exists() == (damaged == "rank0")


def test_a_checkpoint_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    """The mode is that of a run's other files, so that other users of the machine can read the models."""
    before = os.umask(0o022)
    try:
        path = save_checkpoint(tmp_path, {"epoch": 1})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


def fill_the_disk(folder: Path) -> None:
    with pytest.raises(StoreError, match=r"the checkpoint cannot be written \(.*File too large\); free or change the store"):
        save_checkpoint(folder, {"weights": torch.zeros(200_000)})


def test_a_disk_that_is_full_is_named_and_the_earlier_checkpoint_stays(tmp_path: Path) -> None:
    before = save_checkpoint(tmp_path, {"epoch": 1}).read_bytes()
    assert forked_on_small_disk(200_000, fill_the_disk, tmp_path) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {CHECKPOINT_FILE: before}
