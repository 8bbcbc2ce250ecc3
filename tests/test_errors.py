"""What a terminal would obey is escaped in texts with foreign names; letters of all languages remain."""

import pytest

from dml_core.errors import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("می\u200cخواهم 👩\u200d🔬", "می\u200cخواهم 👩\u200d🔬"),  # joiners within a Persian word and an emoji
        ("a\x1b]0;title\x07", "a\\x1b]0;title\\x07"),
        ("one\ntwo\u2028three", "one two three"),
        ("gpj\u202e.exe", "gpj\\u202e.exe"),  # reverses the direction of what follows
    ],
)
def test_only_letters_remain_as_they_are(text: str, shown: str) -> None:
    assert printable(text) == shown
