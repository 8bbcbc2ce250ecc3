"""The end of a flow: reports of the standing comparison, the best run by one fixed rule, and the pages of tables."""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import flows.reports
import flows.reproduce
from dml_core.errors import DataError
from flows.outcomes import Failure, Outcome, RunsFailedError
from flows.reports import Report, artifact_key, report_folder, report_standing
from flows.request import Request
from tasks.environment import Project
from tasks.plans.results import load_result
from tasks.reports import table_pages
from tasks.runs.best import NO_BEST, RULE, VALIDATION
from tasks.runs.costs import Meter
from tasks.runs.params.comparison import comparison_runs, variants_on
from tasks.runs.params.file import load_params
from tasks.runs.records import ComparisonReport, MetricRecord
from tasks.runs.specs import RunSpec
from tasks.tables.choice import Choice
from tasks.tables.file import load_table, table_names
from tasks.tables.result import TableResult
from tasks.tables.runs import runs_of
from tests.conftest import ROOT

PARAMS = load_params(ROOT / "params.yaml")
SET = ("comparison.protocol.num_epochs=3",)


def specs(*variants: str, seeds: tuple[int, ...] = (0,), overrides: tuple[str, ...] = (), dataset: str = "synthetic") -> list[RunSpec]:
    return comparison_runs(load_params(ROOT / "params.yaml", overrides), dataset, variants or None, seeds, overrides)


def outcome(spec: RunSpec, recall: float = 0.5, validation: float | None = None) -> Outcome:
    metrics = {"recall@1": recall, **({} if validation is None else {VALIDATION: validation})}
    scores = MetricRecord(step="evaluate", identity="i", key="evaluate/i", files=(), metrics=metrics)
    return Outcome(spec, scores, {"train": True}, True, "there", "there", 1.0, digest="digest")


class Services:
    """Stand-in for a flow's services, as far as a conclusion needs them; records the published reports."""

    def __init__(self, root: Path) -> None:
        self.project = Project(root, root / "state", "", "sqlite:///none.db")
        self.tags: dict[str, str] = {}
        self.published: list[ComparisonReport] = []

    @property
    def tracker(self) -> "Services":
        return self

    def publish(self, report: ComparisonReport) -> str:
        self.published.append(report)
        return "run"


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Services:
    return Services(tmp_path)


def conclude(services: Any, outcomes: list[Outcome], failures: list[Failure] | None = None) -> Report:
    params = load_params(ROOT / "params.yaml", outcomes[0].spec.overrides)
    return report_standing(outcomes, failures or [], params, services)


