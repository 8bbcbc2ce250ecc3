"""Tables of every verb at several widths of the terminal: whole names, no line too long, omitted columns named, deciding columns shown."""

import ast
import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from dml_core.data import check
from dml_core.data.check import CheckReport
from dml_core.data.check import Finding as CheckFinding
from dml_core.data.store.rows import Counts
from dml_core.index.items import Item
from flows.cli import columns, data, models, plan, search, session, stack, tables, tracking, tune, verify
from flows.cli.columns import Column
from tasks.doctor import Finding
from tasks.models import listing, searching
from tasks.plans.progress import Measured
from tasks.reports.kit import markdown_table
from tasks.runs.params.comparison import variants_on
from tasks.runs.params.file import load_params
from tasks.tables import view
from tasks.tables.file import load_table, table_names
from tasks.tracking import versions as registry
from tasks.watch.records import RowVerdict, Verdict
from tasks.workers.progress import ProgressDisplay
from tests.conftest import ROOT
from tests.flows import terminal
from tests.tasks.reports.test_compare import published

WIDTHS = (60, 80, 120, 200)
PARAMS = load_params(ROOT / "params.yaml")
COMPARISON = PARAMS.comparison
RUNS = [f"{dataset}/{variant}/10" for dataset in COMPARISON.datasets for variant in COMPARISON.variants]
METRICS = ("recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "map_at_r", "r_precision", "nmi")
PATHS = [f"{folder}/{'very-' * 12}long-name-{number}.jpg" for number, folder in enumerate(("a", "b"))]
FRAME = "│┃┏┡└"
TABLE_ROW = "discriminative/table7:discriminative as_published best_validation:cars196"


# ---------------------------------------------------------------- a table of each verb, with the longest names that occur


def of_models(patch: pytest.MonkeyPatch) -> list[str]:
    scores = {"validation/recall@1": 0.5, "recall@1": 1.0, "map@r": 0.123}
    listed = tuple(listing.ListedModel(run, scores, 25_000_000, 100_000_000, "0123456789abcdef", 11) for run in RUNS)
    patch.setattr(listing, "list_models", lambda *_: (listed, {}))
    models.list_(None)
    return RUNS


def of_registry(patch: pytest.MonkeyPatch) -> list[str]:
    names = [f"dml-{dataset}" for dataset in COMPARISON.datasets]
    versions = [
        SimpleNamespace(name=name, number=12, aliases=["best", "champion"], gate="better by 3.4 points, p = 0.0123") for name in names
    ]
    patch.setattr(registry, "registered_versions", lambda *_: versions)
    models._print_registry("uri", None)
    return [f"models:/{name}/12" for name in names]


def of_comparison(patch: pytest.MonkeyPatch) -> list[str]:
    runs = tuple(
        published(variant, seed, **dict.fromkeys(METRICS, 0.3 + 0.01 * place + 0.001 * seed * (place % 3)))
        for place, variant in enumerate(COMPARISON.variants)
        for seed in range(11)
    )
    patch.setattr(tracking, "published_runs", lambda *_: [])
    patch.setattr(tracking, "comparable_runs", lambda *_: (runs, ()))
    tracking.compare()
    return [*COMPARISON.variants]


def of_runs(patch: pytest.MonkeyPatch) -> list[str]:
    plan.plan(["heated_up_softmax/table1"])
    return [f"{key} as_published" for key, row in load_table("heated_up_softmax/table1").rows.items() if row.kind != "quoted"]


def of_planned_tables(patch: pytest.MonkeyPatch) -> list[str]:
    patch.setattr(plan, "MANY_RUNS", 0)
    names = ["heated_up_softmax/table1", "heated_up_softmax/table2"]
    plan.plan(names)
    return names


def of_tables(patch: pytest.MonkeyPatch) -> list[str]:
    tables.list_tables()
    return [name for name in table_names() if not name.startswith("project/")]


def of_shown_table(patch: pytest.MonkeyPatch, name: str = "project/claims") -> list[str]:
    tables.show(name)
    return [row.label for row in load_table(name).rows.values()]


def of_many_metrics(patch: pytest.MonkeyPatch) -> list[str]:
    return of_shown_table(patch, "discriminative/table3")


def of_search(patch: pytest.MonkeyPatch) -> list[str]:
    patch.setattr(searching, "kind_line", lambda _: "exact")
    classes = ["triplet-batch-hard", "[bold]kind[/bold]"]
    hits = [searching.Hit(rank, 0.5, Item(path, label)) for rank, (path, label) in enumerate(zip(PATHS, classes, strict=True), start=1)]
    search._print_answers(SimpleNamespace(metric="cosine"), [searching.Answer("query.jpg", b"", hits)])  # type: ignore[arg-type]
    return [*PATHS, *classes]


def of_gc(patch: pytest.MonkeyPatch) -> list[str]:
    keys = [f"evaluate/{'0123456789abcdef' * 2}{number}" for number in range(3)]
    unused = [SimpleNamespace(key=key, num_bytes=123_456_789, touched=0.0) for key in keys]
    patch.setattr(stack, "find_unused", lambda *_: (unused, 1, 0))
    stack.gc()
    return keys


def of_doctor(patch: pytest.MonkeyPatch) -> list[str]:
    findings = [
        Finding("parameters", PATHS[0], "ok", "2 datasets, 12 variants"),
        Finding(
            "schedules", "work pool dml", "wrong", "no worker is online", "prefect worker start --pool dml --name a-worker-with-a-name"
        ),
    ]
    patch.setattr(stack, "examine", lambda _: findings)
    with pytest.raises(Exception, match="1 of 2 checks failed: schedules"):
        stack.doctor()
    return ["parameters", "schedules"]


def of_stack(patch: pytest.MonkeyPatch) -> list[str]:
    names = ["prefect-server", "ray-head", "mlflow"]
    servers = [SimpleNamespace(name=name, state="up", pid=4_123_456, address="127.0.0.1:54321", log=PATHS[0]) for name in names]
    patch.setattr(stack.lifecycle, "status", lambda _: servers)
    stack.status()
    return [*names, "127.0.0.1:54321", PATHS[0]]


def of_check(patch: pytest.MonkeyPatch) -> list[str]:
    findings = [CheckFinding("duplicates across roles", 12, tuple(PATHS))]
    counts = {"train": Counts(num_images=5864, num_classes=100)}
    report = CheckReport(counts, {"train": (41, 60)}, counts, findings, [], (100, 200, 300), 0)
    patch.setattr(check, "check_dataset", lambda *_: report)
    data.data_check("synthetic")
    return PATHS


def of_search_for_settings(patch: pytest.MonkeyPatch) -> list[str]:
    settings = "loss.options.centres_per_class=10, optimiser.groups.loss.learning_rate=0.00123, loss.options.margin=0.01"
    header = ["trial", "pairs of fold and seed", "recall@1, mean ± standard deviation", "settings"]
    named = SimpleNamespace(title="project/standing/softtriple on fashion-mnist", table="project/standing", row="softtriple", column="x")
    tuned = SimpleNamespace(
        search=named, rows=[header, ["12", "16", "0.512 ± 0.012", settings]], file=SimpleNamespace(says="", training={}), place="p"
    )
    tune._print_tuned(tuned, PARAMS)  # type: ignore[arg-type]
    return ["0.512 ± 0.012", *settings.split(", ")]


Printer = Callable[[pytest.MonkeyPatch], list[str]]


def of_verification(patch: pytest.MonkeyPatch) -> list[str]:
    names = [*(f"{dataset}/{variant}" for dataset in COMPARISON.datasets for variant in COMPARISON.variants), TABLE_ROW]
    reason = "the loss differs from step 123 of epoch 10 on: 8.579033 -> 8.707517, in an equal environment"
    rows = tuple(RowVerdict(row=name, seed=10, verdict=Verdict.DRIFTED, reason=reason) for name in names)
    patch.setattr("tasks.watch.summary.first_sentence", lambda verification, reference: "10 rows are verified.")
    verified: Any = SimpleNamespace(verifications=(SimpleNamespace(name="synthetic", rows=rows),), references={}, folder=None)
    verify._print(verified)
    return names


CASES: dict[Printer, tuple[str, set[str]]] = {  # -> the function that prints, and titles of columns that are never omitted
    of_models: ("models.list_", {"run", "validation recall@1", "recall@1"}),
    of_registry: ("models._print_registry", {"registered model", "aliases", "reason"}),
    of_comparison: ("tracking._print_comparison", {"variant", "recall@1", "difference to softmax (95 %, simultaneous)"}),
    of_runs: ("plan._print_runs", {"row", "dataset", "seed", "train"}),
    of_planned_tables: ("plan._print_tables", {"table", "runs", "to train", "time"}),
    of_tables: ("tables._print_states", {"table", "state", "title"}),
    of_shown_table: ("tables.show", {"row", "values", "csc fashion-mnist-200"}),
    of_many_metrics: ("tables.show", {"row", "values"}),
    of_search: ("search._print_answers", {"rank", "cosine", "class", "name"}),
    of_gc: ("stack.gc", {"step", "MB"}),
    of_doctor: ("stack.doctor", {"check", "status", "finding"}),
    of_stack: ("stack.status", {"server", "state", "address", "log"}),
    of_check: ("data._print_check", {"part", "files", "published or examples"}),
    of_verification: ("verify._print", {"row", "seed", "verdict", "comparison"}),
    of_search_for_settings: ("tune._print_tuned", {"trial", "recall@1, mean ± standard deviation", "settings"}),
}


def printing_functions() -> set[str]:
    """Return every function of the command that prints a table."""
    found = set()
    for path in (ROOT / "flows/cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "print_table(" in ast.unparse(node) and node.name != "print_table":
                found.add(f"{path.stem}.{node.name}")
    return found


def test_every_table_is_a_case_and_printed_by_the_one_helper() -> None:
    assert printing_functions() - {"columns._print_markdown_table"} == {function for function, _ in CASES.values()}
    sources = [path for folder in ("flows", "tasks") for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in sources if re.search(r"rich\.table|from rich import table", path.read_text())] == ["columns.py"]


# ---------------------------------------------------------------- the matrix


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project without runs in the working directory."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    configured = ("MLFLOW_", "PREFECT_", "RAY_", "DML_", "AWS_")
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if not name.startswith(configured)})


def table_of(printed: str) -> dict[str, str]:
    """Return column title -> all text of the column, both without spaces and line breaks; the columns of several tables are joined."""
    titles: list[str] = []
    found: dict[str, str] = {}
    begins = True
    for line in printed.splitlines():
        if line[:1] == "┏":
            titles, begins = [], True
        elif line[:1] == "┃":
            cells = [cell.strip() for cell in line.strip("┃").split("┃")]
            titles = [f"{title} {cell}".strip() for title, cell in zip(titles or [""] * len(cells), cells, strict=True)]
        elif line[:1] == "│":
            cells = [re.sub(r"\s", "", cell) for cell in line.strip("│").split("│")]
            found = {title: found.get(title, "") + cell for title, cell in zip(titles, cells, strict=True)}
            begins = False
    assert not begins, printed
    return found


@cache
def printed_by(case: Printer) -> tuple[tuple[tuple[Column, ...], str | None], list[str]]:
    """Return the columns and the title of the table that a verb prints, and the names that must be in it."""
    calls: list[tuple[tuple[Column, ...], str | None]] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (data, models, plan, search, stack, tables, tracking, tune, verify):
            patch.setattr(module, "print_table", lambda *given_columns, title=None: calls.append((given_columns, title)))
        names = case(patch)
    (call,) = calls
    return call, names


def printed_at(width: int | None, case: Printer, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    """Return the table of a verb as printed at a width (None: into a pipe), and the names that must be in it."""
    patch.setattr(columns, "terminal_width", lambda: width)
    (given_columns, title), names = printed_by(case)
    capsys.readouterr()
    columns.print_table(*given_columns, title=title)
    return capsys.readouterr().out, names


def omitted_in(printed: str) -> set[str]:
    note = re.search(r"Omitted at a width of \d+: (.*?)\. A wider", " ".join(printed.split()))
    return set(note[1].split(", ")) if note else set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_names_are_whole_lines_fit_and_omitted_columns_are_named(
    case: Printer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped, names = printed_at(None, case, monkeypatch, capsys)
    every = table_of(piped)
    assert omitted_in(piped) == set()
    num_shown = 0
    for width in WIDTHS:
        printed, _ = printed_at(width, case, monkeypatch, capsys)
        shown = table_of(printed)
        text = " ".join(shown.values())
        assert [name for name in names if re.sub(r"\s", "", name) not in text] == [], f"{width}: {printed}"
        assert "…" not in printed
        assert [line for line in printed.splitlines() if line[:1] in FRAME and cell_len(line) > width] == []
        assert CASES[case][1] <= shown.keys(), f"{width}: {printed}"
        assert shown.keys() | omitted_in(printed) == every.keys(), f"{width}: {printed}"
        assert len(shown) >= num_shown, "a wider terminal shows no fewer columns"
        num_shown = len(shown)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_pipe_gets_each_row_on_one_line(case: Printer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed, names = printed_at(None, case, monkeypatch, capsys)
    rows = [line for line in printed.splitlines() if line[:1] == "│"]
    assert all(any(name in row for row in rows) for name in names)


def test_the_list_of_tables_is_one_short_line_each_and_says_how_to_read_on(capsys: pytest.CaptureFixture[str]) -> None:
    tables.list_tables()
    *table, advice = capsys.readouterr().out.splitlines()
    names = [name for name in table_names() if not name.startswith("project/")]
    assert [line.split()[1] for line in table if line[0] == "│"] == names
    assert max(map(len, table)) < 200
    assert "dml plan TABLE" in advice
    assert len(advice) < 120


def test_the_state_of_a_table_counts_stand_ins_once_they_are_measured() -> None:
    def said(how: str, *of_stand_in: int, failed: int = 0, failed_on_stand_in: int = 0) -> str:
        stand_in = Measured(*of_stand_in, 1, failed_on_stand_in)
        state = SimpleNamespace(how=how, own_data=Measured(5, 2, 1, 3, failed), stand_in=stand_in)
        return tables._how(state)  # type: ignore[arg-type]

    assert [said(how, 3, 0, 0) for how in ("not run", "partly", "stale", "done")] == [
        "not run",
        "partly, 2 of 5",
        "stale, 1 of 5",
        "done, 3 seeds",
    ]
    assert said("not run", 3, 2, 0) == "not run; stand-in: 2 of 3"
    assert said("failed", 3, 0, 0, failed=2) == "failed, 2 of 5"
    assert said("partly", 3, 0, 0, failed=1) == "partly, 2 of 5, 1 failed"
    assert said("not run", 3, 0, 0, failed_on_stand_in=1) == "not run; stand-in: 0 of 3, 1 failed"
    assert said("partly", 3, 0, 1) == "partly, 2 of 5; stand-in: 0 of 3, 1 stale"


def test_a_plan_of_no_runs_prints_why_and_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        {"tables": ["sgsl/figure3"], "track": "common"},
        {"tables": ["sgsl/figure3", "heated_up_softmax/figure3"], "track": "common"},
    ):
        plan.plan(**words)  # type: ignore[arg-type]
        *reasons, last = capsys.readouterr().out.splitlines()
        assert last == "nothing can be run"
        assert reasons
        assert all("is not on the common track" in line for line in reasons)
    plan.plan(["discriminative/table3", "softtriple/table1"], row=["softtriple"], dataset=["cars196"])
    assert capsys.readouterr().out == "nothing can be run: no row matches on these datasets\n"


def test_commands_to_type_are_not_in_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for case, command in (
        (of_doctor, "schedules: prefect worker start --pool dml --name a-worker-with-a-name\n"),
        (of_many_metrics, "start it with dml reproduce discriminative/table3\n"),
    ):
        monkeypatch.setattr(columns, "terminal_width", lambda: 60)
        case(monkeypatch)
        printed = capsys.readouterr().out
        assert command in printed
        assert not any(re.search(r"\b(dml|prefect) \w", line) for line in printed.splitlines() if line[:1] == "│")


def test_the_confidence_set_of_the_best_is_bold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(columns, "Console", partial(Console, force_terminal=True))
    tracking._print_comparison(
        "title",
        [["variant", "seeds", "recall@1", "difference"], ["a", "3", "52.0", "+"], ["b", "3", "40.0", "-"]],
        SimpleNamespace(best_set=frozenset("a")),  # type: ignore[arg-type]
    )
    printed = capsys.readouterr().out
    assert [f"\x1b[1m{name}" in printed for name in "ab"] == [True, False]
    assert "per cent" in printed


# ---------------------------------------------------------------- reports, which are Markdown

PAGE = """# Title

A [sentence].

| row | values | recall@1 cub200 | recall@2 cub200 |
| --- | --- | --- | --- |
| The first system with a long name | published, own | 60.5 | 70.5 |
|  | as_published, 3 seeds | **60.5 ± 1.2** compatible, mean equal | 71.0 ± 1.0 |
| The second | published, own | 50.5 | 60.5 |

The end.
"""


def test_a_pipe_gets_a_report_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(columns, "terminal_width", lambda: None)
    columns.print_page(PAGE)
    assert capsys.readouterr().out == f"{PAGE}\n"


def test_a_terminal_gets_a_report_with_fitted_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for width in (60, 80, 120, 200):
        monkeypatch.setattr(columns, "terminal_width", lambda width=width: width)
        columns.print_page(PAGE)
        printed = capsys.readouterr().out
        assert printed.startswith("# Title\n\nA [sentence].\n\n┏")
        assert printed.endswith("\n\nThe end.\n\n")
        shown = table_of(printed)
        assert shown["row"] == "ThefirstsystemwithalongnameThesecond"
        assert shown["recall@1 cub200"] == "60.560.5±1.2compatible,meanequal50.5"
        assert max(cell_len(line) for line in printed.splitlines() if line[:1] in FRAME and line) <= width


def test_a_terminal_gets_every_value_of_a_row_whose_name_has_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(columns, "terminal_width", lambda: 80)
    columns.print_page(markdown_table([["row", "values", "R@1"], ["a | b", "paper", "61.0"], ["**c|", "**mine**, new", "62.0"]]))
    assert table_of(capsys.readouterr().out) == {"row": "a|b**c|", "values": "papermine,new", "R@1": "61.062.0"}
    columns.print_page(markdown_table([["row"], ["only"]]))
    assert table_of(capsys.readouterr().out) == {"row": "only"}


def test_the_report_of_the_comparison_keeps_names_and_differences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for width in (60, 80, 120, 200):
        monkeypatch.setattr(columns, "terminal_width", lambda width=width: width)
        columns.print_page((ROOT / "results/synthetic/report.md").read_text())
        printed = capsys.readouterr().out
        shown = table_of(printed)
        assert {"variant", "recall@1", "difference to softmax (95 %, simultaneous)"} <= shown.keys()
        assert shown["variant"] == "".join(variants_on(PARAMS, "synthetic"))
        assert max(cell_len(line) for line in printed.splitlines() if line[:1] in FRAME and line) <= width
    assert "recall@8" in shown


# ---------------------------------------------------------------- the helper


def test_brackets_and_styles_of_values_are_printed_literally(capsys: pytest.CaptureFixture[str]) -> None:
    columns.print_table(Column("[b]name[/b]", ["[red]x[/red]", "a[0]"]), title="[i]title[/i]")
    assert {"[b]name[/b]", "[red]x[/red]", "a[0]", "[i]title[/i]"} <= set(capsys.readouterr().out.split())


OBEYED = "a\x1b]0;title\x07\x1b[8m\x9b2J\r\u202eb"  # a name that would set a terminal's title, hide text and reverse the rest of the line


def test_no_verb_prints_a_character_of_a_name_that_a_terminal_obeys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = SimpleNamespace(
        num_items=2, num_dimensions=3, metric="cosine", model_identity="0123", model_source=OBEYED, reason="", found=None, kind="exact"
    )
    index = SimpleNamespace(metric="cosine", folder=Path(OBEYED), nbytes=1, info=info, kind="exact")
    hits = [searching.Hit(1, 0.5, Item(OBEYED, OBEYED)), searching.Hit(2, 0.4, Item("b", "c"))]
    row = RowVerdict(row="own/softmax", seed=0, verdict=Verdict.DRIFTED, reason=OBEYED, changed=(OBEYED,))
    verification = SimpleNamespace(rows=(row,), name=OBEYED, skipped=(), too_long=())
    runs = tuple(published(variant, seed, recall_at_1=0.5) for variant in ("softmax", OBEYED) for seed in range(3))
    monkeypatch.setattr(tracking, "published_runs", lambda *_: [])
    monkeypatch.setattr(tracking, "comparable_runs", lambda *_: (runs, (OBEYED,)))
    shown = view.shown_table
    hostile = {"states": OBEYED, "conclusions": [OBEYED], "title": OBEYED, "unresolved": [OBEYED], "left_out": [OBEYED]}
    monkeypatch.setattr(view, "shown_table", lambda *values, **others: shown(*values, **others).model_copy(update=hostile))
    for width in (None, 60):
        monkeypatch.setattr(columns, "terminal_width", lambda width=width: width)
        columns.print_table(Column("name", [OBEYED, Text(OBEYED, "bold"), "two\nlines"]), title=OBEYED)
        search._print_answers(index, [searching.Answer(OBEYED, b"", hits)])  # type: ignore[arg-type]
        search._print_index(index)  # type: ignore[arg-type]
        verify._print(SimpleNamespace(verifications=[verification], references={}, folder=None))  # type: ignore[arg-type]
        tracking.compare()
        tables.show("softtriple/table1", as_json=False)
        columns.print_page(f"# {OBEYED}")
        session.say(OBEYED)
        ProgressDisplay(Console(stderr=True)).say(OBEYED)
        printed = "".join(capsys.readouterr())
        assert len(printed) > 500
        assert {letter for letter in printed if not letter.isprintable()} <= {"\n", *("\x1b" if width else "")}
        assert set(re.findall("\x1b.{3}", printed)) <= {"\x1b[0m", "\x1b[1m", "\x1b[3m"}, "only the styles of rich"


PRINTED_AS_IT_IS = {"json.dumps", "index.info.model_dump_json", "shown.model_dump_json"}


def test_verbs_print_lines_by_the_one_helper_that_escapes_them() -> None:
    """Exceptions are JSON, whose texts have no control characters, and standard error, which has helpers."""
    used = 0
    for path in sorted((ROOT / "flows/cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else None
            used += name == "print_lines"
            if name != "print" or path.stem in ("app", "columns", "session"):
                continue
            assert isinstance(node, ast.Call)
            (given,) = node.args
            is_json = isinstance(given, ast.Call) and ast.unparse(given.func) in PRINTED_AS_IT_IS
            assert is_json or any(word.arg == "file" for word in node.keywords) or ast.unparse(given) == "text", (
                f"{path.stem}: {ast.unparse(node)}"
            )
    assert used > 60


def test_brackets_of_a_name_are_no_markup_in_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "Console", partial(Console, force_terminal=True))
    with data._bar("checking [/x]") as move:
        move(1, 2)


def test_columns_are_omitted_in_their_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given_columns = [Column("name", ["a" * 20]), Column("second", ["b" * 20], drop=2), Column("first", ["c" * 20], drop=1)]
    shown = {}
    for width in (70, 69, 46, 24, 23):
        monkeypatch.setattr(columns, "terminal_width", lambda width=width: width)
        columns.print_table(*given_columns)
        shown[width] = capsys.readouterr().out
    assert "Omitted" not in shown[70]  # 3 columns of 20, 3 characters of frame each, and one
    assert table_of(shown[69]).keys() == {"name", "second"}
    assert omitted_in(shown[69]) == {"first"}
    assert table_of(shown[46]).keys() == {"name"}
    assert table_of(shown[24])["name"] == table_of(shown[23])["name"] == "a" * 20
    assert sum(line.startswith("│") for line in shown[24].splitlines()) == 1
    assert sum(line.startswith("│") for line in shown[23].splitlines()) == 2, "folded"


WORDS = st.text("ab c", min_size=1, max_size=40)
COLUMN = st.builds(Column, WORDS, st.lists(WORDS, min_size=2, max_size=2), drop=st.none() | st.integers(1, 3), wraps=st.booleans())


@given(
    st.lists(COLUMN, min_size=1, max_size=6).filter(lambda columns: any(column.drop is None for column in columns)), st.integers(30, 200)
)
def test_any_columns_fit_any_width(given_columns: Sequence[Column], width: int) -> None:
    shown, widths = columns._fit(given_columns, width)
    assert sum(widths) + 3 * len(widths) + 1 <= width
    assert min(widths) >= 1
    assert all(column in shown for column in given_columns if column.drop is None)
    omitted = [column.drop for column in given_columns if column not in shown]
    assert not omitted or max(omitted) <= min((column.drop for column in shown if column.drop is not None), default=4)
    if any(column.drop is not None for column in shown):
        assert all(size >= column.least_width for column, size in zip(shown, widths, strict=True)), "nothing folds before it is omitted"


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 120])
def test_the_width_is_that_of_the_terminal(width: int) -> None:
    printed, code = terminal.run_in_terminal(["tables", "show", "project/claims"], width)
    assert code == 0, printed
    lines = terminal.plain(printed).splitlines()
    assert max(cell_len(line) for line in lines if line[:1] in FRAME) <= width
    assert any(line.startswith(f"Omitted at a width of {width}: ") for line in lines)
    assert "SoftTriple,tencentres" in "".join(table_of("\n".join(lines)).values())


def test_every_verb_that_prints_a_table_is_recorded() -> None:
    """A recording names a verb as the module of its function is named, except for those below."""
    verbs = {command.split()[0] for command in terminal.COMMANDS}
    assert {function.partition(".")[0] for function, _ in CASES.values()} - {"tracking"} <= verbs
    assert {"compare", "doctor", "gc"} <= verbs
