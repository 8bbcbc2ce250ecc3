"""DVC in a temporary checkout: dependencies of `prepare`, and packed data pushed from one clone and pulled into another."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import boto3
import psutil
import pytest
import yaml
from PIL import Image

from dml_core.data.registry import DATASETS
from dml_core.errors import DataError
from tasks import environment
from tasks.data import (
    _check_raw_files,
    changed_datasets,
    has_new_raw_files,
    prepare_dataset,
    read_dataset,
    run_dvc,
    unchanged_dataset,
    update_dataset,
)
from tasks.dvc_lock import add_seen, digests
from tasks.environment import find_project
from tasks.files import hash_of_states
from tasks.processes import kill_with_descendants
from tasks.runs.identity import source_files
from tasks.runs.params.file import load_params
from tasks.runs.replaced_data import use_packed
from tasks.runs.specs import DatasetSpec
from tests.conftest import ROOT
from tests.damage import flip
from tests.e2e.conftest import Project, make_project

# The raw tree of drawn images depends on the drawing and the layouts' readers, and is drawn again if one of them changes.
DRAWN = {
    "dml_core.data.drawing",
    "dml_core.data.drawing.creatures",
    "dml_core.data.drawing.glyphs",
    "dml_core.data.drawing.icons",
    "dml_core.data.drawing.layouts",
    "dml_core.extras",
    *(f"dml_core.data.readers.{name}" for name in ("cars196", "cub200", "inshop", "mnist", "sop")),
}
GENERATED = ("synthetic", "glyphs", "icons")
NOT_IN_THE_BYTES = {
    "dml_core.config",
    "dml_core.errors",
    "dml_core.data",
    "dml_core.data.readers",
}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, forked_stages: None) -> Project:
    """A checkout with `synthetic` prepared and committed."""
    project = make_project(tmp_path_factory.mktemp("first"), ("untrained",))
    shutil.rmtree(project.root / "flows")  # the installed `dml` refuses a project with a whole copy of its code
    project.run("dvc", "repro", "prepare@synthetic")
    project.commit("prepared")
    return project


def hashes(project: Project) -> dict[str, str]:
    """Return the hash of every file in data/packed, computed without DVC."""
    packed = project.root / "data/packed"
    files = [path for path in packed.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(packed).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_damaged_lock_file_is_refused_and_a_damaged_mark_counts_as_a_change(tmp_path: Path) -> None:
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    project = find_project(tmp_path)
    mark = project.state / "prepare/synthetic.unchanged.json"
    mark.parent.mkdir(parents=True)
    mark.write_bytes(b"\xff")
    assert unchanged_dataset(project, "synthetic") is None
    for damaged in ("half of a line", "stages: [prepare@synthetic]\n"):
        (tmp_path / "dvc.lock").write_text(damaged)
        with pytest.raises(DataError, match=r"dvc\.lock: cannot be parsed \(.*\); restore it: git checkout HEAD dvc\.lock"):
            update_dataset(project, "synthetic")


@pytest.mark.slow
def test_a_project_in_a_folder_with_braces_is_refused_before_dvc_fails_in_it(tmp_path: Path) -> None:
    """DVC formats the path of its cache as a template: `failed to reproduce 'prepare@synthetic': 'a'`."""
    root = tmp_path / "{a}"
    with pytest.raises(DataError, match=r"\{a\}: DVC fails in a folder whose path has braces; rename it$"):
        run_dvc(environment.Project(root, root / "state", "", ""), "status")


@pytest.mark.slow
def test_a_copy_of_the_project_without_hidden_folders_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"dvc status failed: .*not inside of a DVC repository.*; copy the hidden folder \.dvc of the repos"
    ):
        run_dvc(environment.Project(tmp_path, tmp_path / "state", "", ""), "status")


def test_what_dvc_has_started_ends_with_a_flow_that_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect cancels a flow by a signal to its process alone, whose handler raises an exception."""
    (tmp_path / ".git").mkdir()
    dvc, stage = tmp_path / "bin/dvc", tmp_path / "stage"
    dvc.parent.mkdir()
    dvc.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > '{stage}.new'\nmv '{stage}.new' '{stage}'\nwait\n")
    dvc.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dvc))
    project, caller = environment.Project(tmp_path, tmp_path / "state", "", ""), os.getpid()

    def cancel() -> None:
        while not stage.exists():
            time.sleep(0.01)
        os.kill(caller, signal.SIGUSR1)

    def cancelled(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, cancelled)
    try:
        threading.Thread(target=cancel).start()
        with pytest.raises(KeyboardInterrupt):
            run_dvc(project, "repro")
    finally:
        signal.signal(signal.SIGUSR1, before)
    number = int(stage.read_text())
    until = time.monotonic() + 60
    while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)
    with subprocess.Popen(["true"], text=True) as ended:  # of the same Ctrl-C
        ended.wait()
        kill_with_descendants(ended)


