"""The first difference of two runs of one row and seed, in words."""

import math

import pytest

from tasks.watch.verdicts import first_difference
from tests.tasks.watch.conftest import evidence

STEPS, EPOCHS = 10, 20


@pytest.mark.parametrize(
    ("first", "whole", "shortened"),
    [
        (2, "step 3 of epoch 1 on: 2 -> 2.5", "step 3 of epoch 1 on: 2 -> 2.5"),
        (55, "step 6 of epoch 6 on: 55 -> 55.5", "step 1 of the last epoch on: 190 -> 190.5"),
        (195, "step 6 of epoch 20 on: 195 -> 195.5", "step 6 of the last epoch on: 195 -> 195.5"),
    ],
)
def test_the_step_and_the_epoch_are_those_of_the_run_also_where_two_epochs_losses_are_stored(
    first: int, whole: str, shortened: str
) -> None:
    accepted = evidence("d/v", losses=tuple(map(float, range(STEPS * EPOCHS))), steps_per_epoch=STEPS)
    new = accepted.model_copy(update={"losses": tuple(loss + 0.5 * (loss >= first) for loss in accepted.losses)})
    assert first_difference(accepted, new) == f"the loss differs from {whole}"
    assert first_difference(accepted.shortened(), new.shortened()) == f"the loss differs from {shortened}"


def test_numbers_that_differ_in_the_last_bit_are_shown_with_all_digits() -> None:
    accepted = evidence("d/v", scores={"csc": 1.4248536613})
    new = accepted.model_copy(update={"scores": {"csc": math.nextafter(1.4248536613, 2)}})
    found = str(first_difference(accepted, new)).removeprefix("scoring differs, of equal weights: csc ").split(" -> ")
    assert [float(number) for number in found] == [accepted.scores["csc"], new.scores["csc"]]
