"""Output of commands: text of messages and peers is shown as it is, and can't control the terminal."""

import json

import msgspec
import pytest
from rich.table import Table

from ha.cli.showing import notices, output, print_json
from ha.cli.spark.running import Where, facts_table, show_result

EVIL = "a[/7]b[red]c:smile: \x1b[2J\x07\x9b2J\u202e"
SHOWN = "a[/7]b[red]c:smile: \\u001b[2J\\u0007\\u009b2J\\u202e"


class Result(msgspec.Struct):
    key: str
    exit_code: int = 3


@pytest.mark.parametrize("as_json", [False, True])
def test_results_of_jobs(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("key", title=EVIL)
    table.add_row(EVIL)
    assert show_result(Result(EVIL), Where(json=as_json), lambda _: [table, facts_table(EVIL, {"of": EVIL})]) == 3
    out = capsys.readouterr().out
    assert not set("\x1b\x07\x9b\u202e") & set(out)
    if as_json:
        assert json.loads(out) == {"key": EVIL, "exit_code": 3}
    else:
        assert out.count(SHOWN) == 4


def test_consoles(capsys: pytest.CaptureFixture[str]) -> None:
    for console in (output(), notices()):
        console.print(f"one\n{EVIL}", soft_wrap=True)
    captured = capsys.readouterr()
    assert captured.out == captured.err == f"one\n{SHOWN}\n"


def test_json_with_a_file_name_that_is_not_utf_8(capsys: pytest.CaptureFixture[str]) -> None:
    """As a damaged file system has them."""
    print_json({"file": "consumequeue/\udcff", "found": [Result("é")]})
    assert json.loads(capsys.readouterr().out) == {
        "file": "consumequeue/?",
        "found": [{"key": "é", "exit_code": 3}],
    }
