"""Runs of a table from several projects: exported to files, imported, averaged together."""

import json
import shutil
from pathlib import Path
from statistics import mean

import pytest
from typer.testing import CliRunner

from dml_core.config import parse
from dml_core.data.store.info import INFO_FILE
from dml_core.errors import ConfigError, DmlError, StoreError
from flows.cli.app import app
from flows.request import REQUEST, requested_runs
from tasks.data import read_dataset
from tasks.environment import Project
from tasks.plans.plan import plan_tables
from tasks.plans.progress import table_states
from tasks.plans.results import add_runs, export_result, import_result, load_result, unmeasured_runs
from tasks.runs.identity import step_identities
from tasks.runs.specs import RunSpec
from tasks.sealed import DamagedError, NewerFormatError, seal, write_sealed
from tasks.tables.choice import Choice
from tasks.tables.file import load_table
from tasks.tables.present import is_of_other_code, table_today
from tasks.tables.result import MeasuredRun, TableResult, result_path
from tasks.tables.runs import runs_of_tables
from tasks.tables.shown import ShownTable
from tasks.tables.view import shown_table
from tests.damage import DAMAGE, as_format
from tests.tasks.plans.conftest import look

TABLE, ROW, COLUMN = "softtriple/table1", "softtriple", 0


def measured(project: Project, seed: int, score: float, **changes: object) -> MeasuredRun:
    """Return a run of the row as today's project would measure it."""
    choice = Choice((ROW,), ("cub200",), seeds=(seed,))
    (spec,) = runs_of_tables([TABLE], choice)[0][TABLE, "cub200"]
    record = read_dataset(project, "cub200")
    settings = {name: getattr(spec, name).model_dump(mode="json") for name in ("training", "evaluation")}
    place = {"row": ROW, "variant": spec.variant, "dataset": "cub200", "seed": seed, "project_dataset": record.name}
    values = {"identity": f"{seed}", "scores": {"recall@1": score}, "figures": f"evaluate/{seed}", "digest": record.digest}
    return MeasuredRun.model_validate(place | values | settings | {"commit": "theirs"} | changes)


def changed(project: Project, seed: int, score: float, changes: dict[str, object]) -> MeasuredRun:
    """Return a run as `measured`, with these other fields or settings."""
    run = measured(project, seed, score)
    return run.model_copy(update={name: run.training | value if isinstance(value, dict) else value for name, value in changes.items()})


def shown(project: Project) -> ShownTable:
    table, result = load_table(TABLE), load_result(project, TABLE)
    return shown_table(TABLE, table, result, today=table_today(project, look(project).params, TABLE, table, result))


def values(project: Project) -> dict[int, float]:
    """Return seed -> Recall@1 of the row's line, in per cent."""
    (row,) = (row for row in shown(project).rows if row.name == ROW)
    cell = row.lines[0].cells[COLUMN]
    assert cell is not None
    assert cell.mean == pytest.approx(mean(cell.values.values()))
    return cell.values


@pytest.fixture
def theirs(project: Project, tmp_path: Path) -> Path:
    """The exported result of another project with seeds 0 to 2."""
    other = Project(project.root, tmp_path / "their state", "", "")
    add_runs(other, TABLE, [measured(project, seed, 0.6 + seed / 100) for seed in range(3)], (), "theirs")
    path = tmp_path / "theirs.json"
    assert len(export_result(other, TABLE, path).runs) == 3
    return path


