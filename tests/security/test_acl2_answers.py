"""ACL 2.0 answers as a real 5.5.0 broker does.

tests/interop/acl2_cases.py has the requests, and recorded its answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trio.testing import MockClock

from tests.interop.acl2_cases import CREDENTIALS, SUPER, ask_all, asker
from tests.security.users import open_users

REAL = json.loads((Path(__file__).parents[1] / "fixtures" / "acl2" / "answers-5.5.0.json").read_text())

OTHERS: dict[str, Any] = {
    # RocketMQ names the place in its source.
    "3006 no body": [1, "The body of acl is null", ""],
}
"""Answers that differ, and why."""


async def test_answers_are_those_of_a_real_broker(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_users(tmp_path) as node:
        answers = await ask_all(asker(node.address, node.client))
    assert set(CREDENTIALS) > {SUPER}
    assert answers.keys() == REAL.keys()
    assert {key: answers[key] for key in answers if answers[key] != REAL[key]} == OTHERS
