"""The properties format: expected values from the text of java.util.Properties.load's documentation."""

import pytest

from ha.config.properties_file import parse_properties

CASES = [
    ("Truth = Beauty", [("Truth", "Beauty")]),
    (" Truth:Beauty", [("Truth", "Beauty")]),
    ("Truth                    :Beauty", [("Truth", "Beauty")]),
    ("cheeses", [("cheeses", "")]),
    ("key value with blanks", [("key", "value with blanks")]),
    (
        "fruits                           apple, banana, pear, \\\n"
        "                                  cantaloupe, watermelon, \\\r\n"
        "                                  kiwi, mango\n",
        [("fruits", "apple, banana, pear, cantaloupe, watermelon, kiwi, mango")],
    ),
    ("# no\n! no\n\n  # no\na=b", [("a", "b")]),
    ("a=b # c", [("a", "b # c")]),
    ("\\:\\=\\ k=v", [(":= k", "v")]),
    ("a=\\u0041\\t\\z\\\\", [("a", "A\tz\\")]),
    ("a=1\na=2", [("a", "1"), ("a", "2")]),
    ("path=C\\:\\\\x", [("path", "C:\\x")]),
    ("a=\\", [("a", "")]),
    ("a=b\\\\\nc=d", [("a", "b\\"), ("c", "d")]),
    ("a=b\\\n# not a comment", [("a", "b# not a comment")]),
    ("listenPort=10911 \t", [("listenPort", "10911")]),
    ("a==b", [("a", "=b")]),
    ("=b", [("", "b")]),
]


@pytest.mark.parametrize(("text", "pairs"), CASES)
def test_reads_as_java_does(text: str, pairs: list[tuple[str, str]]) -> None:
    assert parse_properties(text) == pairs


def test_a_bad_escape_names_its_line() -> None:
    with pytest.raises(ValueError, match=r"^line 3: .*hexadecimal"):
        parse_properties("a=b\n\nc=\\u12G4\n")