def test_means_are_over_the_seeds_of_both_projects_and_runs_measured_here_are_kept(project: Project, theirs: Path) -> None:
    add_runs(project, TABLE, [measured(project, 2, 0.1, commit="ours"), measured(project, 3, 0.2, commit="ours")], (), "ours")
    imported = import_result(project, theirs)
    assert imported == f"{TABLE}: 2 runs imported; 1 run measured here kept; show them with: dml tables show {TABLE}"
    expected = pytest.approx({0: 60.0, 1: 61.0, 2: 10.0, 3: 20.0})
    assert values(project) == expected
    (line,) = (row.lines[0] for row in shown(project).rows if row.name == ROW)
    assert line.label == "as_published, 4 seeds, 2 runs imported, made by other code"
    assert [(run.seed, run.is_imported, run.commit) for run in line.runs] == [
        (0, True, "theirs"), (1, True, "theirs"), (2, False, "ours"), (3, False, "ours"),
    ]  # fmt: skip
    import_result(project, theirs)
    assert values(project) == expected, "importing twice changes nothing"


def test_a_run_measured_here_that_comes_back_in_another_s_file_is_no_imported_one(project: Project, tmp_path: Path) -> None:
    """A colleague's file has the runs that the colleague imported from here."""
    own = of_today(project, 1, 0.3)
    add_runs(project, TABLE, [own], (), "ours")
    write_sealed(tmp_path / "given.json", TableResult(name=TABLE, runs=(own, measured(project, 2, 0.4))))
    import_result(project, tmp_path / "given.json")
    add_runs(project, TABLE, [changed(project, 1, 0.9, {"training": {"num_epochs": 1}})], (), "on a branch")
    assert requested(project)[0] == [0, 1, 3], "its own finished run is found in the store, with its pictures"


