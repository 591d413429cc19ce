"""Short examples of pages that have no test of their own."""

from __future__ import annotations

from pathlib import Path

from ha.acl.yaml_file import parse_acl_file
from tests.docs.pages import blocks, run_script, traced


def test_the_accounts_of_the_security_page_are_what_a_broker_reads() -> None:
    [example] = blocks("security.md", "yaml")
    found = parse_acl_file(example.replace('"…"', '"a secret of some length"').encode())
    assert [account.access_key for account in found.accounts] == ["billing", "slaves-and-tools"]
    assert (found.global_white_hosts, found.warnings) == ([], [])
    billing, tools = found.accounts
    assert (billing.is_admin, tools.is_admin) == (False, True)


def test_the_configuration_of_the_upgrading_page_is_taken(tmp_path: Path) -> None:
    output = run_script(traced(blocks("upgrading.md")), tmp_path)
    assert "fileReservedTime=48" in output