@pytest.mark.slow
def test_packed_data_with_a_flipped_byte_are_put_right_and_a_foreign_file_among_them_is_kept_and_reported(
    first: Project, tmp_path: Path
) -> None:
    project = environment.Project(first.root, tmp_path, str(tmp_path / "store"), "")
    whole, notes = hashes(first), first.root / "data/packed/synthetic/notes.txt"
    flip(notes.with_name("images.arrow"))
    notes.write_text("mine")
    with pytest.raises(DataError, match=r"holds 'notes\.txt', which dml data prepare did not write"):
        update_dataset(project, "synthetic")
    assert notes.read_text() == "mine"
    notes.unlink()
    assert hashes(first) != whole
    update_dataset(project, "synthetic")
    assert hashes(first) == whole


@pytest.mark.slow
@pytest.mark.proof
def test_a_flipped_bit_in_a_file_of_the_same_time_is_one_line(first: Project) -> None:
    """DVC rehashes a file only if its size, time or inode changed."""
    whole = hashes(first)
    path = first.root / "data/packed/synthetic/images.arrow"
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    code = "from tasks.data import *; from tasks.environment import find_project; update_dataset(find_project(), 'synthetic')"
    ran = subprocess.run(["python", "-c", code], cwd=first.root, env=first.environment, capture_output=True, text=True, check=False)
    assert "images.arrow: damaged (SHA-256 differs); run `dml data prepare` again" in ran.stderr
    first.run("dml", "data", "prepare", "synthetic")
    assert hashes(first) == whole