@pytest.mark.parametrize("changes", [{"digest": "other images"}, {"training": {"num_epochs": 1}}], ids=["images", "settings"])
def test_outdated_runs_measured_here_are_replaced_by_those_with_the_present_settings_and_images(
    project: Project, theirs: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    own = changed(project, 0, 0.1, changes)
    add_runs(project, TABLE, [own], (), "ours")
    others = (changed(project, 0, 0.9, changes),)
    write_sealed(tmp_path / "given.json", TableResult(name=TABLE, runs=others))
    assert ": 0 runs imported; 1 run measured here kept; " in import_result(project, tmp_path / "given.json")
    imported = import_result(project, theirs)
    assert imported == f"{TABLE}: 3 runs imported; 1 outdated run measured here replaced; show them with: dml tables show {TABLE}"
    assert values(project) == pytest.approx({0: 60.0, 1: 61.0, 2: 62.0})
    assert shown(project).left_out == ()
    add_runs(project, TABLE, [own], (), "ours")  # as the next flow with the former settings or images does, which reuses its steps
    assert next(run for run in load_result(project, TABLE).runs if run.seed == 0).scores == own.scores


def test_a_run_measured_here_later_replaces_the_imported_one(project: Project, theirs: Path) -> None:
    import_result(project, theirs)
    add_runs(project, TABLE, [measured(project, 1, 0.9)], (), "ours")
    assert values(project) == pytest.approx({0: 60.0, 1: 90.0, 2: 62.0})


def test_a_later_import_replaces_an_earlier_one(project: Project, theirs: Path, tmp_path: Path) -> None:
    import_result(project, theirs)
    write_sealed(tmp_path / "again.json", TableResult(name=TABLE, runs=(measured(project, 1, 0.9),)))
    assert ": 1 run imported" in import_result(project, tmp_path / "again.json")
    assert values(project) == pytest.approx({0: 60.0, 1: 90.0, 2: 62.0})


@pytest.mark.parametrize("changes", [{"digest": "other images"}, {"training": {"num_epochs": 1}}], ids=["images", "settings"])
def test_runs_on_other_images_or_with_former_settings_do_not_replace_imported_ones_with_the_present(
    project: Project, theirs: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    import_result(project, theirs)
    write_sealed(tmp_path / "given.json", TableResult(name=TABLE, runs=tuple(changed(project, seed, 0.9, changes) for seed in (1, 7))))
    says = CliRunner().invoke(app, ["tables", "import", str(tmp_path / "given.json")]).stdout
    skipped = "1 run with other data, settings or code skipped, imported ones of today kept"
    assert says == f"{TABLE}: 1 run imported; {skipped}; show them with: dml tables show {TABLE}\n"
    assert values(project) == pytest.approx({0: 60.0, 1: 61.0, 2: 62.0})
    assert requested(project)[0] == [3]
    (line,) = shown(project).left_out
    assert "seed 7: " in line


def test_runs_with_former_settings_are_replaced_by_those_with_the_present(project: Project, theirs: Path, tmp_path: Path) -> None:
    outdated = tuple(changed(project, seed, 0.9, {"training": {"num_epochs": 1}}) for seed in range(3))
    write_sealed(tmp_path / "given.json", TableResult(name=TABLE, runs=outdated))
    assert ": 3 runs imported" in import_result(project, tmp_path / "given.json")
    assert values(project) == pytest.approx({0: 90.0, 1: 90.0, 2: 90.0})
    former = "measured with former settings; no run has the present ones"
    assert shown(project).left_out == (f"shown: {ROW} as_published on cub200, seeds 0, 1, 2: {former}",)
    assert former in CliRunner().invoke(app, ["tables", "show", TABLE]).stdout
    assert ": 3 runs imported" in import_result(project, theirs)
    assert values(project) == pytest.approx({0: 60.0, 1: 61.0, 2: 62.0})
    assert shown(project).left_out == ()


def of_today(project: Project, seed: int, score: float) -> MeasuredRun:
    """Return a run as `measured`, made by today's code."""
    (spec,) = runs_of_tables([TABLE], Choice((ROW,), ("cub200",), seeds=(seed,)))[0][TABLE, "cub200"]
    record = read_dataset(project, "cub200")
    identity = step_identities(spec, record)["evaluate"]
    return measured(project, seed, score, identity=identity, figures=f"evaluate/{identity}")


def test_a_run_of_today_s_code_replaces_one_of_other_code_and_not_the_reverse(project: Project, theirs: Path, tmp_path: Path) -> None:
    """The file of a third project may have runs that the second has measured again after a fix."""
    add_runs(project, TABLE, [measured(project, 1, 0.3), of_today(project, 2, 0.4)], (), "ours")
    write_sealed(tmp_path / "given.json", TableResult(name=TABLE, runs=tuple(of_today(project, seed, 0.9) for seed in (0, 1))))
    assert ": 2 runs imported; 1 outdated run measured here replaced; show" in import_result(project, tmp_path / "given.json")
    skipped = "2 runs with other data, settings or code skipped, imported ones of today kept"
    assert f": 0 runs imported; 1 run measured here kept; {skipped}; show" in import_result(project, theirs)
    assert values(project) == pytest.approx({0: 90.0, 1: 90.0, 2: 40.0})


@pytest.mark.parametrize("later", ["another import", "nothing"])
def test_an_imported_run_is_reused_again_after_one_with_other_settings_took_its_place(
    project: Project, theirs: Path, tmp_path: Path, later: str
) -> None:
    """A branch with other settings measures the row, and the next command runs on the first branch again."""
    import_result(project, theirs)
    on_branch = changed(project, 1, 0.9, {"training": {"num_epochs": 1}})
    add_runs(project, TABLE, [on_branch], (), "ours")
    if later == "another import":
        write_sealed(tmp_path / "given.json", TableResult(name=TABLE, runs=(measured(project, 7, 0.7),)))
        import_result(project, tmp_path / "given.json")
    assert planned(project) == {0: "reused", 1: "reused", 2: "reused", 3: "run"}
    assert requested(project)[0] == [3]
    expected = {0: 60.0, 1: 61.0, 2: 62.0} | ({7: 70.0} if later == "another import" else {})
    assert values(project) == pytest.approx(expected)
    DAMAGE["cut"](result_path(project, TABLE))
    assert values(project) == pytest.approx(expected)
    add_runs(project, TABLE, [measured(project, 1, 0.2)], (), "ours")
    assert requested(project)[0] == [1, 3], "a run measured here is not replaced"


@pytest.mark.parametrize("changes", [{"digest": "other images"}, {"training": {"num_epochs": 1}}], ids=["images", "settings"])
def test_runs_on_other_images_or_with_other_settings_are_named_and_left_out_of_means(
    project: Project, tmp_path: Path, changes: dict[str, object]
) -> None:
    add_runs(project, TABLE, [measured(project, 0, 0.5)], (), "ours")
    write_sealed(tmp_path / "given.json", TableResult(name=TABLE, runs=(changed(project, 1, 0.9, changes),)))
    import_result(project, tmp_path / "given.json")
    assert values(project) == pytest.approx({0: 50.0})
    assert "seed 1" in " ".join(shown(project).left_out)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        (TABLE, {"row": "softripel"}, "unknown row 'softripel'; did you mean 'softtriple'?"),
        (TABLE, {"dataset": "cars"}, "unknown dataset 'cars'"),
        (TABLE, {"variant": "as_relased"}, "unknown variant 'as_relased'; did you mean 'as_released'?"),
        (TABLE, {"figures": "../../pictures"}, "has the folder '../../pictures'; expected evaluate/ and its identity"),
        (TABLE, {"figures": "evaluate/../..", "identity": "../.."}, "has the folder 'evaluate/../..'; expected"),
        (TABLE, {"figures": "train/1"}, "has the folder 'train/1'; expected"),
        ("softtriple/table99", {}, "unknown table 'softtriple/table99'"),
    ],
)
def test_unknown_names_and_foreign_folders_are_refused_and_nothing_is_added(
    project: Project, tmp_path: Path, name: str, changes: dict[str, object], says: str
) -> None:
    runs = (measured(project, 0, 0.5), measured(project, 1, 0.5, **changes))
    write_sealed(tmp_path / "given.json", TableResult(name=name, runs=runs))
    with pytest.raises(ConfigError, match=rf"given\.json: .*{says.replace('?', '.')}"):
        import_result(project, tmp_path / "given.json")
    assert not result_path(project, TABLE).exists()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused_and_earlier_imports_stay(
    project: Project, theirs: Path, tmp_path: Path, number: float
) -> None:
    """JSON written here has null in its place, which is no score: the whole result was set aside as damaged, with all imported runs."""
    import_result(project, theirs)
    for given, name in (({"scores": {"recall@1": 0.5, "nmi": number}}, "nmi"), ({"seconds": number}, "seconds")):
        run = (
            measured(project, 7, 0.5, **given)
            .model_dump_json()
            .replace(f'"{name}":null', f'"{name}":{"NaN" if number != number else "Infinity"}')
        )
        record = f'{{"name":"{TABLE}","runs":[{run}]}}'
        (tmp_path / "given.json").write_text(seal(record))
        with pytest.raises(ConfigError, match=r"given\.json: the run of softtriple as_published, seed 7, has a number that is not finite"):
            import_result(project, tmp_path / "given.json")
    assert values(project) == pytest.approx({0: 60.0, 1: 61.0, 2: 62.0})


