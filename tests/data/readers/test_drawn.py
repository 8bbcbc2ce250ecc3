"""What drawn datasets share: the rule of what is left out, and the counts that Debian's packages give."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dml_core.data.check import check_dataset
from dml_core.data.readers.shared.drawn import FEW, REPEATED, TWO_CLASSES, left_out_reasons
from dml_core.data.registry import fetch

PICTURES = st.lists(st.tuples(st.sampled_from("abcd"), st.binary(min_size=1, max_size=1).map(lambda byte: bytes([byte[0] % 12]))))


@given(PICTURES, st.integers(2, 4))
def test_what_is_kept_can_be_told_apart_and_what_is_left_out_cannot(pictures: list[tuple[str, bytes]], least: int) -> None:
    reasons = left_out_reasons([(name, pixels, "") for name, pixels in pictures], least)
    kept = [picture for picture, reason in zip(pictures, reasons, strict=True) if not reason]
    assert max(Counter(pixels for _, pixels in kept).values(), default=1) == 1
    assert min(Counter(name for name, _ in kept).values(), default=least) >= least
    for (name, pixels), reason in zip(pictures, reasons, strict=True):
        of_others = any(other != name and same == pixels for other, same in pictures)
        own = {other for of, other in pictures if of == name and not any(n != name and p == other for n, p in pictures)}
        assert of_others == (reason == TWO_CLASSES)
        assert reason != FEW or len(own) < least
        assert reason != REPEATED or pictures.count((name, pixels)) > 1
        assert reason or len(own) >= least


def test_a_picture_that_is_left_out_already_keeps_its_reason_and_spoils_no_other() -> None:
    pictures = [("a", b"1", "damaged"), ("b", b"1", ""), ("b", b"2", ""), ("a", b"3", ""), ("a", b"4", "")]
    assert left_out_reasons(pictures, 2) == ["damaged", "", "", "", ""]


@pytest.mark.proof
@pytest.mark.parametrize("name", ["glyphs", "icons"])
def test_debian_s_packages_give_the_published_counts_or_are_named(name: str, tmp_path: Path) -> None:
    fetch(name, {}, tmp_path / "raw")
    report = check_dataset(name, tmp_path / "raw", {})
    notes = {note.what for note in report.notes}
    assert report.violations == []
    assert "same pixels in two classes" not in notes
    assert bool(report.published) != ("source differs from that of the published counts" in notes)
