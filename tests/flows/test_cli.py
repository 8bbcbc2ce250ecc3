"""The `dml` command from the user's side: help, and a clear one-line error with exit code 2 for each mistake.

Most commands run in forked processes, which start faster; `new_process` runs one as a shell does.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet
from typer.testing import CliRunner

from dml_core.config import merge, read_yaml
from dml_core.errors import ConfigError, EvaluationError
from flows.cli.app import app
from tasks.runs.embeddings import SINGLE_FILES
from tasks.runs.tuned import STANDING
from tasks.tables.file import table_names
from tests import forked
from tests.conftest import ROOT


def new_process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def dml(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return forked.dml(arguments, cwd, **environment)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


def change(project: Path, **changes: object) -> None:
    path = project / "params.yaml"
    path.write_text(yaml.safe_dump(merge(read_yaml(path), changes)))


def refused(shown: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert shown.returncode == 2, shown.stderr
    lines = shown.stderr.strip().splitlines()
    assert len(lines) == 1, shown.stderr
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]


def test_the_version() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.stdout.strip()) == (0, f"dml-repro {version('dml-repro')}")


def test_completion_offers_the_verbs() -> None:
    environment = {"_DML_COMPLETE": "complete_bash", "COMP_WORDS": "dml comp", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], env=environment, prog_name="dml").stdout.split() == ["compare"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["reproduc"], ["No such command 'reproduc'. Did you mean 'reproduce'? See "]),
        (["data", "lst"], ["Did you mean 'list'?"]),
        (["models", "export", "a/b"], ["Missing option '--output' / '-o'. See ", " models export --help"]),
        (["models", "export", "a/b", "-o", "x", "--format", "onx"], ["'--format': 'onx' is not one of 'onnx', 'torch-export'. See "]),
        (["plan", "softtriple/table1", "--track", "comon"], ["'--track': 'comon' is not one of 'paper', 'common'."]),
        (["plan", "--colour"], ["--colour"]),
        (["tables", "show"], ["Missing argument"]),
        (["gc", "--days", "one"], ["--days", "valid number"]),
        (["gc", "--delete", "--days", "-1"], ["--days", "greater than or equal to 0"]),
        (["gc", "--delete", "--days", "nan"], ["--days", "greater than or equal to 0"]),
        (["run", "synthetic", "softtriple", "--seed", "0", "-s", "1"], ["--seed is given 2 times, and takes one value. See "]),
        (["run", "synthetic", "softtriple", "--force", "--code", "keep"], ["--force runs every step again, and --code keep"]),
        (["reproduce", "--force", "--code", "keep"], ["--force runs every step again, and --code keep"]),
        (["models", "exprot", "a/b", "-o", "x"], ["'exprot' is no verb of", "; did you mean 'export'?"]),
        (["models", "promot"], ["unknown dataset of the comparison 'promot'", "; did you mean 'promote'?"]),
        (["index", "ad", "my.index", "images"], ["Missing option '--output'", "; did you mean 'add'?"]),
    ],
)
def test_wrong_words_are_one_line(words: list[str], parts: list[str], project: Path) -> None:
    refused(dml(*words, cwd=project), *parts)


def test_a_command_without_a_verb_prints_the_help(project: Path) -> None:
    for words in ([], ["data"]):
        shown = dml(*words, cwd=project)
        assert (shown.returncode, shown.stdout) == (2, "")
        assert "Usage: " in shown.stderr


def test_a_forked_command_prints_what_a_new_process_prints(project: Path) -> None:
    for words in (["run", "synthetic", "none"], ["--version"]):
        one, other = dml(*words, cwd=project), new_process(*words, cwd=project)
        assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)


def test_outside_a_project(tmp_path: Path) -> None:
    refused(dml("reproduce", cwd=tmp_path), "no params.yaml")


@pytest.mark.parametrize("words", ["reproduce", "verify", "data prepare synthetic", "stack up", "stack restart", "tables", "doctor"])
def test_another_checkouts_code_is_refused(words: str, project: Path) -> None:
    """As of the environment of one clone, whose `dml` is run in a worktree: results would name the worktree's commit."""
    (project / "flows").mkdir()
    (project / "flows/chain.py").write_text("")
    ways_out = (f"{project} has its own code, but this command runs that of {ROOT}; run {project}/.venv/bin/dml", f"PYTHONPATH={project}")
    refused(dml(*words.split(), cwd=project), *ways_out)
    if words == "reproduce":
        shutil.copytree(project, experiment := project / ".dvc/tmp/exps/standalone/tmp1a2b")
        refused(
            dml(words, cwd=experiment), "temporary workspaces of dvc exp run (--temp, --queue) are not supported; omit these, or: dml rep"
        )
        shutil.rmtree(project / ".dvc")
    assert {path.name for path in project.iterdir()} <= {"params.yaml", "flows", "state"}
    shutil.rmtree(project / "flows")
    (project / "flows").symlink_to(ROOT / "flows")  # its own code, by another path
    assert dml("data", "list", cwd=project).returncode == 0


