"""scripts/first-hour finds the commands of README.md and the tutorial, which it runs in containers."""

import pytest

from scripts import first_hour
from tests.docs.pages import blocks


def test_commands_of_the_readme_are_run_in_their_order() -> None:
    script = first_hour.readme_commands()
    [example] = blocks("../README.md", "python")
    _, nodes = blocks("../README.md")
    assert script.index(example) < script.index("mark message")
    remaining = script.partition("mark message")[2].replace("serve ", "")
    assert nodes in remaining
    assert script.count("serve ha master") == 2, "once for the example"
    assert script.count("serve ha slave") == 1, "started in the background"


@pytest.mark.parametrize(
    ("page", "wheel", "source"),
    [
        ("../README.md", "pip install halog ", "pip install . "),
        ("tutorial.md", "pip install 'halog[spark,demo]'\n", "pip install '.[spark,demo]'\n"),
    ],
)
def test_installations_are_from_a_wheel_or_from_source(page: str, wheel: str, source: str) -> None:
    block = blocks(page)[0]
    apt, others = first_hour.installing(block, "wheel")
    assert "gcc" not in apt
    assert wheel in others
    apt, others = first_hour.installing(block, "source")
    assert apt.splitlines()[1:] == ["apt install gcc python3-dev"]
    assert source in others
    assert "python3 -m venv .venv" in others


def test_first_message_in_time() -> None:
    seconds = {"apt_s": 20.0, "pip_s": 30.0, "readme_s": 70.0, "tutorial_s": 400.0}
    for message_s, is_in_time in ((10.0, True), (10.1, False)):
        visit = first_hour.Visit("13", "wheel", "3.13.5", "11 of 11", first_message_s=message_s, **seconds)
        assert visit.is_in_time is is_in_time
