"""`ha log …`: reads a store directory, of halog or RocketMQ, without its broker; the broker may be running.

The commands write nothing and take no lock. `verify` and `diff` need pyarrow (the extra `log`). Offsets are physical,
in bytes, unless stated otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter
from rich.table import Table

from ha.cli.exits import (
    EXIT_DAMAGED,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NOT_READY,
    EXIT_REFUSED,
    UsageError,
    needs_extra,
)
from ha.cli.showing import bars, notices, output, print_json, safe, safe_json, size, stoppable
from ha.cli.times import time_ms
from ha.protocol.compression import BODY_SIZE_MAX

if TYPE_CHECKING:
    from ha.cli.log.diff import Difference, DiffResult
    from ha.cli.log.dump import Choice
    from ha.cli.log.verify import VerifyResult

app = cyclopts.App(
    name="log",
    help="Read a store directory without its broker. verify and diff require the extra `log`.",
    help_format="markdown",
)

Store = Annotated[Path, Parameter(help="Store directory (the broker's storePathRootDir).")]
From = Annotated[int | None, Parameter(name="--from", help="Physical offset to start at, in bytes.")]
To = Annotated[int | None, Parameter(help="Physical offset to stop before, in bytes.")]
Json = Annotated[bool, Parameter(negative=(), help="Print the result as JSON.")]
_GAPS_SHOWN_MAX = 20


@app.command
def dump(
    path: Store,
    *,
    from_: From = None,
    to: To = None,
    topic: Annotated[list[str] | None, Parameter(negative=(), help="Only this topic (repeatable).")] = None,
    queue: Annotated[list[int] | None, Parameter(negative=(), help="Only this queue id (repeatable).")] = None,
    queue_offset: Annotated[
        str | None, Parameter(help="Only these queue offsets: N, or FIRST:STOP, either of which may be omitted.")
    ] = None,
    key: Annotated[
        list[str] | None, Parameter(negative=(), help="Only messages with this key or unique id (repeatable).")
    ] = None,
    tag: Annotated[list[str] | None, Parameter(negative=(), help="Only messages with this tag (repeatable).")] = None,
    since: Annotated[
        str | None, Parameter(help="Only messages stored at or after this time: 2026-11-22T09:30, or ms since 1970.")
    ] = None,
    until: Annotated[str | None, Parameter(help="Only messages stored before this time.")] = None,
    count: Annotated[int | None, Parameter(help="Stop after N records.")] = None,
    body: Annotated[bool, Parameter(help="Show bodies.")] = True,
    max_message_size: Annotated[
        int, Parameter(help="Maximum size of a decompressed body in bytes (the brokers' maxMessageSize).")
    ] = BODY_SIZE_MAX,
) -> int:
    """Print the records of a store in the order of the log, one line of JSON each.

    A body that is not UTF-8 is printed as `body_base64`. A compressed body is decompressed, or replaced by `body_error`
    if it is damaged or too long. Control characters are escaped. Without --topic or --key all records are printed,
    including those in no queue. Exit codes: 0 done; 2 usage; 65 damaged bytes were found (see standard error); 66 no
    store; 130 Ctrl-C, with the offset to resume from.
    """
    choice = _choice(from_, to, topic, queue, queue_offset, key, tag, since, until, count, body, max_message_size)
    from ha.cli.log.dump import dump as run

    errors = notices()
    with stoppable() as stop:
        done = run(path, choice, stop)
    for gap in done.gaps[:_GAPS_SHOWN_MAX]:
        errors.print(f"ha: {gap}")
    if len(done.gaps) > _GAPS_SHOWN_MAX:
        errors.print(f"ha: and {len(done.gaps) - _GAPS_SHOWN_MAX:,} more such gaps; ha log verify lists them")
    if done.damaged_count:
        errors.print(
            f"ha: {done.damaged_count:,} of the records are damaged (crc_ok is false); ha log verify shows where"
        )
    if not done.is_complete and done.count != count:
        errors.print(f"ha: stopped after {done.count:,} records; resume with --from {done.next_offset}")
        return EXIT_INTERRUPTED
    return EXIT_DAMAGED if done.gaps or done.damaged_count else EXIT_DONE


@app.command
def verify(
    path: Store,
    *,
    from_: From = None,
    to: To = None,
    examples: Annotated[int, Parameter(help="Maximum findings of each kind to show; all are counted.")] = 20,
    json: Json = False,
) -> int:
    """Check every record of a store, its queues against the log, and the log against its checksum files, if any.

    Exit codes: 0 clean; 2 usage; 65 damaged, with the file and bytes of each finding; 66 no store; 130 Ctrl-C, with the
    findings up to then and the options to resume with.
    """
    if examples < 1:
        raise UsageError("--examples is 1 or more")
    with needs_extra("ha log verify", "log"):
        from ha.cli.log.verify import verify as run
    with stoppable() as stop, bars() as show:
        result = run(
            path,
            from_=from_,
            to=to,
            examples_max=examples,
            stop=stop,
            progress=lambda done, total: show("verify", done, total),
        )
    if json:
        print_json(result)
    else:
        _show_verdict(result)
    if not result.is_complete:
        notices().print(f"ha: stopped at physical offset {result.examined_end:,}; resume with {result.resume}")
        return EXIT_INTERRUPTED
    return EXIT_DONE if result.is_clean else EXIT_DAMAGED


@app.command
def diff(left: Store, right: Store, *, from_: From = None, to: To = None, json: Json = False) -> int:
    """Show the first difference in the range that two stores share, and how much differs.

    Exit codes: 0 no difference; 1 they differ; 2 usage; 4 they share no offset, so nothing was compared; 66 no store;
    130 Ctrl-C, with the differences up to then and the options to resume with.
    """
    with needs_extra("ha log diff", "log"):
        from ha.cli.log.diff import diff as run
    with stoppable() as stop, bars() as show:
        result = run(
            left, right, from_=from_, to=to, stop=stop, progress=lambda done, total: show("compare", done, total)
        )
    if json:
        print_json(result)
    else:
        _show_difference(result)
    if not result.is_complete:
        notices().print(f"ha: stopped at physical offset {result.compared_end:,}; resume with {result.resume}")
        return EXIT_INTERRUPTED
    if result.compared_begin >= result.compared_end:
        notices().print("ha: nothing was compared: the stores have no physical offset in common")
        return EXIT_NOT_READY
    return EXIT_DONE if result.is_equal else EXIT_REFUSED


def _choice(
    from_: int | None,
    to: int | None,
    topics: list[str] | None,
    queues: list[int] | None,
    queue_offset: str | None,
    keys: list[str] | None,
    tags: list[str] | None,
    since: str | None,
    until: str | None,
    count: int | None,
    body: bool,
    max_message_size: int,
) -> Choice:
    from ha.arrow import RowFilter
    from ha.cli.log.dump import Choice

    if count is not None and count < 1:
        raise UsageError("--count is 1 or more")
    if max_message_size < 1:
        raise UsageError("--max-message-size is 1 or more")
    first = stop = None
    if queue_offset is not None:
        if not topics:
            raise UsageError("--queue-offset requires --topic: the queues of every topic have such offsets")
        low, colon, high = queue_offset.partition(":")
        if not all(part.isdecimal() and len(part) < 19 for part in (low, high) if part) or not (low or high):
            raise UsageError(f"--queue-offset {queue_offset!r} is invalid: use 7, 7:20, 7: or :20")
        first = int(low) if low else None
        stop = int(high) if high else None if colon else int(low) + 1
    times: list[int | None] = []
    for name, text in (("--since", since), ("--until", until)):
        try:
            times.append(None if text is None else time_ms(text))
        except (ValueError, OverflowError):
            raise UsageError(
                f"{name} {text!r} is invalid: use a time such as 2026-11-22T09:30 or 2026-11-22T09:30Z, or ms"
            ) from None
    where = RowFilter(
        topics=frozenset(topics) if topics else None,
        queue_ids=frozenset(queues) if queues else None,
        queue_offset_begin=first,
        queue_offset_end=stop,
        keys=frozenset(keys) if keys else None,
        tags=frozenset(tags) if tags else None,
        store_begin_ms=times[0],
        store_end_ms=times[1],
    )
    return Choice(from_=from_, to=to, where=where, count=count, with_body=body, message_size_max=max_message_size)


def _show_verdict(result: VerifyResult) -> None:
    from ha.cli.log.verify import MEANINGS, NOTICE_KINDS

    console = output()
    for kind, count in result.counts.items():
        weight = "notice" if kind in NOTICE_KINDS else "DAMAGE"
        console.print(f"{weight}: {count:,} × {kind.replace('_', ' ')}: {MEANINGS[kind]}")
    if result.findings:
        table = Table("what", "file", "bytes", "topic", "queue", "queue offset", "detail", box=None)
        for found in result.findings:
            table.add_row(
                found.kind.replace("_", " "),
                safe(found.file) or "no file",
                f"{found.file_begin:,} to {found.file_end:,}",
                safe(found.topic),
                "" if found.queue_id < 0 else str(found.queue_id),
                "" if found.queue_offset < 0 else f"{found.queue_offset:,}",
                safe(found.detail),
            )
        console.print(table)
    verdict = "clean" if result.is_clean else f"{result.damage_count:,} findings of damage"
    console.print(
        f"{safe(result.path)}: {verdict}. {result.record_count:,} records, {size(result.record_bytes)}, in physical "
        f"offsets {result.begin:,} to {result.examined_end:,}; {result.segment_count:,} segments, "
        f"{result.queue_count:,} queues, {'with' if result.has_checksums else 'without'} checksum files; "
        f"{result.duration_s:.1f} s",
        soft_wrap=True,
    )


def _show_difference(result: DiffResult) -> None:
    console = output()
    if result.first is not None:
        _show_first(result.first)
    for kind, count in result.counts.items():
        console.print(f"{count:,} × {kind.replace('_', ' ')}")
    table = Table("", "store", "from", "to", box=None)
    table.add_row("left", safe(result.left), f"{result.left_begin:,}", f"{result.left_end:,}")
    table.add_row("right", safe(result.right), f"{result.right_begin:,}", f"{result.right_end:,}")
    console.print(table)
    verdict = "equal" if result.is_equal else "they differ"
    if result.is_equal and result.differing_ranges:
        verdict = "equal, except for unused bytes after the last record of a segment"
    console.print(
        f"Compared physical offsets {result.compared_begin:,} to {result.compared_end:,}: {verdict}; "
        f"{result.duration_s:.1f} s",
        soft_wrap=True,
    )


def _show_first(first: Difference) -> None:
    console = output()
    console.print(f"First difference at physical offset {first.physical_offset:,}")
    if first.differing_fields:
        console.print(f"in {', '.join(first.differing_fields)}")
    for name, side in (("left", first.left), ("right", first.right)):
        console.print(f"{name}: {safe(side.file) or 'no file'}, bytes {side.file_begin:,} to {side.file_end:,}")
        if side.record is None:
            console.print("  no record" if first.record_offset is not None else "  bytes after the last record")
        else:
            console.print(f"  {safe_json(side.record).decode()}", soft_wrap=True)
