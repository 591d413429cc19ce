"""The operations behind the dashboard's actions: their input fields, checks, previews and effects.

`plan` checks the values and returns what would happen; `run` gets the values that `plan` has accepted. A plan resolves
values such as "last" to exact ones, so that a confirmed action does exactly what was shown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from .formats import count, parse_time_ms, time_ms
from .source import DashboardActions, DashboardSource, Missing, NewMessage, Outcome

BODY_SIZE_MAX = 64 * 1024
"""Maximum bytes of the body of a message that the dashboard sends."""
SENT_BACK_MAX = 500
"""Maximum number of dead letters that one action sends back."""
QUEUE_COUNT_MAX = 1024
"""Maximum number of queues that the dashboard gives a topic; the command line can create more."""
NAME_LENGTH_MAX = 300
SWITCH_WAIT_S = 10.0

Values = Mapping[str, str]
Switch = Callable[[int | None, str, float], Awaitable[Mapping[str, Any]]]


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """An input field. `kind`: text, number, body, choice, or hidden (set only by plans). `options`: value and label of
    each choice."""

    name: str
    label: str
    kind: str = "text"
    default: str = ""
    options: Sequence[tuple[str, str]] = ()
    is_required: bool = True
    hint: str = ""


class Refusal(msgspec.Struct, frozen=True):
    """Why an action can't be planned with the given values."""

    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Describes what an action would do, for the confirmation page.

    `sentence`: the change. `warning`: consequences that the operator should know before confirming; "" for none.
    `table`: column titles, then rows. `audit`: text for the audit log. `values`: form values that replace the submitted
    ones of the same names when the action is confirmed, for example an exact offset in place of an empty field.
    """

    sentence: str
    audit: str
    warning: str = ""
    table: Sequence[Sequence[str]] = ()
    values: Mapping[str, str] = {}


class Operation(Protocol):
    """An action. `verb`: text of the button that confirms it."""

    name: str
    title: str
    verb: str
    fields: Sequence[Field]

    async def plan(self, values: Values) -> Plan | Refusal:
        """Returns what would happen, or why the action can't be planned. Changes nothing."""

    async def run(self, values: Values) -> Outcome:
        """Carries out the action. `values`: those of a confirmed plan."""


class SendMessage:
    """Stores a message in a topic."""

    name, title, verb = "send", "Send a message", "Send it"
    fields: Sequence[Field] = (
        Field(name="topic", label="Topic"),
        Field(name="body", label="Body (text)", kind="body", is_required=False),
        Field(name="keys", label="Keys, separated by spaces", is_required=False),
        Field(name="tags", label="Tag", is_required=False),
        Field(name="queue", label="Queue (empty: the broker chooses)", kind="number", is_required=False),
    )

    def __init__(self, source: DashboardSource, actions: DashboardActions) -> None:
        self._source = source
        self._actions = actions

    async def plan(self, values: Values) -> Plan | Refusal:
        message = _message(values)
        if isinstance(message, Refusal):
            return message
        found = await self._source.topic(message.topic, begin=0, count=0)
        if isinstance(found, Missing):
            return Refusal(f"{found.reason} Create it first.")
        if found.topic.kind != "messages":
            return Refusal(f"{message.topic} is a topic of the system, of retries or of dead letters.")
        if message.queue_id is not None and message.queue_id >= found.topic.write_queue_count:
            return Refusal(f"{message.topic} has {found.topic.write_queue_count} queues, numbered from 0.")
        size = len(message.body)
        return Plan(
            sentence=f"Send a message of {count(size)} bytes to {message.topic}.",
            warning="Its consumers process it like any other message.",
            audit=f"topic={message.topic} size={size} keys={message.keys} tags={message.tags}",
        )

    async def run(self, values: Values) -> Outcome:
        message = _message(values)
        assert isinstance(message, NewMessage)
        return await self._actions.send(message)


class ChangeTopic:
    """Creates a topic, or changes one."""

    name, title, verb = "topic", "Create or change a topic", "Apply"
    fields: Sequence[Field] = (
        Field(name="topic", label="Topic"),
        Field(name="queues", label="Queues on this node", kind="number", default="8"),
        Field(
            name="permission",
            label="Permission",
            kind="choice",
            default="rw",
            options=(("rw", "reading and writing"), ("r", "reading"), ("w", "writing")),
        ),
    )

    def __init__(self, source: DashboardSource, actions: DashboardActions) -> None:
        self._source = source
        self._actions = actions

    async def plan(self, values: Values) -> Plan | Refusal:
        topic, queue_count = values.get("topic", "").strip(), _number(values.get("queues", ""), QUEUE_COUNT_MAX)
        permission = values.get("permission", "")
        if fault := _name_fault("Topic", topic):
            return fault
        if not queue_count:
            return Refusal(f"Queues must be a number from 1 to {QUEUE_COUNT_MAX}.")
        if permission not in ("rw", "r", "w"):
            return Refusal("Permission must be rw, r or w.")
        audit = f"topic={topic} queues={queue_count} permission={permission}"
        found = await self._source.topic(topic, begin=0, count=0)
        if isinstance(found, Missing):
            return Plan(sentence=f"Create the topic {topic} with {queue_count} queues on this node.", audit=audit)
        known = found.topic
        if known.kind == "system":
            return Refusal(f"{topic} is a topic of the system.")
        warning = ""
        if queue_count < max(known.read_queue_count, known.write_queue_count):
            warning = f"Messages in queues from {queue_count} on are no longer consumed."
        was = "".join(letter for letter, is_on in (("r", known.is_readable), ("w", known.is_writable)) if is_on)
        return Plan(
            sentence=f"Change the topic {topic} on this node.",
            warning=warning,
            audit=audit,
            table=(
                ("Setting", "Now", "Then"),
                ("Write queues", count(known.write_queue_count), count(queue_count)),
                ("Read queues", count(known.read_queue_count), count(queue_count)),
                ("Permission", was or "none", permission),
            ),
        )

    async def run(self, values: Values) -> Outcome:
        permission = values["permission"]
        return await self._actions.change_topic(
            values["topic"].strip(),
            _number(values["queues"], QUEUE_COUNT_MAX) or 1,
            is_readable="r" in permission,
            is_writable="w" in permission,
        )


