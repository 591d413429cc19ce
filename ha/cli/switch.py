"""`ha switch`: another member of a failover group becomes master, as planned."""

from __future__ import annotations

import ssl
from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlencode

import msgspec
from cyclopts import Parameter

from ha.cli.admin_pages import LOCAL_ADMINS, AdminFlags, Answer, NodeStatus, Page, ask_admins, fetch_pages
from ha.cli.asking import Json
from ha.cli.exits import EXIT_DONE, EXIT_REFUSED, EXIT_UNREACHABLE, UsageError
from ha.cli.flags import PLAIN, TlsFlags
from ha.cli.showing import notices, print_json, safe

WAIT_S_MAX = 25.0
"""A node's admin port gives an answer no longer time."""


class Outcome(msgspec.Struct, frozen=True):
    """What a member says came of it."""

    is_done: bool
    master_id: int | None = None
    epoch: int = 0
    seconds: float = 0.0
    why_not: str = ""
    is_known: bool = True


def switch(
    *,
    to: Annotated[int | None, Parameter(help="brokerId of the next master. Default: any other member in sync.")] = None,
    reason: Annotated[str, Parameter(help="For the logs of the group.")] = "ha switch",
    wait: Annotated[float, Parameter(help="Seconds to wait for the new master.")] = 10.0,
    json: Json = False,
    admins: AdminFlags = LOCAL_ADMINS,
    tls: TlsFlags = PLAIN,
) -> int:
    """Have another member of a failover group become master, and wait until it is.

    Ask any member, at its admin port, which needs adminToken. Nothing that was acknowledged is lost, and sends that
    come meanwhile are sent again by their producers. If the next master lacks something and does not get it in time,
    everything stays as it is.

    Exit codes: 0 that member is master; 1 it is not, and why; 2 usage; 69 no member can be reached, or what came of it
    is not known.
    """
    asked = admins.checked()
    if to is not None and to < 1:
        raise UsageError("--to is a member's brokerId, from 1 on")
    if not 0 < wait <= WAIT_S_MAX:
        raise UsageError(f"--wait is more than 0 s, and {WAIT_S_MAX:g} s at most")
    files = tls.checked()
    context, token = None if files is None else files.context(), admins.token()
    answers = fetch_pages(asked, token, context, admins.timeout)
    members = {
        address: page.node
        for address, page in answers.items()
        if isinstance(page, Page) and page.node.member is not None
    }
    if not members:
        return _nobody_to_ask(answers)
    if len({(node.cluster_name, node.broker_name) for node in members.values()}) > 1:
        raise UsageError("these are members of several groups: name those of one with --admin")
    # Any will do; a member that has trouble with the service it would have to ask comes last.
    address = min(members, key=lambda each: _trouble(members[each]))
    path = "/switch?" + urlencode({"reason": reason, "wait_s": wait} | ({} if to is None else {"to": to}))
    outcome = _ask(address, path, token, context, wait + admins.timeout)
    if isinstance(outcome, str):
        notices().print(f"ha: {address}: {safe(outcome)}")
        return EXIT_UNREACHABLE
    group = members[address].broker_name
    if json:
        print_json({"group": group, **msgspec.to_builtins(outcome)})
    elif outcome.is_done:
        print(f"{safe(group)}: member {outcome.master_id} is master, epoch {outcome.epoch}, {outcome.seconds:.2f} s")
    if not outcome.is_done:
        master = "nobody is" if outcome.master_id is None else f"member {outcome.master_id} is"
        notices().print(f"ha: {safe(group)}: {safe(outcome.why_not)}; {master} master, epoch {outcome.epoch}")
    if outcome.is_done:
        return EXIT_DONE
    return EXIT_REFUSED if outcome.is_known else EXIT_UNREACHABLE


def _nobody_to_ask(answers: dict[str, Page | str]) -> int:
    pages = {address: page for address, page in answers.items() if isinstance(page, Page)}
    for address, page in pages.items():
        notices().print(f"ha: {address}: {safe(page.node.name)} is in no failover group: its etcdEndpoints is not set")
    for address, answer in answers.items():
        if isinstance(answer, str):
            notices().print(f"ha: {address}: {answer}")
    return EXIT_REFUSED if pages else EXIT_UNREACHABLE


def _trouble(node: NodeStatus) -> bool:
    return node.member is None or bool(node.member.agreement_fault)


def _ask(address: str, path: str, token: str, tls: ssl.SSLContext | None, timeout_s: float) -> Outcome | str:
    answer = ask_admins([address], path, token, tls, timeout_s, method="POST")[address]
    if not isinstance(answer, Answer):
        return answer
    if answer.code not in (HTTPStatus.OK, HTTPStatus.CONFLICT):
        return answer.body.decode(errors="replace").strip() or HTTPStatus(answer.code).phrase
    try:
        return msgspec.json.decode(answer.body, type=Outcome)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return f"not a halog node's answer: {error}"
