"""docs/compatibility.md ticks exactly the requests that halog serves."""

import re
from pathlib import Path

from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand
from tests.broker.node import open_node
from tests.namesrv.brokers import open_site

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "compatibility.md").read_text()
CODE_ROW = re.compile(
    r"^\| (?P<code>\d+) \| (?P<name>[A-Z_\d]+) \| (?P<place>broker|name server|client) \| (?P<tick>✓|–) "
    r"\| (?P<rest>.+) \|$"
)
ROWS = {int(match["code"]): match for line in TEXT.splitlines() if (match := CODE_ROW.match(line))}
NOT_SUPPORTED = ResponseCode.REQUEST_CODE_NOT_SUPPORTED


def test_every_request_has_a_row() -> None:
    assert {code: row["name"] for code, row in ROWS.items()} == {code.value: code.name for code in RequestCode}


def test_only_ticks_name_a_test() -> None:
    for code, row in ROWS.items():
        assert (row["tick"] == "✓") == row["rest"].startswith("`tests/"), code


def ticked(place: str) -> set[int]:
    return {code for code, row in ROWS.items() if row["place"] == place and row["tick"] == "✓"}


async def test_ticks_match_what_a_broker_serves(tmp_path: Path, autojump_clock: object) -> None:
    """An unsupported request has its own code; other errors have others."""
    async with open_node(tmp_path) as node:
        served = {code.value for code in RequestCode if (await node.ask(code)).code != NOT_SUPPORTED}
    assert served == ticked("broker")


async def test_ticks_match_what_a_name_server_serves() -> None:
    served = set()
    async with open_site() as site:
        for code in RequestCode:
            if (await site.connect().ask(RemotingCommand(code, 1))).code != NOT_SUPPORTED:
                served.add(code.value)
    assert served == ticked("name server")


def test_ticks_of_clients_match_what_brokers_send() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "ha" / "broker").rglob("*.py"))
    for row in ROWS.values():
        if row["place"] == "client":
            assert re.search(rf"RequestCode\.{row['name']}\b", sources), row["name"]