def test_a_copy_of_the_library_is_refused_where_the_checkout_has_it(project: Path) -> None:
    """As after `pip install ./dml_core` in the project's own environment: later edits of the library would not run."""
    for name in ("flows", "tasks"):
        (project / name).symlink_to(ROOT / name)
    (project / "dml_core").mkdir()
    refused(
        dml("tables", cwd=project), f"{project} has its own code, but this command runs that of {ROOT}", "rm -rf .venv; make .venv/.done"
    )


@pytest.mark.slow
def test_an_unknown_key(project: Path) -> None:
    change(project, comparison={"protocol": {"num_epoch": 3}})
    refused(dml("data", "list", cwd=project), "unknown key 'num_epoch'; did you mean 'num_epochs'?")


@pytest.mark.slow
def test_a_refused_loss_leaves_no_process(project: Path) -> None:
    """Prefect's server starts while losses are checked."""
    change(project, comparison={"variants": {"softtriple": {"loss": {"options": {"gama": 1}}}}})
    shown = dml("run", "synthetic", "softtriple", cwd=project)
    assert shown.returncode == 2
    assert "did you mean 'gamma'" in shown.stderr.splitlines()[-1]
    left = [process.info["cmdline"] for process in psutil.process_iter(["cwd", "cmdline"]) if process.info["cwd"] == str(project)]
    assert left == []


@pytest.mark.slow
def test_missing_raw_data(project: Path) -> None:
    change(project, datasets={"cars": {"reader": "cars196", "raw": "data/raw/cars", "options": {}}})  # its download links no longer work
    refused(dml("data", "fetch", "cars", cwd=project), "data/raw/cars")
    refused(dml("data", "prepare", "cars", cwd=project), "data/raw/cars")
    assert not (project / "data" / "packed").exists()


@pytest.mark.slow
def test_an_unreadable_image(project: Path) -> None:
    change(project, datasets={"synthetic": {"options": {"num_classes": 4, "images_per_class": 3}}})
    assert dml("data", "fetch", "synthetic", cwd=project).returncode == 0
    image = sorted((project / "data/raw/synthetic").rglob("*.jpg"))[5]
    image.write_bytes(image.read_bytes()[:100])
    refused(dml("data", "prepare", "synthetic", cwd=project), image.name)
    assert not (project / "data/packed/synthetic").exists()


@pytest.mark.slow
def test_a_state_folder_that_cannot_be_written(project: Path) -> None:
    refused(dml("reproduce", cwd=project, DML_STATE="/proc/nowhere"), "/proc/nowhere", "DML_STATE")


@pytest.mark.parametrize("suffix", ["", ".npz", ".parquet"])
def test_evaluate_uses_the_metric_of_the_network_that_embedded(suffix: str, tmp_path: Path) -> None:
    """The classes differ by their norms alone, so cosines are useless."""
    folder, labels = tmp_path / "embedded", np.repeat(np.arange(4), 5)
    folder.mkdir()
    noise = np.random.default_rng(0).normal(0, 0.01, (20, 2))
    np.save(folder / "images-0.npy", ((1 + labels)[:, None] + noise).astype(np.float32))
    np.save(folder / "images-labels.npy", np.array([f"class {label}" for label in labels]))
    items = {"path": [f"{number}.png" for number in range(20)], "label": [f"class {label}" for label in labels]}
    parquet.write_table(pa.table(items), folder / "items.parquet")
    entry = {"rows": 20, "dimensions": 2, "shards": ["images-0.npy"], "labels": "images-labels.npy"}
    (folder / "manifest.json").write_text(json.dumps({"images": entry}))
    (folder / "plan.json").write_text(json.dumps({"model": "m", "metric": "euclidean"}))
    path = folder
    if suffix:
        path = tmp_path / f"embedded{suffix}"
        with path.open("wb") as file:
            SINGLE_FILES[suffix](folder, file)
    for options, metric, is_perfect in (([], "euclidean", True), (["--metric", "cosine"], "cosine", False)):
        ran = CliRunner().invoke(app, ["evaluate", "--embeddings", str(path), *options])
        assert ran.exit_code == 0, ran.output
        shown = json.loads(ran.stdout)
        assert (shown["metric"], shown["recall@1"] == 1.0) == (metric, is_perfect)


