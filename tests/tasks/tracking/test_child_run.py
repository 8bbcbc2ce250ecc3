"""What MLflow shows of a run, compared with hand calculations."""

import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlflow.utils.validation import _validate_metric_name

from dml_core.training.history import Progress
from tasks.runs.surroundings import SURROUNDINGS
from tasks.tracking import child_run
from tasks.tracking.live import LiveCurves
from tests.conftest import small_training


@pytest.mark.parametrize("name", ["pull@anchor", "100%", "a//b", "/a", "a/", "a/../b", ".", "(x, y)", "a\\b"])
def test_mlflow_takes_a_part_of_a_loss_of_any_name(name: str) -> None:
    """It refused the first one after the training; parts of different names have different curves."""
    names = [point for point, _, _ in child_run.curve_points([{"epoch": 0, "step": 0, name: 1.0, f"{name}x": 1.0, "a/b": 1.0}])]
    for point in names:
        _validate_metric_name(point)
    assert len({*names}) == 6
    live = LiveCurves(SimpleNamespace(), "c", "i", SimpleNamespace())
    live(Progress(0, 1, 1, 1, 1.0, {name: 1.0}, epoch_ended=True))
    assert {(point, 1) for point in names if point.startswith("epoch/")} >= live._unsent.keys()


def test_a_history_becomes_points_of_steps_and_means_of_epochs() -> None:
    history = [
        {"epoch": 0, "step": 0, "loss": 4.0, "learning_rate_factor": 1.0},
        {"epoch": 0, "step": 1, "loss": 2.0, "learning_rate_factor": 0.5, "part": 1.0},
        {"epoch": 1, "step": 2, "loss": 1.0, "learning_rate_factor": 0.25},
    ]
    assert sorted(child_run.curve_points(history)) == sorted(
        [
            *(("train/loss", 4.0, 0), ("train/loss", 2.0, 1), ("train/loss", 1.0, 2), ("train/part", 1.0, 1)),
            *(("train/learning_rate_factor", 1.0, 0), ("train/learning_rate_factor", 0.5, 1), ("train/learning_rate_factor", 0.25, 2)),
            *(("epoch/loss", 3.0, 1), ("epoch/loss", 1.0, 2), ("epoch/part", 1.0, 1)),
        ]
    )


@pytest.mark.parametrize("num_steps", [1, 499, 500, 501, 1000, 1001, 99_999])
def test_a_long_curve_has_its_last_step_and_evenly_spaced_earlier_ones(num_steps: int) -> None:
    history = [{"epoch": step // 10, "step": step, "loss": float(step)} for step in range(num_steps)]
    steps = sorted(step for name, value, step in child_run.curve_points(history) if name == "train/loss" and value == step)
    (every,) = set(np.diff(steps)) or {1}
    assert min(num_steps, 250) <= len(steps) <= 500
    assert (steps[-1], steps[0] < every) == (num_steps - 1, True)
    assert sum(name == "epoch/loss" for name, _, _ in child_run.curve_points(history)) == -(-num_steps // 10)


def test_scores_are_parted_into_answers_and_what_explains_them() -> None:
    main, detail = child_run.score_metrics({"recall@1": 0.5, "nmi": 0.25, "recall@1_class_mean": 0.75})
    assert main == {"recall_at_1": 0.5, "nmi": 0.25}
    assert detail == {"detail/recall_at_1_class_mean": 0.75}


def test_settings_are_parted_into_changed_ones_and_defaults() -> None:
    training = small_training().model_dump(mode="json")
    changed, defaults = child_run.split_settings("d", "v", 2, {"training": training, "evaluation": {"recall_at": [1, 3]}})
    assert (changed["dataset"], changed["variant"], changed["seed"]) == ("d", "v", "2")
    assert changed["num_epochs"] == "3"
    assert changed["evaluation.recall_at"] == "[1, 3]"
    assert defaults["evaluation.role"] == "test"
    assert not changed.keys() & defaults.keys()
    assert child_run.first_tags("p", "c", "i", "v", 0, {"a.b": "1", "c": "x"})["dml.defaults"] == "a.b=1; c=x;"


@pytest.mark.parametrize(
    ("program", "called"),
    [("/x/flows/cli/run.py", "dml"), ("/x/cli/__main__.py", "dml"), ("/x/bin/dml", "dml"), ("/x/flows/other/run.py", "run.py")],
)
def test_the_command_is_named_as_a_person_types_it(program: str, called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, "reproduce", "a b"])
    monkeypatch.setenv("LOGNAME", "ann")
    assert child_run.source_tags() == {"command": f"{called} reproduce 'a b'", "user": "ann"}


def test_a_process_has_ended_only_where_it_was_of_this_machine_and_is_gone() -> None:
    child = subprocess.Popen(["sleep", "60"])
    tag = child_run.process_tag(child.pid)
    host, boot, namespace, pid, start = tag.split(":")
    assert (host, pid) == (socket.gethostname(), str(child.pid))
    assert not child_run.has_ended(tag)
    assert child_run.has_ended(f"{host}:{boot}:{namespace}:{pid}:{int(start) - 1}"), "its number is used again"
    assert child_run.has_ended(f"{host}:{boot}0:{namespace}:{pid}:{start}"), "the machine was started again"
    child.kill()
    child.wait()
    assert child_run.has_ended(tag)
    of_another_container, of_an_older_version = f"{host}:{boot}:{namespace}0:{pid}:{start}", f"{host}:{pid}"
    for unknown in (child_run.process_tag(), f"other{tag}", of_another_container, of_an_older_version, f"{host}:", ""):
        assert not child_run.has_ended(unknown)


def test_a_run_says_what_it_is_and_an_oracle_what_that_means() -> None:
    text = child_run.describe_run("d", "a", 2, "link", "last", scores_only=False)
    assert text.startswith("a trained on d with seed 2; part of the [d comparison](link).")
    assert child_run.describe_run("d", "a", 2, "link", "oracle", scores_only=False) == child_run.ORACLE_NOTE + text
    of_trial = child_run.describe_run("d", "a", 2, "link", "last", scores_only=True)
    assert text.replace(", `steps/` (checkpoint and embeddings)", "") == of_trial != text, "a search's run has no such files"


def test_tags_have_the_facts_of_steps_that_are_no_tables() -> None:
    facts = {"device": "cpu", SURROUNDINGS: {"python": "3.12", "packages": {}}}
    report: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(step="train", identity="x", facts=facts),
        embeddings=SimpleNamespace(step="embed", facts={}),
        parameters={"training": small_training().model_dump(mode="json"), "evaluation": {}},
        dataset=SimpleNamespace(name="d", digest="x", folder="/d"),
        **{"tags": {}, "dvc_digest": None, "variant": "v", "seed": 0, "scores_only": False},
    )
    tags = child_run.published_tags(report, "link")
    assert [name for name in tags if name.startswith("dml.train.")] == ["dml.train.device"]