@pytest.mark.slow
def test_data_of_another_clone_are_pulled_from_s3_over_http_and_used_without_their_raw_files(
    first: Project, s3_server: str, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setitem(first.environment, name, os.environ[name])
    config = first.root / ".dvc/config"
    remote = f"['remote \"team\"']\n    url = s3://{s3_bucket}/dvc\n    endpointurl = {s3_server}\n"
    config.write_text(config.read_text().replace("remote = local", "remote = team") + remote)
    first.commit("the remote")
    first.run("dvc", "push")
    stored = boto3.client("s3").list_objects_v2(Bucket=s3_bucket, Prefix="dvc/")
    assert stored["KeyCount"] == 4, "three files and the list of them"
    folder = tmp_path / "second"
    subprocess.run(["git", "clone", "--quiet", str(first.root), str(folder)], check=True)
    second = replace(first, root=folder)
    assert hashes(second) == {}
    second.run("dvc", "pull", "prepare@synthetic")
    assert hashes(second) == hashes(first)
    assert {Path(name).name for name in hashes(second)} == {"images.arrow", "manifest.parquet", "dataset.json"}
    project = environment.Project(folder, tmp_path / "state", str(tmp_path / "store"), "")
    assert update_dataset(project, "synthetic").counts == {"train": 40, "test": 40}
    assert not (folder / "data/raw").exists()


@pytest.mark.slow
def test_a_dataset_has_changed_when_its_raw_files_or_settings_differ_from_what_was_packed(first: Project, tmp_path: Path) -> None:
    project = environment.Project(first.root, tmp_path, str(tmp_path / "store"), "")

    def changed() -> dict[str, bool]:
        return changed_datasets(project, load_params(project.params_file), ["synthetic", "fashion-mnist"])

    assert changed() == {}, "one is as it was packed, of the other there are no raw files here"
    raw = first.root / "data/raw/synthetic"
    one, other = sorted(path for path in raw.rglob("*") if path.suffix in (".png", ".jpg"))[:2]
    before = one.read_bytes()
    one.write_bytes(other.read_bytes())
    assert changed() == {"synthetic": False}
    one.write_bytes(before)
    assert changed() == {}
    code = first.root / "dml_core/data/prepare.py"
    source = code.read_text()
    code.write_text(f"{source}# edited\n")
    assert changed() == {"synthetic": True}, "only code differs"
    code.write_text(source)
    text = first.root.joinpath("params.yaml").read_text()
    first.change(datasets={"synthetic": {"options": {"num_modes": 1}}})
    assert changed() == {"synthetic": False}
    first.root.joinpath("params.yaml").write_text(text)


def draw_birds(folder: Path) -> Path:
    """Draw two images in each of four class folders, and one more beside the folder; return that one."""
    for number in range(9):
        path = folder / "abcd"[number % 4] / f"{number}.png" if number < 8 else folder.with_name("new.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (25 * number, 0, 0)).save(path)
    return path


def test_an_image_that_arrives_while_its_dataset_is_packed_fails_the_packing(tmp_path: Path) -> None:
    """DVC then records nothing, and packs again."""
    new = draw_birds(tmp_path / "birds")
    project = environment.Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), "")
    spec = DatasetSpec(reader="folder", raw="birds")
    with pytest.raises(DataError, match=r"/birds: files changed while they were packed; run the command again when all of them are there$"):
        prepare_dataset(project, "birds", spec, lambda done, total: shutil.copy(new, tmp_path / "birds/a"))
    packed = prepare_dataset(project, "birds", spec)
    assert packed.counts == {"train": 5, "test": 4}
    smaller = spec.model_copy(update={"options": {"stored_size": 8}})
    with pytest.raises(DataError, match="files changed while they were packed"):
        prepare_dataset(project, "birds", smaller, lambda *_: new.rename(tmp_path / "birds/b/x"))
    assert read_dataset(project, "birds") == packed


def test_images_that_a_flow_uses_are_not_replaced_by_others(tmp_path: Path) -> None:
    """Its trainings would be discarded, with their checkpoints."""
    new = draw_birds(tmp_path / "birds")
    project = environment.Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), "")
    spec, smaller = DatasetSpec(reader="folder", raw="birds"), DatasetSpec(reader="folder", raw="birds", options={"stored_size": 8})
    packed = prepare_dataset(project, "birds", spec)
    flow = use_packed(project, "birds")
    refused = rf"^birds: in use by process {os.getpid()}, whose runs would be lost if other images replaced these; run this again when"
    assert prepare_dataset(project, "birds", spec) == packed, "the same images"
    flip(project.packed("birds") / "images.arrow")
    assert prepare_dataset(project, "birds", spec) == packed, "damaged ones are put right"
    with pytest.raises(DataError, match=refused):
        prepare_dataset(project, "birds", smaller)
    (tmp_path / "birds/.DS_Store").write_bytes(b"of a viewer")
    assert prepare_dataset(project, "birds", spec) == packed, "the same images"
    first = tmp_path / "birds/a/0.png"
    before = first.read_bytes()
    Image.new("RGB", (16, 16), (0, 0, 9)).save(first)
    with pytest.raises(DataError, match=refused):
        prepare_dataset(project, "birds", spec)
    assert (tmp_path / "data/packed/.birds.partial/images.arrow").is_file(), "hours of decoding, which the next attempt need not repeat"
    first.write_bytes(before)
    new.rename(tmp_path / "birds/a/new.png")
    for other in (spec, smaller):
        with pytest.raises(DataError, match=refused):
            prepare_dataset(project, "birds", other, lambda *_: pytest.fail("packs for hours what it then refuses"))
    assert read_dataset(project, "birds") == packed
    flow.release(remove=True)
    assert prepare_dataset(project, "birds", spec).counts == {"train": 5, "test": 4}
    assert sorted(path.name for path in (tmp_path / "data/packed").iterdir()) == [".birds.users", "birds"], "and none is left"


