"""Generates the permission tables of docs/security.md from the rules of ha/acl, for `scripts/reference`.

The column for users of ACL 2.0 is what a rule requires for a sample request that names a topic and a group. Text
outside the marked tables is unchanged. A test fails if the file is out of date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ha.acl import BROKER_RULES, NAME_SERVER_RULES, Right, Rule
from ha.acl.requirements import CLUSTER
from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX

TABLES: dict[str, Mapping[int, Rule]] = {
    "broker permissions": BROKER_RULES,
    "name server permissions": NAME_SERVER_RULES,
}
"""Name in the marker -> rules."""

TOPIC, GROUP = "T_REPLY_TOPIC", "G"
FIELDS = {
    **dict.fromkeys(("topic", "b", "originTopic", "topicList"), TOPIC),
    **dict.fromkeys(("consumerGroup", "group", "groupName", "compareGroup", "srcGroup", "destGroup", "a"), GROUP),
    **dict.fromkeys(("queueId", "offset", "index", "count", "timestamp", "statsName", "clientId"), "0"),
    "statsKey": f"{TOPIC}@{GROUP}",
    "isForce": "true",
}
"""Ext fields of a request with any code."""
_SUBSCRIPTION = {"topic": TOPIC, "subString": "*"}
BODIES: dict[int, object] = {
    34: {"clientID": "c", "consumerDataSet": [{"groupName": GROUP, "subscriptionDataSet": [_SUBSCRIPTION]}]},
    41: {"consumerGroup": GROUP, "clientId": "c", "mqSet": []},
    42: {"consumerGroup": GROUP, "clientId": "c", "mqSet": []},
    46: {"clientId": "c", "group": GROUP, "namespace": "", "subscriptionData": _SUBSCRIPTION},
    200: {"groupName": GROUP},
    400: {"topic": TOPIC, "consumerGroup": GROUP},
    401: {"topic": TOPIC, "consumerGroup": GROUP, "mode": "POP"},
    225: {"groupConfigList": [{"groupName": GROUP}]},
    200151: {"acks": [{"t": TOPIC, "c": GROUP, "so": 0, "q": 0, "rq": 0, "pt": 0}]},
}
"""Request code -> body."""
_ACTIONS = {"Pub": Right.PUB, "Sub": Right.SUB, "Create": Right.CREATE, "Update": Right.UPDATE}
_ACTIONS |= {"Delete": Right.DELETE, "Get": Right.GET, "List": Right.LIST}


def for_users(code: int, rule: Rule) -> str:
    """Returns what a user of ACL 2.0 needs, in words."""
    body = json.dumps(BODIES[code]).encode() if code in BODIES else b""
    resources: dict[str, list[str]] = {}
    for resource, actions in rule.needs(RemotingCommand(code, ext_fields=dict(FIELDS), body=body)):
        names = " or ".join(name for name, bit in _ACTIONS.items() if bit & actions)
        if resource is CLUSTER:
            kind = "the cluster"
        else:
            kind = "the group" if resource.startswith(RETRY_PREFIX) else "the topic"
        kinds = resources.setdefault(names, [])
        if kind not in kinds:
            kinds.append(kind)
    needs = [f"{names} on {' and '.join(sorted(kinds, reverse=True))}" for names, kinds in resources.items()]
    return "; ".join(needs) or "a signature"


def table(rules: Mapping[int, Rule]) -> str:
    """Returns the rules as a Markdown table with one row per rule, in the order of the first request code."""
    by_text: dict[tuple[str, str], list[int]] = {}
    for code in sorted(rules):
        by_text.setdefault((rules[code].text, for_users(code, rules[code])), []).append(code)
    lines = ["| an account of plain_acl.yml needs | a user needs | request codes |", "|---|---|---|"]
    for texts, codes in by_text.items():
        names = ", ".join(f"{code} {RequestCode(code).name}" for code in codes)
        lines.append(f"| {' | '.join(text.replace('|', '&#124;') for text in texts)} | {names} |")
    return "\n".join(lines)


def render(document: str) -> str:
    """Returns `document` with the tables between its markers replaced."""
    for name, rules in TABLES.items():
        begin, end = f"<!-- table {name} -->", "<!-- end -->"
        head, _, tail = document.partition(begin)
        document = f"{head}{begin}\n{table(rules)}\n{end}{tail.partition(end)[2]}"
    return document
