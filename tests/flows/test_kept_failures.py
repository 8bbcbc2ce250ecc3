"""A flow or a step that fails leaves no file in the folder of finished records."""

from pathlib import Path
from typing import Any

import pytest
from prefect import Flow, Task, flow, task
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, temporary_settings

from dml_core.errors import DataError
from flows import chain, reproduce, tune
from flows.reuse.step_cache import SealedJSON, forget_failure

pytestmark = pytest.mark.slow


def test_every_flow_and_every_kept_step_has_the_hook() -> None:
    found_here = [found for module in (chain, reproduce, tune) for found in vars(module).values()]
    kept = [found for found in found_here if isinstance(found, Flow) or (isinstance(found, Task) and found.persist_result)]
    assert {found.name for found in kept} >= {"reproduce", "run", "tune", "train", "embed", "evaluate"}
    for found in kept:
        assert forget_failure in found.on_failure_hooks, found.name


def test_only_finished_records_stay(prefect: None, tmp_path: Path) -> None:
    @task(persist_result=True, result_serializer=SealedJSON(), cache_key_fn=lambda _, given: str(given["key"]), on_failure=[forget_failure])
    def step(key: str, broken: bool) -> dict[str, Any]:
        if broken:
            raise DataError("the step")
        return {"key": key}

    @flow(on_failure=[forget_failure])
    def failing(fails: str) -> None:
        step("finished", False)
        if fails == "the step":
            step.submit("broken", True).result()
        raise DataError("the flow")

    with temporary_settings({PREFECT_LOCAL_STORAGE_PATH: tmp_path / "kept"}):
        for fails in ("the step", "the flow"):
            with pytest.raises(DataError, match=fails):
                failing(fails)
            assert [path.name for path in (tmp_path / "kept").iterdir()] == ["finished"]
