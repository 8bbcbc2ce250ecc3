"""Each registered loss trains as it did when its curve was accepted (see `curves.py`)."""

import json
from pathlib import Path

import pytest

from dml_core.losses.registry import LOSSES
from tests.golden.curves import FOLDER, accepted_curve, curve, differences, draw, parsed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_trains_as_it_was_accepted(loss: str, drawn: Path) -> None:
    found = differences(curve(loss, drawn), accepted_curve(loss))
    assert not found, f"{found}; if this is meant: python -m tests.golden.curves --accept {loss}"


def test_every_curve_is_of_a_registered_loss_and_has_100_steps_and_learns() -> None:
    curves = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
    assert curves.keys() == LOSSES.keys()
    for name, accepted in curves.items():
        assert "99" in accepted["loss"], name
        assert accepted["recall_at_1"] > 0.4, name  # chance is one of eight


def test_early_steps_are_held_to_the_last_digits_and_late_ones_to_what_rounding_can_become() -> None:
    accepted = {"loss": {"0": 2.0, "99": 1.0}, "norm": {"model": 3.0}, "recall_at_1": 0.5}
    assert differences(accepted, accepted) == []
    assert differences(accepted | {"loss": {"0": 2.00001, "99": 1.0001}}, accepted) == ["loss 0: 2.00001, accepted 2.0"]
    assert differences(accepted | {"loss": {"0": 2.0, "99": 1.01}}, accepted) == ["loss 99: 1.01, accepted 1.0"]
    assert differences(accepted | {"loss": {"0": 2.0}}, accepted) == ["loss 99: None, accepted 1.0"]
    assert len(differences(accepted | {"norm": {"model": 3.01}, "recall_at_1": 0.53}, accepted)) == 2


def test_curves_are_accepted_by_name_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed([]) == (list(LOSSES), [])
    assert parsed(["softmax"]) == (["softmax"], [])
    assert parsed(["--accept", "softmax", "sgsl"]) == (["softmax", "sgsl"], ["softmax", "sgsl"])
    for wrong in (["--accept"], ["softmax", "--accept"], ["--accept", "all"], ["softmax", "--accept", "sgsl"]):
        with pytest.raises(SystemExit) as ended:
            parsed(wrong)
        assert ended.value.code == 2, wrong
    assert "--accept" in capsys.readouterr().err
