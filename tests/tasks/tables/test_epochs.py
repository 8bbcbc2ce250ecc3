"""Epochs of its runs that a table scores; one training serves all of them."""

import pytest

from dml_core.config import merge, parse
from dml_core.errors import ConfigError
from tasks.runs.identity import step_identities
from tasks.runs.params.file import load_params
from tasks.runs.params.requested import standing_runs
from tasks.runs.protocols import load_protocol
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import RunSpec
from tasks.tables.choice import Choice
from tasks.tables.file import TableFile, load_table, paper_tables
from tasks.tables.result import FailedRun, MeasuredRun, TableResult, TableRun
from tasks.tables.runs import runs_of
from tasks.tables.smoke import make_small
from tests.conftest import ROOT

DATASET = DatasetRecord(name="d", folder="/somewhere", digest="0123", counts={}, source="s")
NAMES = [name for name in paper_tables() if any(row.is_run for row in load_table(name).rows.values())]
TML = "tuplet_margin/table2"


def changed_table(**row_changes: object) -> TableFile:
    values = load_table(TML).model_dump(mode="json", exclude_defaults=True)
    return parse(TableFile, merge(values, {"rows": {"tml": row_changes}}), TML)


def labels(**choice: object) -> list[str]:
    table = choice.pop("table", load_table(TML))
    return [spec.label for spec in tml_runs(table, **choice)]  # type: ignore[arg-type]


def tml_runs(table: TableFile, **choice: object) -> list[RunSpec]:
    return runs_of(TML, table, Choice(("tml",), ("cars196",), **choice))["cars196"]  # type: ignore[arg-type]


def test_tuplet_margin_s_tables_show_the_oracle_beside_the_last_and_no_other_paper_s_does() -> None:
    assert {name.partition("/")[0] for name in NAMES} == {"tuplet_margin", "softtriple", "heated_up_softmax", "discriminative", "sgsl"}
    for name in NAMES:
        for specs in runs_of(name, load_table(name)).values():
            shown = {spec.evaluation.epoch for spec in specs}
            assert shown == ({"last", "oracle"} if name.startswith("tuplet_margin/") else {"last"}), name


@pytest.mark.parametrize("smoke", [False, True])
def test_last_and_oracle_are_one_training(smoke: bool) -> None:
    last, oracle = (make_small(spec) if smoke else spec for spec in tml_runs(load_table(TML)))
    assert (last.label.endswith("tml as_published"), oracle.label.endswith("tml as_published oracle")) == (True, True)
    assert smoke or oracle.title.endswith("cars196 / tml as_published oracle / seed 0")
    of_last, of_oracle = (step_identities(spec, DATASET) for spec in (last, oracle))
    assert [of_last[step] == of_oracle[step] for step in ("train", "embed", "evaluate")] == [True, False, False]
    if smoke:
        assert (last.training.num_epochs, last.training.keep_epochs) == (1, ("oracle",))


def test_epochs_chosen_by_cosines_are_not_scored_by_distances() -> None:
    values = load_table(TML).model_dump(mode="json", exclude_defaults=True)
    table = parse(TableFile, merge(values, {"evaluation": {"metric": "euclidean"}}), TML)
    with pytest.raises(ConfigError, match=f"{TML}: tml: evaluation: epoch 'oracle' is chosen by cosines"):
        tml_runs(table)
    assert {spec.evaluation.metric for spec in tml_runs(table, epochs=("last",))} == {"euclidean"}


def test_a_choice_scores_those_epochs_and_trains_what_it_would_without() -> None:
    assert labels(seeds=(0, 1)) == ["tml as_published", "tml as_published", "tml as_published oracle", "tml as_published oracle"]
    assert labels(epochs=("last",)) == ["tml as_published"]
    assert labels(epochs=("oracle",)) == ["tml as_published oracle"]
    (chosen,) = tml_runs(load_table(TML), epochs=("last",))
    assert chosen == tml_runs(load_table(TML))[0]


def test_a_row_may_list_its_own_and_a_best_one_on_validation_needs_classes_for_it() -> None:
    assert labels(table=changed_table(epochs=["last"])) == ["tml as_published"]
    held_out = changed_table(training={"validation": {"share": 0.2}}, epochs=["best_validation", "last"])
    assert labels(table=held_out) == ["tml as_published", "tml as_published best_validation"]
    with pytest.raises(ConfigError, match=r"table2: .*, cars196, as_published: .*'best_validation' needs classes that are held out"):
        labels(epochs=("best_validation",))


def test_a_protocol_names_epochs_that_there_are() -> None:
    assert load_protocol("tuplet_margin").epochs == ("last", "oracle")
    assert load_protocol("sgsl").epochs == ("last",)
    with pytest.raises(ConfigError, match="epochs"):
        changed_table(epochs=["best"])
    with pytest.raises(ConfigError, match="epochs"):
        changed_table(epochs=[])


def test_an_oracle_s_result_does_not_take_the_place_of_the_last_one_s() -> None:
    last = MeasuredRun(
        row="tml", variant="as_published", dataset="cars196", project_dataset="c", seed=0, identity="1", scores={}, figures="f",
        training={}, evaluation={},
    )  # fmt: skip
    oracle = last.model_copy(update={"epoch": "oracle", "identity": "2"})
    failed = FailedRun(**oracle.model_dump(include={*TableRun.model_fields}), reason="a reason")
    result = TableResult(name=TML, failed=(failed, failed.model_copy(update={"epoch": "last", "reason": "another"})))
    assert [(run.label, run.reason) for run in result.failed] == [("tml as_published oracle", "a reason"), ("tml as_published", "another")]
    result = result.updated((last,), (), None)
    assert [(run.place, run.reason) for run in result.failed] == [(oracle.place, "a reason")]
    result = result.updated((oracle,), (), None)
    assert [(run.epoch, run.identity) for run in result.runs] == [("last", "1"), ("oracle", "2")]
    assert result.failed == ()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["evaluation.epoch=oracle"], "must not choose the epoch on the test classes"),
        (["evaluation.epoch=best_validation"], r"does not keep; set keep_epochs: \[best_validation\]"),
        (["evaluation.epoch=best"], "evaluation.epoch"),
        (
            [
                "evaluation={role: validation, epoch: best_validation}",
                "comparison.protocol={validation: {share: 0.3}, keep_epochs: [best_validation]}",
            ],
            "'best_validation' is chosen on the classes that role 'validation' scores",
        ),
    ],
)
def test_the_standing_comparison_takes_no_oracle_and_no_epoch_that_it_does_not_keep(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        standing_runs(load_params(ROOT / "params.yaml", overrides))


def test_the_standing_comparison_may_be_scored_at_its_best_epoch_on_held_out_classes() -> None:
    settings = ["evaluation.epoch=best_validation", "comparison.protocol.validation={share: 0.3}"]
    load_params(ROOT / "params.yaml", [*settings, "comparison.protocol.keep_epochs=[best_validation]"])