def test_a_reused_run_keeps_the_commit_that_measured_it(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "project/glyphs"
    runs = runs_of(name, load_table(name), Choice(("softmax",), ("glyphs-2000",), seeds=(0, 1)))["glyphs-2000"]
    monkeypatch.setattr(flows.reports, "write_site", lambda project, params, names: [SimpleNamespace(markdown="") for _ in names])
    monkeypatch.setattr(flows.reports, "_publish_table", lambda *given: 0)

    def commits(commit: str, did_run: tuple[bool, ...], identity: str = "i") -> list[str | None]:
        """Return the commits of the table's runs after a flow of this commit."""
        services.tags["git_commit"] = commit
        outcomes = [replace(outcome(spec), ran={"train": False, "evaluate": ran}) for spec, ran in zip(runs, did_run, strict=False)]
        outcomes = [replace(one, scores=one.scores.model_copy(update={"identity": identity})) for one in outcomes]
        flows.reports.write_reports(runs, outcomes, (), PARAMS, services)  # type: ignore[arg-type]
        return [run.commit for run in load_result(services.project, name).runs]

    assert commits("first", (True,)) == ["first"]
    assert commits("second-dirty", (False, True)) == ["first", "second-dirty"]
    assert commits("third", (False, False)) == ["first", "second-dirty"]
    assert commits("fourth", (True, False)) == ["fourth", "second-dirty"], "--force"
    assert commits("fifth", (False,), "other") == ["fifth", "second-dirty"], "shared with another table's run of the same flow"


def test_every_choice_of_runs_has_a_folder_and_the_same_choice_the_same_one(tmp_path: Path) -> None:
    project = Project(tmp_path, tmp_path / "state", "", "")
    choices = [
        specs("softtriple"),
        specs("softtriple", seeds=(1,)),
        specs("softtriple", seeds=(0, 1)),
        specs("softtriple", seeds=(0, 2)),
        specs("softmax"),
        specs("softtriple", "softmax"),
        specs("softtriple", "sgsl"),
        specs("softtriple", overrides=SET),
        specs("softtriple", overrides=("comparison.protocol.num_epochs=4",)),
        specs("softtriple", dataset="fashion-mnist"),
    ]
    folders = [report_folder(project, chosen, is_part=True) for chosen in choices]
    for (one, first), (other, second) in combinations(enumerate(folders), 2):
        assert first != second, (one, other)
        assert first not in second.parents
    assert folders == [report_folder(project, chosen[::-1], is_part=True) for chosen in choices]
    assert report_folder(project, specs(), is_part=False) == tmp_path / "results/synthetic"
    assert report_folder(project, specs(overrides=SET), is_part=False).parent == tmp_path / "state/reports/synthetic"
    assert folders[0].name.startswith("softtriple-seed-0-")


def test_a_row_of_older_code_has_the_files_of_all_seeds(services: Services) -> None:
    files = [("b.py",), (), ("a.py", "b.py")]
    runs = [replace(outcome(spec), older_code=of_run) for spec, of_run in zip(specs("softmax", seeds=(0, 1, 2)), files, strict=True)]
    for outcomes in (runs, runs[::-1]):
        assert "\nsoftmax: made by other code: a.py, b.py.\n" in conclude(services, outcomes).page


def test_a_part_and_one_with_other_settings_leave_two_whole_reports(services: Services) -> None:
    parts = [
        conclude(services, [outcome(spec, 0.25) for spec in specs("softtriple")]),
        conclude(services, [outcome(spec, 0.75) for spec in specs("softtriple", overrides=SET)]),
        conclude(services, [outcome(spec, 0.5) for spec in specs("softmax")]),
    ]
    for part in parts:
        assert part.path.read_text() == part.page
        assert (part.path.parent / "scores.csv").is_file()
    assert ["25.0" in parts[0].page, "75.0" in parts[1].page, "50.0" in parts[2].page] == [True] * 3
    assert parts[1].page.startswith("# comparison on synthetic, comparison.protocol.num_epochs=3\n")
    assert not (services.project.root / "results").exists()
    failed = [Failure(specs("softmax")[0], "no memory")]
    assert "- synthetic / softmax / seed 0: FAILED: no memory" in conclude(services, [outcome(specs("softtriple")[0])], failed).page
    assert len(list((services.project.state / "reports/synthetic").glob("*/report.md"))) == 4


def test_the_best_of_what_ran_is_chosen_on_held_out_classes(services: Services) -> None:
    runs = specs("softtriple", "softmax", seeds=(0, 1))
    validation = {("softtriple", 0): 0.5, ("softtriple", 1): 0.7, ("softmax", 0): 0.9, ("softmax", 1): 0.2}
    found = conclude(
        services, [outcome(spec, 1.0 - validation[spec.variant, spec.seed], validation[spec.variant, spec.seed]) for spec in runs]
    )
    assert found.best is not None
    assert found.best.spec.title == "synthetic / softtriple / seed 1"
    assert found.best_line.startswith(f"best of these runs: softtriple, seed 1: {RULE}"), "another may be `@best`"
    without = conclude(services, [outcome(spec) for spec in specs("softmax", dataset="fashion-mnist")])
    assert (without.best, without.best_line) == (None, NO_BEST)


def test_mlflow_is_told_the_present_data_and_settings_of_every_variant(services: Services) -> None:
    """And where the report is, also that of a part of the comparison, as by default."""
    part = conclude(services, [outcome(spec) for spec in specs("softmax")])
    (report,) = services.published
    assert (report.digest, report.is_one_protocol, report.folder) == ("digest", True, str(part.path.parent))
    assert [*report.settings] == variants_on(PARAMS, "synthetic")
    conclude(services, [outcome(spec) for spec in specs("softmax", overrides=SET)])
    assert services.published[1].settings["softmax"] != report.settings["softmax"]


NAMES = ["project/claims", "softtriple/table1", "project/standing"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project without results."""
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    return Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path}/mlflow.db")


class NoServices:
    """The services of a flow without runs, which record when they are closed."""

    def __init__(self, project: Project, scale: Any) -> None:
        self.project, self.tags, self.is_closed = project, {}, False
        self.tracker: Any = SimpleNamespace(publish=lambda report: "run")
        self.display: Any = SimpleNamespace(say=lambda text: None)
        self.force, self.code, self.meter = False, "strict", Meter(project.state)

    def start_workers_early(self, num_to_train: int, measurements: object) -> None:
        """Start nothing."""

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(("name", "key"), [("fashion-mnist", "comparison-fashion-mnist"), ("My_birds", "comparison-my-birds")])
def test_prefect_takes_the_page_of_any_name(name: str, key: str) -> None:
    from prefect.artifacts import MarkdownArtifact  # seconds, which the collection of tests need not take

    assert MarkdownArtifact(key=artifact_key("comparison", name), markdown="").key == key


def test_each_table_is_worked_out_once_and_the_index_is_written_once_when_the_workers_have_ended(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, written, closed = Counter[str](), Counter[str](), []
    services = NoServices(project, None)
    work_out, write = table_pages.shown_table, table_pages.write_whole

    def counted(name: str, *rest: Any) -> Any:
        shown[name] += 1
        closed.append(services.is_closed)
        return work_out(name, *rest)

    def noted(path: Path, content: str) -> None:
        written[path.name] += 1
        write(path, content)

    runs = [SimpleNamespace(dataset="d", table=name, is_smoke=False) for name in NAMES]
    for name, stand_in in {
        "open_project": lambda: project,
        "Services": lambda *_: services,
        "requested_runs": lambda project, request, say: (load_params(project.params_file), runs),
        "_prepare_all": lambda *_: {},
        "run_chains": lambda *_, **__: ([], []),
    }.items():
        monkeypatch.setattr(flows.reproduce, name, stand_in)

    def away(*_: object, **__: object) -> None:
        raise httpx.ConnectError("All connection attempts failed")

    monkeypatch.setattr(flows.reproduce, "create_markdown_artifact", away)  # Prefect's server, for a moment
    monkeypatch.setattr(table_pages, "shown_table", counted)
    monkeypatch.setattr(table_pages, "write_whole", noted)
    reports = flows.reproduce.reproduce.fn(Request(tables=tuple(NAMES)))
    assert [report.title for report in reports] == NAMES
    assert shown == dict.fromkeys(NAMES, 1)
    assert written["index.html"] == 1
    assert all(closed)


@pytest.mark.parametrize("is_smoke", [False, True])
def test_the_page_of_a_table_lists_a_failed_run_once(is_smoke: bool, project: Project) -> None:
    name = "softtriple/table1"
    spec = runs_of(name, load_table(name), Choice(rows=("softtriple",), smoke=is_smoke))["cub200"][0]
    failure = Failure(spec.model_copy(update={"is_smoke": is_smoke}), "no memory")
    services: Any = NoServices(project, None)
    [report] = flows.reports.write_reports([failure.spec], (), [failure], load_params(project.params_file), services)
    assert report.page.count("no memory") == 1
    assert (report.page, report.line) == (report.path.read_text(), f"{name}: 0 runs, 1 failed; page: {report.path}")


@pytest.mark.parametrize("fail_fast", [False, True])
def test_a_dataset_that_cannot_be_prepared_is_reported_as_its_failed_runs(
    fail_fast: bool, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [*specs("softmax", seeds=(0, 1)), *specs("softmax", dataset="fashion-mnist")]
    reported: list[Any] = []

    def prepare_all(runs: Any, params: Any, services: Any, unprepared: dict[str, DataError] | None) -> dict[str, str]:
        assert (unprepared is None) == fail_fast
        if unprepared is None:
            raise DataError("damaged")
        unprepared["synthetic"] = DataError("damaged")
        return {"fashion-mnist": "its record"}

    for name, stand_in in {
        "open_project": lambda: project,
        "Services": lambda *_: NoServices(project, None),
        "requested_runs": lambda project, request, say: (PARAMS, runs),
        "_prepare_all": prepare_all,
        "run_chains": lambda runs, *_: ([outcome(spec) for spec in runs], []),
        "write_reports": lambda runs, outcomes, failures, *_: reported.extend((outcomes, failures)) or [],
        "record_reports": lambda *_: None,
    }.items():
        monkeypatch.setattr(flows.reproduce, name, stand_in)
    if fail_fast:
        with pytest.raises(DataError, match="damaged"):
            flows.reproduce.reproduce.fn(Request(fail_fast=True))
        return
    with pytest.raises(RunsFailedError, match=r"^2 of 3 runs failed; the first: synthetic / softmax / seed 0: damaged$") as failed:
        flows.reproduce.reproduce.fn(Request())
    assert not failed.value.unforeseen, "exit code 2"
    outcomes, failures = reported
    assert [one.spec for one in outcomes] == runs[2:]
    assert [failure.spec for failure in failures] == runs[:2]


def test_a_table_shows_the_runs_that_ended_before_the_flow_does(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does an error end the flow then."""
    name = "project/glyphs"
    runs = runs_of(name, load_table(name), Choice(("softmax",), ("glyphs-2000",), seeds=(0, 1, 2, 3)))["glyphs-2000"]
    failure = Failure(runs[2], "no memory")

    def run_chains(runs: Any, prepared: Any, services: Any, add: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(flows.reports, "add_runs", lambda *given: 1 / 0)
            add([outcome(runs[3])], ())
        add([outcome(spec) for spec in (*runs[:2], runs[3].model_copy(update={"is_smoke": True}))], [failure])
        raise KeyboardInterrupt

    for replaced, stand_in in {
        "open_project": lambda: project,
        "Services": lambda *_: NoServices(project, None),
        "requested_runs": lambda project, request, say: (PARAMS, runs),
        "_prepare_all": lambda *_: {},
        "run_chains": run_chains,
    }.items():
        monkeypatch.setattr(flows.reproduce, replaced, stand_in)
    with pytest.raises(KeyboardInterrupt):
        flows.reproduce.reproduce.fn(Request(tables=(name,)))
    assert "results not added to their tables before the end of the flow: division by zero" in caplog.text
    result = load_result(project, name)
    assert [run.seed for run in result.runs] == [0, 1]
    assert [(run.seed, run.reason) for run in result.failed] == [(2, "no memory")]


def test_the_index_lists_every_table_by_the_pages_that_are_there_and_reads_no_other_result(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(project: Project, name: str) -> TableResult:
        assert name in {"project/standing", "softtriple/table2"}, f"{name} may be damaged"
        return TableResult(name=name)

    monkeypatch.setattr(table_pages, "load_result", load)
    params, site = load_params(project.params_file), project.root / table_pages.SITE
    for name in ("project/standing", "softtriple/table2"):  # writing the second page keeps the first in the index
        table_pages.write_site(project, params, [name])
    (site / "softtriple/table2.json").write_text("{}")  # of another version
    table_pages.write_site(project, params, ["project/standing"])
    index = (site / table_pages.INDEX).read_text()
    assert index.count("<li>") == len(table_names()) - 1, "the standing comparison has no measurement, and its results may be elsewhere"
    assert 'href="softtriple/table2.html"' in index
    assert [name for name in table_names() if f"<code>dml reproduce {name}</code>" not in index] == ["project/standing"]