class ResetOffsets:
    """Resets a group's offsets in a topic to the first message, to the end, or to a store time."""

    name, title, verb = "reset", "Reset a group's offsets", "Reset them"
    fields: Sequence[Field] = (
        Field(name="group", label="Consumer group"),
        Field(name="topic", label="Topic"),
        Field(name="to", label="To: first, last, or a store time (UTC)", hint="2025-03-09 07:05:01"),
        Field(name="offsets", label="New offset of each queue", kind="hidden"),
    )

    def __init__(self, actions: DashboardActions) -> None:
        self._actions = actions

    async def plan(self, values: Values) -> Plan | Refusal:
        group, topic = values.get("group", "").strip(), values.get("topic", "").strip()
        if fault := _name_fault("Consumer group", group) or _name_fault("Topic", topic):
            return fault
        to = values.get("to", "").strip()
        to_ms = _moment_ms(to)
        if to_ms is _UNKNOWN:
            return Refusal("To must be first, last, or a time such as 2025-03-09 07:05:01 (UTC).")
        moves = await self._actions.planned_reset(group, topic, to_ms)
        if isinstance(moves, Missing):
            return Refusal(moves.reason)
        if len(moves) > QUEUE_COUNT_MAX:
            return Refusal(f"{topic} has more than {count(QUEUE_COUNT_MAX)} queues. Use ha offsets reset.")
        if shown := values.get("offsets", ""):
            offsets = _offsets(shown)
            if offsets.keys() != {move.queue_id for move in moves}:
                return Refusal(f"The queues of {topic} have changed. Nothing was done.")
            moves = [msgspec.structs.replace(move, after=offsets[move.queue_id]) for move in moves]
        rows = [
            (str(m.queue_id), count(m.before), count(m.after), count(m.end), _difference(m.before, m.after))
            for m in moves
        ]
        again = sum(max(0, m.before - m.after) for m in moves if m.before is not None)
        skipped = sum(max(0, m.after - m.before) for m in moves if m.before is not None)
        where = {0: "the first message", None: "the end"}.get(to_ms, "" if to_ms is None else time_ms(to_ms))
        return Plan(
            sentence=f"Move the group {group} in {len(moves)} queues of {topic} to {where}.",
            warning=f"Its members receive {count(again)} messages again, and skip {count(skipped)}.",
            audit=f"group={group} topic={topic} to={to} again={again} skipped={skipped}",
            table=(("Queue", "Committed", "New offset", "End", "Effect"), *rows),
            values={"offsets": ",".join(f"{move.queue_id}:{move.after}" for move in moves)},
        )

    async def run(self, values: Values) -> Outcome:
        to_ms = _moment_ms(values["to"].strip())
        assert to_ms is not _UNKNOWN
        group, topic = values["group"].strip(), values["topic"].strip()
        return await self._actions.reset(group, topic, to_ms, _offsets(values["offsets"]))


class SendBack:
    """Sends dead letters to their group again."""

    name, title, verb = "send-back", "Send dead letters back", "Send them back"
    fields: Sequence[Field] = (
        Field(name="group", label="Consumer group"),
        Field(name="offset", label="From offset (empty: the first)", kind="number", is_required=False),
        Field(name="count", label=f"Number of messages (at most {SENT_BACK_MAX})", kind="number", default="1"),
    )

    def __init__(self, actions: DashboardActions) -> None:
        self._actions = actions

    async def plan(self, values: Values) -> Plan | Refusal:
        group = values.get("group", "").strip()
        if fault := _name_fault("Consumer group", group):
            return fault
        span = self._span(values)
        if isinstance(span, Refusal):
            return span
        begin, number = span
        return Plan(
            sentence=f"Send {count(number)} dead letters of {group} back to it, "
            f"from offset {count(begin)} to {count(begin + number - 1)}.",
            warning="They also remain dead letters. Sending them back twice delivers them twice.",
            audit=f"group={group} offset={begin} count={number}",
            values={"offset": str(begin), "count": str(number)},
        )

    async def run(self, values: Values) -> Outcome:
        return await self._actions.send_back(values["group"].strip(), int(values["offset"]), int(values["count"]))

    def _span(self, values: Values) -> tuple[int, int] | Refusal:
        dead = self._actions.dead_letters(values.get("group", "").strip())
        if isinstance(dead, Missing):
            return Refusal(dead.reason)
        wanted = _number(values.get("count", ""), SENT_BACK_MAX)
        if not wanted:
            return Refusal(f"The number of messages must be from 1 to {SENT_BACK_MAX}.")
        text = values.get("offset", "").strip()
        begin = _number(text, (1 << 63) - 1) if text else dead.begin
        if begin is None or not dead.begin <= begin < dead.end:
            return Refusal(f"Its dead letters are at offsets {count(dead.begin)} to {count(dead.end - 1)}.")
        return begin, min(wanted, dead.end - begin)