def test_raw_files_are_new_where_a_link_leads_to_another_folder_now(tmp_path: Path) -> None:
    """Also to one that is older than what was packed."""
    deliveries = [tmp_path / name for name in ("january", "february")]
    for folder in deliveries:
        draw_birds(folder)
    project = environment.Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), "")
    spec, mark = DatasetSpec(reader="folder", raw="raw/birds"), project.state / "prepare/birds.unchanged.json"
    link = tmp_path / "raw/birds"
    link.parent.mkdir()
    link.symlink_to(deliveries[0])
    prepare_dataset(project, "birds", spec)
    mark.write_text("{}")
    add_seen(project, "birds", hash_of_states([link]))
    assert not has_new_raw_files(project, "birds", spec)
    with pytest.raises(DataError, match=r"^birds: dvc\.lock records other images than those in"):
        _check_raw_files(project, "birds", spec)
    time.sleep(0.05)  # file systems have ticks of some milliseconds
    link.unlink()
    link.symlink_to(deliveries[1])
    assert has_new_raw_files(project, "birds", spec)
    _check_raw_files(project, "birds", spec)
    assert not has_new_raw_files(project, "birds", spec.model_copy(update={"raw": "january"})), "no link"


def test_classes_that_a_new_class_moves_between_train_and_test_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first half of the names trains: a champion of before would be scored on a class of its training, `b`."""
    draw_birds(tmp_path / "birds")
    project = environment.Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), "")
    spec = DatasetSpec(reader="folder", raw="birds")
    prepare_dataset(project, "birds", spec)
    prepare_dataset(project, "birds", spec)
    (tmp_path / "birds/aa").mkdir()
    for number in range(2):
        Image.new("RGB", (16, 16), (0, 99, number)).save(tmp_path / f"birds/aa/{number}.png")
    prepare_dataset(project, "birds", spec)
    (tmp_path / "birds/aa").rename(tmp_path / "birds/e")
    prepare_dataset(project, "birds", spec)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("birds: 1 class changed role: b train -> test; networks that were trained before may be scored on classes that")
    assert second.startswith("birds: 1 class changed role: b test -> train; ")


@pytest.mark.slow
def test_an_image_that_arrives_before_dvcs_record_is_packed_and_another_machine_s_update_in_the_lock_is_not_undone(
    first: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """DVC records the folder as it is after the stage, with the image, and calls what was packed without it up to date."""
    root = first.root
    project = environment.Project(root, root / "state", str(root / "state/store"), "")
    new, lock = draw_birds(root / "birds"), root / "dvc.lock"
    texts = {name: (root / name).read_text() for name in ("params.yaml", "dvc.yaml", "dvc.lock")}
    first.change(datasets={"birds": {"reader": "folder", "raw": "birds"}})
    command = "cmd: dml data prepare ${key}"
    arrival = f"{command} && mv {new.name} birds/a"
    (root / "dvc.yaml").write_text(texts["dvc.yaml"].replace(command, arrival))
    run_dvc(project, "repro", "prepare@birds")
    (root / "dvc.yaml").write_text(texts["dvc.yaml"])
    lock.write_text(lock.read_text().replace(f"dml data prepare birds && mv {new.name} birds/a", "dml data prepare birds"))
    assert changed_datasets(project, load_params(project.params_file), ["birds"]) == {"birds": False}
    assert update_dataset(project, "birds").counts == {"train": 5, "test": 4}
    assert unchanged_dataset(project, "birds") is not None
    assert changed_datasets(project, load_params(project.params_file), ["birds"]) == {}
    caplog.clear()
    recorded, mine, packed = lock.read_text(), digests(project, "birds"), hashes(first)
    assert None not in mine
    alike = recorded.replace(str(mine[0]), f"{'0' * 32}.dir")  # as with another machine's .DS_Store
    updated = recorded.replace(str(mine[0]), f"{'1' * 32}.dir").replace(str(mine[1]), f"{'2' * 32}.dir")
    lock.write_text(alike)
    update_dataset(project, "birds")
    assert digests(project, "birds") == mine
    lock.write_text(updated)
    with pytest.raises(
        DataError, match=r"^birds: dvc\.lock records other images than those in \S+/birds, which is as it was packed here: "
    ):
        update_dataset(project, "birds")
    assert (lock.read_text(), hashes(first)) == (updated, packed)
    assert caplog.records == []
    (root / "birds/d").rename(root / "birds/aa")
    update_dataset(project, "birds")  # these are not the former images
    moved, other = (record.getMessage() for record in caplog.records)
    assert moved.partition(";")[0] == "birds: 1 class changed role: b train -> test"
    assert other == "birds: dvc.lock recorded other packed images; it now records these: see git diff dvc.lock"
    caplog.clear()
    present, dvc_s = digests(project, "birds"), lock.read_text()
    (root / "birds/aa/notes.txt").write_text("a change on this machine")
    monkeypatch.setattr("tasks.data.run_dvc", lambda *_: lock.write_text(dvc_s.replace(str(present[1]), f"{'3' * 32}.dir")))
    update_dataset(project, "birds")
    assert digests(project, "birds")[1] != present[1]
    assert caplog.records == [], "what changes here is no news"
    for name, text in texts.items():
        (root / name).write_text(text)
    for folder in (root / "birds", project.packed("birds")):
        shutil.rmtree(folder)


@pytest.mark.slow
def test_a_dataset_that_a_comparison_of_dvc_reads_can_be_used_if_it_has_not_changed(first: Project, tmp_path: Path) -> None:
    """DVC lets nobody reproduce it meanwhile: this process stands for `dvc repro comparison@synthetic`."""
    project = environment.Project(first.root, tmp_path, str(tmp_path / "store"), "")
    lock, process = first.root / ".dvc/tmp/rwlock", {"pid": os.getpid(), "cmd": "dvc repro comparison@synthetic"}
    lock.write_text(json.dumps({"read": {str(project.packed("synthetic")): [process]}}))
    text, raw = first.root.joinpath("params.yaml").read_text(), first.root / "data/raw/synthetic"
    assert update_dataset(project, "synthetic").counts == {"train": 40, "test": 40}
    shutil.copytree(raw, tmp_path / "raw")
    first.change(datasets={"synthetic": {"options": {"num_modes": 1}}})
    with pytest.raises(DataError, match=rf"synthetic' is busy, [^\n]+: \(PID {os.getpid()}\): dvc repro comparison@synthetic$"):
        update_dataset(project, "synthetic")
    first.root.joinpath("params.yaml").write_text(text)
    lock.unlink()
    shutil.rmtree(raw)
    shutil.copytree(tmp_path / "raw", raw)  # those of the changed options were drawn


def test_no_stage_loses_its_outputs_when_it_begins() -> None:
    """DVC removes others before a stage's command, so that an interrupted `make results` would leave no results."""
    for name, stage in yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].items():
        for out in stage["do"]["outs"]:
            assert [options.get("persist") for options in out.values()] == [True], (name, out)


