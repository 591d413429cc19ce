"""A watch of a group's keys in etcd: a view after each change, across lost connections, frozen servers and compactions.

One task keeps a stream open, at the next endpoint if one fails, and applies the stream's events to the keys, which
gives one view for each revision. A new stream starts after the last revision, so that no change is reported twice or
missed. If etcd has compacted the next revision, or was restored from a backup, the watch starts over with all keys.

A silent stream may have no events, or be dead: its server frozen or cut off, its connection lost. The gateway does not
support progress requests on a stream (over HTTP/1.1 it reads the whole request before it answers), and etcd's own
progress notifications come every ten minutes. So after some silence all keys are read, linearizably. If the stream
does not deliver soon what they show, or if they can't be read, another stream is opened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import trio

from ha.errors import RemoteProtocolError

from .agreement import AgreementUnavailable, Seen
from .etcd_client import ANSWER_SIZE_MAX, EtcdClient, Refused, wants_token
from .etcd_values import KeyValue, RangeAnswer, WatchAnswer, by_key, decode, range_request, read_view, watch_request

QUEUE_COUNT_MAX = 256
"""Maximum number of views queued for the reader. When the queue is full, only the newest is kept, with
`Seen.is_restart`."""


class EtcdWatch:
    """Watches the keys of one group in etcd; implements `ha.failover.agreement.Watch`. `run` is its task."""

    def __init__(self, client: EtcdClient, prefix: bytes) -> None:
        self._client = client
        self._prefix = prefix
        self._queue: deque[Seen] = deque()
        self._queued = trio.lowlevel.ParkingLot()
        self._keys: dict[bytes, KeyValue] | None = None
        """The keys at `_revision`; None if they have to be read again"""
        self._revision = 0
        self._partial_line = bytearray()
        self._received_at = 0.0
        self._created = trio.Event()
        self._end_reason = ""
        """Why the present stream has to end, "" while it continues"""

    def __aiter__(self) -> EtcdWatch:
        return self

    async def __anext__(self) -> Seen:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._queue:
            await self._queued.park()
        return self._queue.popleft()

    async def run(self) -> None:
        """Receives changes until cancelled."""
        options = self._client.options
        endpoint, failures, count = self._client.first_endpoint, 0, len(options.endpoints)
        while True:
            try:
                if self._keys is None:
                    await self._start_over()
            except AgreementUnavailable as error:
                reason = error.reason
            else:
                # As for calls, the timeout doubles with each round of all endpoints, so that a slow service can answer.
                reason = await self._follow(endpoint, options.attempt_timeout_s * 2 ** min(failures // count, 4))
                if self._created.is_set():
                    failures = 0
                if wants_token(reason):
                    self._client.forget_token()
            self._client.failed(endpoint, f"watch: {reason}")
            endpoint = (endpoint + 1) % count
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
        self._publish(keys, revision, is_restart=True)

    def _publish(self, keys: dict[bytes, KeyValue], revision: int, *, is_restart: bool) -> None:
        """Queues a view. Raises AgreementUnavailable if a key was not written by halog."""
        try:
            view = read_view(self._prefix, keys, revision)
        except RemoteProtocolError as error:
            raise AgreementUnavailable("watching the group", str(error), outcome_unknown=False) from None
        self._keys, self._revision = keys, revision
        if len(self._queue) >= QUEUE_COUNT_MAX:
            self._queue.clear()
            is_restart = True
        self._queue.append(Seen(view, is_restart))
        self._queued.unpark_all()

    async def _follow(self, endpoint: int, timeout_s: float) -> str:
        """Applies the events of one endpoint's stream, which must begin within `timeout_s`; returns why it ended."""
        self._partial_line.clear()
        self._created = trio.Event()
        self._end_reason = ""
        self._received_at = trio.current_time()
        reason = ""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check, nursery.cancel_scope)
            request = watch_request(self._prefix, self._revision + 1)
            reason = await self._client.follow(endpoint, "/v3/watch", request, self._take, timeout_s=timeout_s)
            nursery.cancel_scope.cancel()
        return self._end_reason or reason

    def _take(self, piece: bytes) -> bool:
        if self._end_reason:  # by `_check`, while this piece was being received
            return False
        self._received_at = trio.current_time()
        *lines, rest = (self._partial_line + piece).split(b"\n")
        self._partial_line = rest
        try:
            for line in lines:
                if line and not self._take_line(bytes(line)):
                    return False
        except RemoteProtocolError as error:
            self._end_reason = str(error)
        except AgreementUnavailable as error:
            self._end_reason, self._keys = error.reason, None
        if len(rest) > ANSWER_SIZE_MAX:
            self._end_reason = f"a line of more than {ANSWER_SIZE_MAX} bytes"
        return not self._end_reason

    def _take_line(self, line: bytes) -> bool:
        answer = decode(line, WatchAnswer)
        if answer.error is not None:
            self._end_reason = str(answer.error.get("message", "an error without a message"))
        elif answer.result.compact_revision:
            self._end_reason, self._keys = "the next revision has been compacted", None
        elif answer.result.canceled:
            self._end_reason = answer.result.cancel_reason or "canceled"
        else:
            if answer.result.created:
                self._created.set()
            self._apply(answer)
        return not self._end_reason

    def _apply(self, answer: WatchAnswer) -> None:
        """Publishes a view for each revision. An answer may contain several revisions, but no revision is split between
        answers."""
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
                self._publish(dict(keys), revision, is_restart=False)

    async def _check(self, scope: trio.CancelScope) -> None:
        """Cancels `scope` if the stream is dead, or if etcd was restored from a backup.

        A restore ends all streams, so each new one is checked once. After that, a stream is checked whenever it
        has been silent for `watch_check_s`.
        """
        options = self._client.options
        with trio.move_on_after(options.watch_check_s):
            await self._created.wait()
        is_first = True
        while True:
            if not is_first:
                await trio.sleep_until(self._received_at + options.watch_check_s)
                if trio.current_time() < self._received_at + options.watch_check_s:
                    continue
            is_first = False
            published = self._revision  # a read that starts now shows at least this
            try:
                keys, revision = await self._read_keys()
            except AgreementUnavailable as error:
                self._end_reason = f"it is silent, and the keys can't be read: {error.reason}"
            else:
                if revision < published or self._went_back(keys, revision):
                    self._end_reason, self._keys = "etcd has lost changes that it had reported", None
                elif not self._created.is_set() or self._lacks(keys, revision):
                    await trio.sleep(options.attempt_timeout_s / 2)
                    if not self._created.is_set() or self._lacks(keys, revision):
                        self._end_reason = f"it did not report the changes up to revision {revision}"
            if self._end_reason:
                scope.cancel()
                return
            self._received_at = max(self._received_at, trio.current_time())

    def _went_back(self, keys: Mapping[bytes, KeyValue], revision: int) -> bool:
        """Returns whether `keys`, read at `revision`, are older than what was published: etcd was restored from a
        backup.

        Once etcd's revision has passed the last published one, it no longer shows a restore. Neither do the lease ids,
        as leases may survive a restore.
        """
        for key, found in keys.items():
            published = None if self._keys is None else self._keys.get(key)
            if published is not None and published.mod_revision <= revision:
                if found.mod_revision < published.mod_revision:
                    return True
                if found.mod_revision == published.mod_revision and found.value != published.value:
                    return True
        return False

    def _lacks(self, keys: Mapping[bytes, KeyValue], revision: int) -> bool:
        """Returns whether changes up to `revision`, which `keys` show, were not published yet."""
        if self._keys is None:
            return False
        is_behind = any(found.mod_revision > self._revision for found in keys.values())
        return is_behind or any(key not in keys and old.mod_revision <= revision for key, old in self._keys.items())