@pytest.mark.parametrize("gone", [{"row": "gone"}, {"variant": "gone"}, {"dataset": "gone"}], ids=str)
def test_runs_that_are_no_longer_in_the_table_are_not_exported(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture, gone: dict[str, object]
) -> None:
    other, path = Project(project.root, tmp_path / "their state", "", ""), tmp_path / "theirs.json"
    add_runs(other, TABLE, [measured(project, 1, 0.5, **gone)], (), "theirs")
    with pytest.raises(ConfigError, match="nothing is measured"):
        export_result(other, TABLE, path)
    add_runs(other, TABLE, [measured(project, 0, 0.5)], (), "theirs")
    for _ in range(2):  # an earlier export is replaced
        assert [run.seed for run in export_result(other, TABLE, path).runs] == [0]
    assert f"{TABLE}: left out 1 run whose row, variant or dataset is no longer in the table" in caplog.text
    assert ": 1 run imported" in import_result(project, path)


def test_a_file_that_cannot_be_written_is_reported_with_its_own_remedy(project: Project, theirs: Path) -> None:
    """The file is the user's, not in the project's state."""
    import_result(project, theirs)
    with pytest.raises(StoreError, match=r"cannot be written \(.+\); choose another file with -o, or free space$"):
        export_result(project, TABLE, theirs / "runs.json")