@pytest.mark.slow
def test_prepare_watches_its_own_module_and_not_the_other_datasets(first: Project) -> None:
    def edited(module: str) -> str:
        with (first.root / f"dml_core/data/readers/{module}.py").open("a") as file:
            file.write("\n# an edit\n")
        return first.run("dvc", "status", "prepare@synthetic")

    assert "up to date" in edited("cars196")
    assert "dml_core/data/readers/synthetic.py" in edited("synthetic")


@pytest.mark.parametrize("name", DATASETS)
def test_prepare_watches_all_that_decides_the_bytes(name: str) -> None:
    prepare = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]["prepare"]["do"]
    watched = {dep.replace("${item.reader}", name) for dep in prepare["deps"]}
    reader = f"dml_core.data.readers.{name}"
    used = set(source_files(["dml_core.data.prepare", reader])) - NOT_IN_THE_BYTES - (DRAWN if name in GENERATED else set())
    assert reader in used
    files = {path.relative_to(ROOT) for module, path in source_files(used).items() if module in used}
    assert {str(file) for file in files if not any(Path(dep) in (file, *file.parents) for dep in watched)} == set()


@pytest.mark.slow
def test_dvc_starts_only_if_something_has_changed_that_it_looks_at(first: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = first.root
    monkeypatch.delenv("DVC_STAGE", raising=False)
    project = environment.Project(root, tmp_path, str(tmp_path / "store"), "")
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr("tasks.data.run_dvc", lambda project, *arguments: started.append(arguments))

    def starts() -> int:
        before = len(started)
        update_dataset(project, "synthetic")
        return len(started) - before

    def touch(path: Path) -> None:
        path.write_bytes(path.read_bytes())

    raw, packed = root / "data/raw/synthetic", root / "data/packed/synthetic"
    image = next(path for path in sorted(raw.rglob("*")) if path.suffix in (".png", ".jpg"))
    texts = {name: (root / name).read_text() for name in ("params.yaml", "dvc.yaml", "dvc.lock")}
    settings = texts["params.yaml"]
    changes: dict[str, Callable[[], object]] = {
        "an image of the same size": lambda: touch(image),
        "a new file": lambda: (raw / "new.txt").write_text("new"),
        "a file that is gone": lambda: (raw / "new.txt").unlink(),
        "a renamed file": lambda: image.rename(image.with_stem("renamed")),
        "its old name": lambda: image.with_stem("renamed").rename(image),
        "a packed file": lambda: touch(packed / "manifest.parquet"),
        "the reader": lambda: touch(root / "dml_core/data/readers/synthetic.py"),
        "the drawing": lambda: touch(root / "dml_core/data/drawing/creatures.py"),
        "the store": lambda: touch(root / "dml_core/data/store/info.py"),
        "a setting": lambda: first.change(datasets={"synthetic": {"options": {"num_modes": 1}}}),
        "the old setting": lambda: (root / "params.yaml").write_text(settings),
        "a stage": lambda: (root / "dvc.yaml").write_text((root / "dvc.yaml").read_text() + "# new\n"),
        "dvc.lock": lambda: (root / "dvc.lock").write_text((root / "dvc.lock").read_text().replace("nfiles: 3", "nfiles: 4")),
    }
    assert [starts(), starts()] == [1, 0], "without a mark; with one"
    for name, change in changes.items():
        change()
        assert [starts(), starts()] == [1, 0], name
    (root / "params.yaml").write_text(settings + "# another dataset's settings, or a comparison's\n")
    assert starts() == 0
    touch(image)
    monkeypatch.setattr("tasks.data.run_dvc", lambda project, *arguments: (started.append(arguments), touch(image)))
    assert [starts(), starts()] == [1, 1], "an image that changes while DVC runs leaves no mark"
    (root / "dvc.lock").unlink()
    assert [starts(), starts()] == [1, 1]
    for name, text in texts.items():
        (root / name).write_text(text)


@pytest.mark.slow
def test_a_lock_that_is_a_link_into_an_empty_volume_is_written_there(
    first: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the image, where the project has no .git and cannot be written, but its state is a volume."""
    folder = tmp_path / "project"
    shutil.copytree(first.root, folder, ignore=shutil.ignore_patterns(".git", "state", "dvc.lock"))
    shutil.rmtree(folder / "data")
    (folder / "dvc.lock").symlink_to("state/dvc.lock")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("SHELL")  # the stage runs the `dml` that is installed
    update_dataset(find_project(), "synthetic")
    assert "prepare@synthetic" in (folder / "state" / "dvc.lock").read_text()
    assert (folder / "dvc.lock").is_symlink()