@pytest.mark.slow
def test_evaluate_scores_files(project: Path) -> None:
    # Two classes along two axes: every query's nearest neighbour has its class.
    np.save(project / "e.npy", np.array([[1, 0], [1, 0.1], [0, 1], [0.1, 1]], dtype=np.float32))
    np.save(project / "l.npy", np.array(["a", "a", "b", "b"]))
    shown = dml("evaluate", "--embeddings", "e.npy", "--labels", "l.npy", "--k", "1,2", "--output", "out.json", cwd=project)
    assert shown.returncode == 0, shown.stderr
    metrics = json.loads((project / "out.json").read_text())
    assert metrics == json.loads(shown.stdout)
    assert metrics["recall@1"] == metrics["recall@2"] == metrics["map@r"] == metrics["nmi"] == 1.0
    refused(dml("evaluate", "--embeddings", "none.npy", "--labels", "l.npy", cwd=project), "none.npy: no such file")
    files = ["--embeddings", str(project / "e.npy"), "--labels", str(project / "l.npy")]
    approximate = CliRunner().invoke(app, ["evaluate", *files, "--k", "1", "--approximate", "hnsw"])
    assert json.loads(approximate.stdout)["is_approximate"] == 1
    assert "the exact nearest neighbours: 1.0000 @1, over 4 sampled queries" in approximate.stderr
    swapped = ["--embeddings", files[3], "--labels", files[1]]
    approximately = [*files, "--approximate", "hnsw", "--index-option", "num_probes=²"]
    for words, error, said in (
        ([*files, "--k", "1,x"], ConfigError, "--k 1,x"),
        ([*files, "--k", "²"], ConfigError, "--k ²"),
        ([*files, "--k", "9" * 5000], ConfigError, "--k 999"),
        (approximately, ConfigError, "--index-option num_probes=²"),
        ([*approximately[:-1], f"num_visited={'9' * 30}"], ConfigError, "--index-option num_visited=999"),
        (swapped, EvaluationError, "found shape (4,)"),
    ):
        with pytest.raises(error, match=re.escape(said)):
            CliRunner().invoke(app, ["evaluate", *words], catch_exceptions=False)


def test_a_table_is_shown_as_json_and_written_as_a_page(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    shown = json.loads(CliRunner().invoke(app, ["tables", "show", "softtriple/table1", "--json"]).stdout)
    assert (shown["name"], shown["rows"][-1]["status"]) == ("softtriple/table1", "not run")
    assert [column["metric"] for column in shown["columns"]] == ["recall@1", "recall@2", "recall@4", "recall@8", "nmi"]
    printed = CliRunner().invoke(app, ["report", "softtriple/table1", "-o", "pages"]).stdout
    assert printed == "pages/softtriple/table1.html\n1 page; index: pages/index.html\n"
    assert json.loads((project / "pages/softtriple/table1.json").read_text())["rows"][-1]["waits"]["cub200"].startswith(
        "dataset 'cub200' is"
    )
    assert "dml reproduce softtriple/table2" in (project / "pages/index.html").read_text(), "a table without measurements has its command"
    printed = CliRunner().invoke(app, ["report", "softtriple/figure*", "-o", "pages"]).stdout
    assert printed.splitlines()[:-1] == [f"pages/softtriple/figure{number}.html" for number in (3, 4, 5)]


def test_the_project_s_own_tables_are_listed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    listed = json.loads(CliRunner().invoke(app, ["tables", "list", "project", "--json"]).stdout)
    assert [table["name"] for table in listed] == [name for name in table_names() if name.startswith("project/") and name != STANDING]


def test_tables_count_own_data_and_stand_ins_apart(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    listed = json.loads(CliRunner().invoke(app, ["tables", "list", "softtriple", "--json"]).stdout)
    found = {table["name"]: (table["own_data"], table["stand_in"]) for table in listed}
    nothing = {"done": 0, "stale": 0, "seeds": 0, "failed": 0}
    assert found["softtriple/figure3"] == ({"runs": 2, **nothing}, {"runs": 2, **nothing})
    assert found["softtriple/table1"] == ({"runs": 2, **nothing}, {"runs": 0, **nothing})


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("--variant", "as_relased", "unknown variant of softtriple/table1 'as_relased'; did you mean 'as_released'?"),
        ("--row", "sofftriple", "unknown row of softtriple/table1 'sofftriple'; did you mean 'softtriple'?"),
        ("--dataset", "cub20", "unknown dataset of softtriple/table1 'cub20'; did you mean 'cub200'?"),
    ],
)
def test_what_narrows_a_table_and_names_nothing_is_refused_with_the_nearest(option: str, name: str, said: str, project: Path) -> None:
    refused(dml("plan", "softtriple/table1", option, name, cwd=project), said)


