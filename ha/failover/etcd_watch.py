"""A watch of a group's keys in etcd: a view after each change, over lost connections, frozen servers and compactions.

One task keeps a stream open at one server after the other. What it tells is folded into the keys as they are, one view
for each revision. It goes on at the revision behind the last one told, so nothing is told twice or left out; if etcd
has forgotten what came next (compaction), or is another one than before (restored from a copy), it begins anew.

A stream that says nothing may have nothing to say, or be dead: its server frozen, cut off, its connection gone. The
gateway takes no requests for progress on a stream (over HTTP/1.1 it reads all that is asked before it answers), and
etcd's own signs of life come every ten minutes. So after some silence all keys are read, linearizably, and if the
stream doesn't tell soon what they show, or they can't be read, another is opened.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

import trio

from ha.errors import RemoteProtocolError

from .agreement import AgreementUnavailable, Seen
from .etcd_client import ANSWER_SIZE_MAX, EtcdClient, Refused, wants_token
from .etcd_values import KeyValue, RangeAnswer, WatchAnswer, by_key, decode, range_request, read_view, watch_request

logger = logging.getLogger(__name__)

QUEUE_COUNT_MAX = 256
"""So many views may wait for who asked for them; then only the newest remains, as one after a gap."""


class EtcdWatch:
    """See `ha.failover.agreement.Watch`. `run` has to run meanwhile."""

    def __init__(self, client: EtcdClient, prefix: bytes) -> None:
        self._client = client
        self._prefix = prefix
        self._queue: deque[Seen] = deque()
        self._grown = trio.lowlevel.ParkingLot()
        self._keys: dict[bytes, KeyValue] | None = None
        """As they were at `_revision`; None: to be read anew"""
        self._revision = 0
        self._rest = bytearray()
        self._heard_at = 0.0
        self._created = trio.Event()
        self._ended = ""
        """Why the present stream has to end"""

    def __aiter__(self) -> EtcdWatch:
        return self

    async def __anext__(self) -> Seen:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._queue:
            await self._grown.park()
        return self._queue.popleft()

    async def run(self) -> None:
        """Follow the changes until cancelled."""
        endpoint, failures = self._client.first_endpoint, 0
        while True:
            try:
                if self._keys is None:
                    await self._start_over()
            except AgreementUnavailable as error:
                logger.debug("%s", error)
            else:
                reason = await self._follow(endpoint)
                if self._created.is_set():
                    failures = 0
                if wants_token(reason):
                    self._client.forget_token()
                self._client.failed(endpoint, f"watch: {reason}")
                endpoint = (endpoint + 1) % len(self._client.options.endpoints)
            failures += 1
            await self._client.pause(failures)

    async def _read_keys(self) -> tuple[dict[bytes, KeyValue], int]:
        what = "watching the group"
        try:
            answer, _ = await self._client.call(
                what, "/v3/kv/range", range_request(self._prefix), timeout_s=2.0, changes=False
            )
            found = decode(answer, RangeAnswer)
        except (Refused, RemoteProtocolError) as error:
            raise AgreementUnavailable(what, str(error), outcome_unknown=False) from None
        return by_key(found.kvs), found.header.revision

    async def _start_over(self) -> None:
        keys, revision = await self._read_keys()
        self._client.watch_restart_count += self._revision > 0
        self._tell(keys, revision, is_restart=True)

    def _tell(self, keys: dict[bytes, KeyValue], revision: int, *, is_restart: bool) -> None:
        """AgreementUnavailable if the keys are not what halog writes."""
        try:
            view = read_view(self._prefix, keys, revision)
        except RemoteProtocolError as error:
            raise AgreementUnavailable("watching the group", str(error), outcome_unknown=False) from None
        self._keys, self._revision = keys, revision
        if len(self._queue) >= QUEUE_COUNT_MAX:
            self._queue.clear()
            is_restart = True
        self._queue.append(Seen(view, is_restart))
        self._grown.unpark_all()

    async def _follow(self, endpoint: int) -> str:
        """Tell what one server tells; return why that has ended."""
        self._rest.clear()
        self._created = trio.Event()
        self._ended = ""
        self._heard_at = trio.current_time()
        reason = ""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check, nursery.cancel_scope)
            request = watch_request(self._prefix, self._revision + 1)
            reason = await self._client.follow(endpoint, "/v3/watch", request, self._take)
            nursery.cancel_scope.cancel()
        return self._ended or reason

    def _take(self, piece: bytes) -> bool:
        if self._ended:  # by `_check`, while this piece was on its way
            return False
        self._heard_at = trio.current_time()
        *lines, rest = (self._rest + piece).split(b"\n")
        self._rest = rest
        try:
            for line in lines:
                if line and not self._take_line(bytes(line)):
                    return False
        except RemoteProtocolError as error:
            self._ended = str(error)
        except AgreementUnavailable as error:
            self._ended, self._keys = error.reason, None
        if len(rest) > ANSWER_SIZE_MAX:
            self._ended = f"a line of more than {ANSWER_SIZE_MAX} bytes"
        return not self._ended

    def _take_line(self, line: bytes) -> bool:
        answer = decode(line, WatchAnswer)
        if answer.error is not None:
            self._ended = str(answer.error.get("message", "an error without a message"))
        elif answer.result.compact_revision:
            self._ended, self._keys = "what came next has been compacted", None
        elif answer.result.canceled:
            self._ended = answer.result.cancel_reason or "canceled"
        else:
            if answer.result.created:
                self._created.set()
            self._fold(answer)
        return not self._ended

    def _fold(self, answer: WatchAnswer) -> None:
        """All events of one revision are in one answer; an answer may have those of many."""
        assert self._keys is not None
        events = [event for event in answer.result.events if event.kv.mod_revision > self._revision]
        keys = dict(self._keys)
        for number, event in enumerate(events):
            if event.type == "DELETE":
                keys.pop(event.kv.key, None)
            else:
                keys[event.kv.key] = event.kv
            revision = event.kv.mod_revision
            if number + 1 == len(events) or events[number + 1].kv.mod_revision != revision:
                self._tell(dict(keys), revision, is_restart=False)

    async def _check(self, scope: trio.CancelScope) -> None:
        """Cancel `scope` if the stream is dead, or if etcd was restored from a backup.

        A restore ends all streams, so each new one is checked once. Afterwards a stream with frequent events is alive.
        """
        options = self._client.options
        with trio.move_on_after(options.watch_check_s):
            await self._created.wait()
        is_first = True
        while True:
            if not is_first:
                await trio.sleep_until(self._heard_at + options.watch_check_s)
                if trio.current_time() < self._heard_at + options.watch_check_s:
                    continue
            is_first = False
            try:
                keys, revision = await self._read_keys()
            except AgreementUnavailable as error:
                self._ended = f"nothing said, and nothing to be read: {error.reason}"
            else:
                if revision < self._revision or self._went_back(keys, revision):
                    self._ended, self._keys = "etcd has lost what it had told", None
                elif not self._created.is_set() or self._lacks(keys, revision):
                    await trio.sleep(options.attempt_timeout_s / 2)
                    if not self._created.is_set() or self._lacks(keys, revision):
                        self._ended = f"it did not tell what is so since revision {revision} or before"
            if self._ended:
                scope.cancel()
                return
            self._heard_at = max(self._heard_at, trio.current_time())

    def _went_back(self, keys: Mapping[bytes, KeyValue], revision: int) -> bool:
        """Tell whether `keys`, read at `revision`, are older than what was told: etcd was restored from a backup.

        Its revision does not tell once it has grown beyond the last one told, and leases may have outlived the restore.
        """
        for key, found in keys.items():
            told = None if self._keys is None else self._keys.get(key)
            if told is not None and told.mod_revision <= revision:
                if found.mod_revision < told.mod_revision:
                    return True
                if found.mod_revision == told.mod_revision and found.value != told.value:
                    return True
        return False

    def _lacks(self, keys: Mapping[bytes, KeyValue], revision: int) -> bool:
        """Tell whether less has been told than what showed at `revision`."""
        if self._keys is None:
            return False
        untold = any(found.mod_revision > self._revision for found in keys.values())
        return untold or any(key not in keys and told.mod_revision <= revision for key, told in self._keys.items())