def test_a_damaged_dataset_does_not_hide_the_measured_values(project: Project, theirs: Path) -> None:
    import_result(project, theirs)
    before = values(project)
    (project.packed("cub200") / INFO_FILE).write_text("{")
    assert values(project) == before
    result = CliRunner().invoke(app, ["tables", "show", TABLE])
    assert (result.exit_code, "61.0" in result.output) == (0, True)


@pytest.mark.parametrize("how", [how for how in DAMAGE if how != "remove"])
def test_a_damaged_file_is_refused_and_stays(project: Project, theirs: Path, how: str) -> None:
    DAMAGE[how](theirs)
    damaged = theirs.read_bytes()
    with pytest.raises(DamagedError, match=r"theirs\.json: damaged"):
        import_result(project, theirs)
    assert theirs.read_bytes() == damaged
    assert not result_path(project, TABLE).exists()


def test_a_newer_file_and_a_missing_one_are_refused(project: Project, theirs: Path) -> None:
    theirs.write_text(as_format(theirs.read_text(), 7))
    with pytest.raises(NewerFormatError, match="update dml-repro"):
        import_result(project, theirs)
    with pytest.raises(ConfigError, match="no such file; write one with: dml tables export"):
        import_result(project, theirs.with_name("none.json"))
    with pytest.raises(DmlError, match="nothing is measured; run it first: dml reproduce softtriple/table2"):
        export_result(project, "softtriple/table2", theirs)