@pytest.mark.parametrize("words", [["verify", "{}"], ["accept", "{}", "--why", "reason"], ["plan", "*/*", "--row", "{}"]], ids=" ".join)
def test_of_many_known_names_only_the_nearest_are_listed(words: list[str], project: Path) -> None:
    name = "softripel" if "--row" in words else "softtripel/table1"
    shown = dml(*(word.format(name) for word in words), cwd=project)
    refused(shown, f"'{name}'; did you mean 'softtriple", "? (nearest of ", ": softtriple")
    assert len(shown.stderr) < 300


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["softtriple/tabel1"], "unknown table 'softtriple/tabel1'; did you mean 'softtriple/table1'?"),
        (["softtriple/table1", "--row", "sofftriple"], "unknown row of softtriple/table1 'sofftriple'; did you mean 'softtriple'?"),
        (["softtriple/table1", "--row", "clustering"], "'Clustering' is not run: the paper quotes it from elsewhere"),
        (["softtriple/table3"], "dataset 'cars196' is not in params.yaml; add below datasets: cars196: {reader: cars196, raw: "),
        (["softtriple/table1", "--set", "scale.num_workers=1"], "--set applies only to the standing comparison"),
        (["softtriple/table1", "softtriple/tabel*"], "unknown table 'softtriple/tabel*'; did you mean 'softtriple/table"),
        (["softtriple/table3", "softtriple/table5"], "datasets 'cars196' and 'sop' are not in params.yaml; add below datasets: cars196: {"),
        (["softtriple/table1", "-r", "3", "-s", "4"], "--seed cannot be combined with --seeds 3, which means seeds 0 to 2"),
        (["softtriple/table1", "--track", "commn"], "'--track': 'commn' is not one of 'paper', 'common'."),
        (["--smoke"], "--smoke and --one-row require a table"),
        (["--seeds", "3"], "--seeds 3 requires a table; for the comparison give each seed, for example --seed 0 --seed 1"),
        (["softtriple/table1", "--resolve", "1"], "--resolve and --max-seeds require --seeds auto"),
        (["softtriple/table1", "--seeds", "auto", "--resolve", "0"], "--resolve 0: half of an interval in points must be above 0"),
        (["softtriple/table1", "--seeds", "many"], "--seeds many: expected a number from 1 to 1000, or auto"),
        (["--seeds", "auto", "--max-seeds", "2"], "--max-seeds 2: must be at least 3"),
        (["--seeds", "auto", "--seed", "1"], "--seed cannot be combined with --seeds auto, which adds seeds"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_before_anything_starts(words: list[str], said: str, project: Path) -> None:
    change(project, datasets={"cub200": {"reader": "cub200", "raw": "data/raw/cub200", "options": {}}})
    shown = dml("reproduce", *words, cwd=project)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert said in shown.stderr.splitlines()[-1]
    assert [line for line in shown.stderr.splitlines() if line.startswith("error: ")] == shown.stderr.splitlines()[-1:]
    assert "Prefect" not in shown.stderr
    assert not list((project / "state").rglob("*.db"))


def test_a_report_of_an_unknown_table_writes_nothing(project: Path) -> None:
    refused(dml("models", "softtriple/tabel1", cwd=project), "unknown table 'softtriple/tabel1'; did you mean 'softtriple/table1'?")
    refused(dml("report", "softtriple/tabel1", cwd=project), "unknown table 'softtriple/tabel1'; did you mean 'softtriple/table1'?")
    assert not (project / "results").exists()
