"""Names of the tables' flow runs on Prefect's pages, and the parameters that its deployments may set."""

import inspect

import pytest
import yaml

from flows.table import flow_run_name, table
from tasks.tables.file import paper_tables
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"tables": ["softtriple/table1"]}, "softtriple/table1"),
        (
            {"tables": ["softtriple/table1"], "rows": ["softtriple"], "seeds": [0, 1], "smoke": True},
            "softtriple/table1: softtriple, seeds 0, 1, smoke",
        ),
        ({"tables": ["sgsl/table1", "sgsl/table2"], "track": "common"}, "2 tables (sgsl/table1 ...): common track"),
        ({"tables": None, "prepared_only": True, "variant": "as_released"}, "all tables: as_released, on what is prepared"),
    ],
)
def test_a_flow_run_is_called_by_its_tables_and_rows(asked: dict[str, object], name: str) -> None:
    assert flow_run_name(asked) == name


def test_the_form_offers_the_tables_and_the_deployments_fit_it() -> None:
    offered = table.parameters.properties["tables"]
    assert set(paper_tables()) <= set(offered["anyOf"][0]["items"]["enum"])
    deployments = {entry["name"]: entry for entry in yaml.safe_load((ROOT / "infra/prefect.yaml").read_text())["deployments"]}
    for name in ("table", "weekly"):
        assert deployments[name]["entrypoint"] == "flows/table.py:table"
        assert set(deployments[name]["parameters"]) <= set(inspect.signature(table.fn).parameters)
        table.validate_parameters(deployments[name]["parameters"])
    assert deployments["weekly"]["parameters"]["prepared_only"]
    assert "tables" not in deployments["weekly"]["parameters"]
    assert deployments["weekly"]["schedules"]