class SwitchMaster:
    """Makes another member of the failover group its master."""

    name, title, verb = "switch", "Switch the group's master", "Switch"
    fields: Sequence[Field] = (
        Field(name="to", label="To the member with the ID (empty: any)", kind="number", is_required=False),
        Field(name="reason", label="Reason, for the log", is_required=False),
    )

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    async def plan(self, values: Values) -> Plan | Refusal:
        text, reason = values.get("to", "").strip(), values.get("reason", "").strip()
        to = _number(text, 1 << 31) if text else None
        if text and to is None:
            return Refusal("The member's ID must be a number.")
        if len(reason) > NAME_LENGTH_MAX:
            return Refusal(f"The reason must have at most {NAME_LENGTH_MAX} characters.")
        whom = "another member" if to is None else f"member {to}"
        return Plan(
            sentence=f"Make {whom} the master of this node's group.",
            warning="Sends fail for a moment, and clients send again.",
            audit=f"to={'any' if to is None else to} reason={reason}",
        )

    async def run(self, values: Values) -> Outcome:
        text = values.get("to", "").strip()
        told = await self._switch(int(text) if text else None, values.get("reason", "").strip(), SWITCH_WAIT_S)
        if told["is_done"]:
            return Outcome(True, f"Member {told['master_id']} is the master now, in term {told['epoch']}.")
        return Outcome(False, f"The master was not switched: {told['why_not']}.")


def operations_of(
    source: DashboardSource, actions: DashboardActions | None, switch: Switch | None
) -> dict[str, Operation]:
    """Returns the operations of a node by name."""
    found: list[Operation] = [] if switch is None else [SwitchMaster(switch)]
    if actions is not None:
        found += [SendMessage(source, actions), ChangeTopic(source, actions), ResetOffsets(actions), SendBack(actions)]
    return {operation.name: operation for operation in found}


_UNKNOWN = -1


def _moment_ms(text: str) -> int | None:
    """Returns the store time in `text`: 0 for "first", None for "last", _UNKNOWN if it is not a time since 1970."""
    if text in ("first", "last"):
        return 0 if text == "first" else None
    found = parse_time_ms(text)
    return _UNKNOWN if found is None or found < 0 else found


def _offsets(text: str) -> dict[int, int]:
    """Parses "0:4,1:12" into queue offsets by queue ID; empty for other texts."""
    found: dict[int, int] = {}
    for part in text.split(","):
        queue_id, offset = (_number(each, (1 << 63) - 1) for each in (*part.split(":"), "")[:2])
        if queue_id is None or offset is None:
            return {}
        found[queue_id] = offset
    return found


def _message(values: Values) -> NewMessage | Refusal:
    topic, text = values.get("topic", "").strip(), values.get("queue", "").strip()
    body = values.get("body", "").replace("\r\n", "\n").encode()  # browsers send lines of forms with CRLF
    keys, tags = " ".join(values.get("keys", "").split()), values.get("tags", "").strip()
    if fault := _name_fault("Topic", topic):
        return fault
    if len(body) > BODY_SIZE_MAX:
        return Refusal(f"The body has {count(len(body))} bytes; the maximum here is {count(BODY_SIZE_MAX)}.")
    if any(len(each) > NAME_LENGTH_MAX or not each.isprintable() for each in (keys, tags)):
        return Refusal(f"Keys and tag can have {NAME_LENGTH_MAX} printable characters.")
    queue_id = _number(text, 1 << 31) if text else None
    if text and queue_id is None:
        return Refusal("Queue must be a number.")
    return NewMessage(topic=topic, body=body, keys=keys, tags=tags, queue_id=queue_id)


def _name_fault(what: str, name: str) -> Refusal | None:
    if not name:
        return Refusal(f"{what} is empty.")
    if len(name) > NAME_LENGTH_MAX or not name.isprintable():
        return Refusal(f"{what} can have {NAME_LENGTH_MAX} printable characters.")
    return None


def _number(text: str, most: int) -> int | None:
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= most):
        return None
    return int(text)


def _difference(before: int | None, after: int) -> str:
    if before is None:
        return "starts here"
    if before == after:
        return "none"
    return f"{count(before - after)} again" if after < before else f"{count(after - before)} skipped"
