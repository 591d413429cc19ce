"""`ha switch`: a planned switchover of a failover group to another master."""

from __future__ import annotations

import ssl
from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlencode

import msgspec
from cyclopts import Parameter

from ha.cli.admin_pages import (
    LOCAL_ADMINS,
    TOKEN_REQUIRED,
    WRONG_TOKEN,
    AdminFlags,
    Answer,
    NodeStatus,
    Page,
    ask_admins,
    fetch_pages,
    phrase_of,
)
from ha.cli.asking import Json
from ha.cli.exits import EXIT_DONE, EXIT_REFUSED, EXIT_UNREACHABLE, UsageError
from ha.cli.flags import PLAIN, TlsFlags
from ha.cli.showing import notices, print_json, safe
from ha.cli.unreachable import explain_no_node

_TOKEN_ERRORS = {WRONG_TOKEN, TOKEN_REQUIRED}
WAIT_S_MAX = 25.0
"""Maximum value of `wait_s`, in seconds, that a node's admin port accepts for a switchover"""


class Outcome(msgspec.Struct, frozen=True):
    """Result of a switchover, as reported by a member. See `ha.failover.switchover.SwitchOutcome`."""

    is_done: bool
    master_id: int | None = None
    epoch: int = 0
    seconds: float = 0.0
    why_not: str = ""
    is_known: bool = True


def switch(
    *,
    to: Annotated[int | None, Parameter(help="brokerId of the new master. Default: any other in-sync member.")] = None,
    reason: Annotated[str, Parameter(help="Reason to record in the members' logs.")] = "ha switch",
    wait: Annotated[float, Parameter(help="Timeout for the switchover, in seconds.")] = 10.0,
    json: Json = False,
    admins: AdminFlags = LOCAL_ADMINS,
    tls: TlsFlags = PLAIN,
) -> int:
    """Switch a failover group to another master and wait until it takes over.

    Sends the request to the admin port of any member, which must have an adminToken. No acknowledged message is lost,
    and producers retry sends that fail during the switchover. If the new master does not catch up in time, nothing
    changes.

    Exit codes: 0 the requested member is master; 1 it is not, the node rejects the request (for example because of its
    adminToken), or no node is in a failover group; 2 usage; 69 no node can be reached, or the result is unknown.
    """
    asked = admins.checked()
    if to is not None and to < 1:
        raise UsageError("--to must be a member's brokerId, 1 or higher")
    if not 0 < wait <= WAIT_S_MAX:
        raise UsageError(f"--wait must be greater than 0 and at most {WAIT_S_MAX:g} s")
    files = tls.client_tls()
    context, token = None if files is None else files.context(), admins.token()
    answers = fetch_pages(asked, token, context, admins.timeout)
    members = {
        address: page.node
        for address, page in answers.items()
        if isinstance(page, Page) and page.node.member is not None
    }
    if not members:
        return _report_no_member(answers)
    if len({(node.cluster_name, node.broker_name) for node in members.values()}) > 1:
        raise UsageError("the members belong to several groups; use --admin to select one group")
    # Any member can forward the request; prefer one that reaches etcd.
    address = min(members, key=lambda each: _has_agreement_fault(members[each]))
    path = "/switch?" + urlencode({"reason": reason, "wait_s": wait} | ({} if to is None else {"to": to}))
    outcome = _ask(address, path, token, context, wait + admins.timeout)
    if isinstance(outcome, tuple):
        exit_code, error = outcome
        notices().print(f"ha: {address}: {safe(error)}")
        return exit_code
    group = members[address].broker_name
    if json:
        print_json({"group": group, **msgspec.to_builtins(outcome)})
    elif outcome.is_done:
        print(f"{safe(group)}: member {outcome.master_id} is master, epoch {outcome.epoch}, {outcome.seconds:.2f} s")
    if not outcome.is_done:
        master = "no member is" if outcome.master_id is None else f"member {outcome.master_id} is"
        notices().print(f"ha: {safe(group)}: {safe(outcome.why_not)}; {master} master, epoch {outcome.epoch}")
    if outcome.is_done:
        return EXIT_DONE
    return EXIT_REFUSED if outcome.is_known else EXIT_UNREACHABLE


def _report_no_member(answers: dict[str, Page | str]) -> int:
    pages = {address: page for address, page in answers.items() if isinstance(page, Page)}
    for address, page in pages.items():
        notices().print(f"ha: {address}: {safe(page.node.name)} is not in a failover group: etcdEndpoints is not set")
    errors = {address: answer for address, answer in answers.items() if isinstance(answer, str)}
    if not pages and _TOKEN_ERRORS.isdisjoint(errors.values()):
        notices().print(f"ha: {safe(explain_no_node(errors))}")
        return EXIT_UNREACHABLE
    for address, error in errors.items():
        notices().print(f"ha: {address}: {safe(error)}")
    return EXIT_REFUSED


def _has_agreement_fault(node: NodeStatus) -> bool:
    return node.member is None or bool(node.member.agreement_fault)


def _ask(
    address: str, path: str, token: str, tls: ssl.SSLContext | None, timeout_s: float
) -> Outcome | tuple[int, str]:
    """Requests the switchover; returns its outcome, or an exit code and the error if the node reports none."""
    answer = ask_admins([address], path, token, tls, timeout_s, method="POST")[address]
    if not isinstance(answer, Answer):
        return EXIT_REFUSED if answer in _TOKEN_ERRORS else EXIT_UNREACHABLE, answer
    if answer.code not in (HTTPStatus.OK, HTTPStatus.CONFLICT):
        error = answer.body.decode(errors="replace").strip() or phrase_of(answer.code)
        return EXIT_REFUSED if 400 <= answer.code < 500 else EXIT_UNREACHABLE, error
    try:
        return msgspec.json.decode(answer.body, type=Outcome)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return EXIT_UNREACHABLE, f"invalid response from the admin port: {error}"
