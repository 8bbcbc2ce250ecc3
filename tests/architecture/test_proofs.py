"""The source text that a proof changes exists: CI runs no proofs, so without this a renamed variable ends one unnoticed."""

import pytest

from tests.conftest import ROOT
from tests.e2e.test_verify import FAULTS


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_s_text_is_in_its_file_once(name: str) -> None:
    text, fault = (ROOT / FAULTS[name].file).read_text(), FAULTS[name]
    wrapped = fault.new.partition("def ")[2].partition("(")[0]
    assert text.count(fault.old or f"\ndef {wrapped}(") == 1