def test_the_verbs_print_what_they_did(project: Project, theirs: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert run(app, ["tables", "import", str(theirs)]).stdout == f"{TABLE}: 3 runs imported; show them with: dml tables show {TABLE}\n"
    again = tmp_path / "again.json"
    assert run(app, ["tables", "export", TABLE, "-o", str(again)]).stdout.startswith(f"{TABLE}: 3 runs in {again}; add them")
    assert again.read_bytes() == theirs.read_bytes()
    listed = json.loads(run(app, ["tables", "show", TABLE, "--json"]).stdout)
    (line,) = (line for row in listed["rows"] for line in row["lines"])
    assert [(one["seed"], one["is_imported"]) for one in line["runs"]] == [(0, True), (1, True), (2, True)]
    assert run(app, ["report", TABLE, "-o", str(tmp_path / "site")]).exit_code == 0
    page = (tmp_path / f"site/{TABLE}.html").read_text()
    assert '<span class="mark older">3 runs imported</span>' in page
    assert '<span class="mark older">made by other code</span>' in page
    assert "Runs of commit <code>theirs</code>." in page
    assert "not in this store" in page  # the pictures


def test_runs_of_other_code_are_marked_so_whichever_project_measured_them(project: Project) -> None:
    runs = [measured(project, seed, 0.5) for seed in range(4)]
    today = {seed: of_today(project, seed, 0.5).identity for seed in range(4)}
    given = [run.model_copy(update={"identity": today[run.seed], "figures": f"evaluate/{today[run.seed]}"}) for run in runs[:2]]
    unknown = runs[2].model_copy(update={"training": runs[2].training | {"no_longer": 1}})
    for some, words in (
        ([*given, runs[3]], ["3 seeds", "3 runs imported", "1 of 3 runs made by other code"]),
        (given, ["2 seeds", "2 runs imported"]),
        ([unknown], ["1 seed", "1 run imported", "made by other code"]),
    ):
        for is_imported in (True, False):
            result = TableResult(name=TABLE, runs=tuple(run.model_copy(update={"is_imported": is_imported}) for run in some))
            (line,) = (line for row in shown_table(TABLE, load_table(TABLE), result).rows for line in row.lines)
            assert line.label == ", ".join(["as_published", *(word for word in words if is_imported or "imported" not in word)])


def test_without_the_converted_weights_that_it_starts_from_no_code_is_called_other(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their hash is part of the identity, which is unknown on a machine without the file."""
    monkeypatch.setenv("DML_WEIGHTS", str(tmp_path))
    weights = tmp_path / "inception_v1_2016_08_28.pth"
    run = measured(project, 0, 0.5)
    run.training["model"]["backbone"] |= {"name": "inception_v1", "weights": "imagenet"}
    run.training["transform"]["scaling"] = "minus-one-one"
    settings = {"dataset": "cub200", "variant": run.variant, "seed": 0, "training": run.training, "evaluation": run.evaluation}
    spec = parse(RunSpec, settings, "run")
    weights.write_bytes(b"converted")
    record = read_dataset(project, "cub200")
    run = run.model_copy(update={"identity": step_identities(spec, record)["evaluate"]})
    assert not is_of_other_code(run)
    weights.write_bytes(b"another")
    assert is_of_other_code(run)
    weights.unlink()
    assert not is_of_other_code(run)


def test_progress_counts_the_imported_runs_that_are_reused_whatever_code_made_them(project: Project, theirs: Path, tmp_path: Path) -> None:
    import_result(project, theirs)
    (state,) = table_states(look(project), [TABLE])
    assert (state.own_data.done, state.own_data.stale, state.own_data.seeds) == (1, 0, 3)
    outdated = tuple(changed(project, seed, 0.9, {"training": {"num_epochs": 1}}) for seed in range(3))
    result_path(project, TABLE).unlink()
    write_sealed(tmp_path / "given.json", TableResult(name=TABLE, runs=outdated))
    import_result(project, tmp_path / "given.json")
    (state,) = table_states(look(project), [TABLE])
    assert (state.own_data.done, state.own_data.stale) == (0, 1)
    shutil.rmtree(project.packed("cub200"))
    import_result(project, theirs)
    state = table_states(look(project), [TABLE])[0]
    assert (state.own_data.done, state.own_data.stale, state.how) == (1, 0, "partly"), "nothing says that its data are others"


def test_seeds_auto_plans_and_runs_the_imported_seeds_here(project: Project, theirs: Path) -> None:
    import_result(project, theirs)
    assert requested(project, seeds=[], resolve=1.0)[0] == [0]
    which = ["plan", TABLE, "--row", ROW, "-d", "cub200", "--json"]
    by_seeds = {n: json.loads(CliRunner().invoke(app, [*which, "--seeds", n]).stdout)["num_to_train"] for n in ("3", "auto")}
    assert by_seeds == {"3": 0, "auto": 3}


def requested(project: Project, **choice: object) -> tuple[list[int], str]:
    """Return the seeds that a request for the row starts, and the lines that it prints."""
    lines: list[str] = []
    request = REQUEST.validate_python({"tables": [TABLE], "rows": [ROW], "datasets": ["cub200"], "seeds": [0, 1, 2, 3], **choice})
    _, runs = requested_runs(project, request, lines.append)
    return [spec.seed for spec in runs], "\n".join(lines)


def planned(project: Project) -> dict[int, str]:
    """Return seed -> whether the row's training will run or is reused."""
    (plan,) = plan_tables(look(project), [TABLE], Choice((ROW,), ("cub200",), seeds=(0, 1, 2, 3)))
    return {run.spec.seed: run.steps["train"] for run in plan.runs}


def test_only_what_was_not_imported_is_planned_and_run_unless_it_is_forced(project: Project, theirs: Path) -> None:
    assert requested(project)[0] == [0, 1, 2, 3]
    import_result(project, theirs)
    assert planned(project) == {0: "reused", 1: "reused", 2: "reused", 3: "run"}
    seeds, lines = requested(project)
    assert seeds == [3]
    assert f"{TABLE}: 3 imported runs reused; --force measures them here" in lines
    assert f"{TABLE}: 1 run on cub200" in lines
    assert requested(project, force=True)[0] == [0, 1, 2, 3]
    assert requested(project, smoke=True)[0] == [0, 1, 2, 3]
    assert requested(project, seeds=[1, 2])[0] == []


@pytest.mark.parametrize("changes", [{"digest": "other images"}, {"training": {"num_epochs": 1}}], ids=["images", "settings"])
def test_imported_runs_on_other_images_or_with_other_settings_are_measured_here(
    project: Project, tmp_path: Path, changes: dict[str, object]
) -> None:
    write_sealed(tmp_path / "given.json", TableResult(name=TABLE, runs=(changed(project, 0, 0.9, changes),)))
    import_result(project, tmp_path / "given.json")
    assert requested(project, seeds=[0])[0] == [0]
    assert planned(project)[0] == "run"


def test_imported_runs_without_todays_measurements_are_measured_here(project: Project, tmp_path: Path) -> None:
    name, choice = "tuplet_margin/figure6", Choice(datasets=("cub200",))
    spec, *_ = runs_of_tables([name], choice)[0][name, "cub200"]
    assert spec.measurements
    for measurements, is_reused in (({}, False), (spec.measurements, True)):
        place = {"row": spec.row, "variant": spec.variant, "epoch": spec.evaluation.epoch}
        settings = {part: getattr(spec, part).model_dump(mode="json") for part in ("training", "evaluation")}
        run = measured(project, 0, 0.5, **place, **settings, measurements=measurements)
        write_sealed(tmp_path / "given.json", TableResult(name=name, runs=(run,)))
        import_result(project, tmp_path / "given.json")
        (plan,) = plan_tables(look(project), [name], choice)
        assert plan.runs[0].steps["evaluate"] == ("reused" if is_reused else "run")
        remaining, _, _ = unmeasured_runs(project, [spec.model_copy(update={"dataset": run.project_dataset})])
        assert len(remaining) == (not is_reused)


@pytest.mark.parametrize("how", [how for how in DAMAGE if how != "remove"])
def test_imported_runs_survive_damage_of_the_result(project: Project, theirs: Path, how: str) -> None:
    import_result(project, theirs)
    before = load_result(project, TABLE)
    DAMAGE[how](result_path(project, TABLE))
    assert load_result(project, TABLE).runs == before.runs
    assert planned(project) == {0: "reused", 1: "reused", 2: "reused", 3: "run"}


def test_imported_runs_on_images_that_are_not_prepared_are_named(project: Project, theirs: Path) -> None:
    import_result(project, theirs)
    shutil.rmtree(project.packed("cub200"))
    seeds, lines = requested(project)
    assert seeds == [0, 1, 2, 3]
    note = "note: imported runs on cub200 are reused only if it is prepared: dml data prepare cub200"
    assert note in lines
    plan = ["plan", TABLE, "--row", ROW, "-d", "cub200"]
    assert note in CliRunner().invoke(app, plan).stdout
    assert note not in CliRunner().invoke(app, [*plan, "--seeds", "auto"]).stdout


def test_a_request_whose_runs_are_all_imported_starts_nothing(project: Project, theirs: Path) -> None:
    import_result(project, theirs)
    result = CliRunner().invoke(app, ["reproduce", TABLE, "--row", ROW, "-d", "cub200", "-s", "0", "-s", "2"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "nothing to run: all runs were imported; show them with: dml tables show TABLE\n"
