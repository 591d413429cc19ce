"""Limits of users at a broker."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import trio
from trio.testing import MockClock

from ha.protocol.access_bodies import UserConfig
from tests.interop.acl2_cases import user
from tests.security.test_acl2_guard import create, root
from tests.security.users import ROOT, open_users


async def test_number_of_users_is_limited(autojump_clock: MockClock, tmp_path: Path) -> None:
    with patch("ha.broker.users.USER_COUNT_MAX", 2):
        async with open_users(tmp_path) as node:
            await create(node)
            answer = await root(node).ask(3001, user("eve", password="p"), username="eve")
            assert (answer.code, answer.remark) == (1, "this broker holds its maximum of 2 users")
            changed = await root(node).ask(3002, user("alice", password="q"), username="alice")
            assert changed.code == 0


async def test_broker_that_is_full_of_users_starts(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with patch("ha.broker.users.USER_COUNT_MAX", 2):
        async with open_users(tmp_path) as node:
            await create(node)
        with trio.fail_after(60):
            async with open_users(tmp_path, initial_users=(ROOT, UserConfig(username="late", password="p"))) as node:
                assert "user.create_failed" in caplog.text
                assert (await root(node).ask(3003, username="alice")).code == 0
        async with open_users(tmp_path, initial_users=(UserConfig(username="late", password="p"),)) as node:
            assert node.broker.tables.users.table.keys() == {ROOT.username, "late"}


async def test_accounts_of_deleted_users_are_dropped(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_users(tmp_path) as node:
        assert node.broker.acl_guard is not None
        accounts = node.broker.acl_guard.users
        assert accounts is not None
        for number in range(20):
            await create(node, name=f"u{number}")
            assert accounts.account(f"u{number}") is not None
            assert (await root(node).ask(3003, username=f"u{number}")).code == 0
        assert len(accounts._accounts) <= 3  # type: ignore[attr-defined]
