"""Small jobs side by side: every job's result is its own, in a process with one thread."""

import os

import pytest
import torch

from tasks.side.side_by_side import side_by_side


@pytest.mark.slow
def test_every_job_gets_its_own_result_in_another_process_with_one_thread():
    found = dict(side_by_side(_square_and_where, [3, 5, 4]))
    assert {job: square for job, (square, _, _) in found.items()} == {3: 9, 5: 25, 4: 16}
    assert {threads for _, _, threads in found.values()} == {1}
    assert os.getpid() not in {process for _, process, _ in found.values()}


def _square_and_where(number: int) -> tuple[int, int, int]:
    return number**2, os.getpid(), torch.get_num_threads()
