"""Stores for the jobs' tests, written by halog's own store, and runners that need no Spark."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ha.protocol.codes import PutStatus, SysFlag
from ha.protocol.record import Message, encode_host
from ha.protocol.topic_names import SCHEDULE_TOPIC
from ha.store.message_store import open_message_store
from ha.store.options import StoreOptions
from tests.store.stores import WallClock, dispatched, put_batch

V4, V6 = encode_host("10.1.2.3", 40000), encode_host("2001:db8::7", 40001)
LONG_TOPIC = "%RETRY%" + "long-group-" * 20
TRANSACTIONS = [0, 0, 0, SysFlag.TRANSACTION_PREPARED, SysFlag.TRANSACTION_ROLLBACK, SysFlag.TRANSACTION_COMMIT]


def run_inline(function: Callable[[Any], Any], items: Sequence[Any], progress: Callable[[int, int], None]) -> list[Any]:
    made = []
    for number, item in enumerate(items):
        made.append(function(item))
        progress(number + 1, len(items))
    return made


def varied_message(random_: random.Random, number: int) -> Message:
    """A message of any kind that dispatch handles differently; V2 by its long topic, IPv6 by its host."""
    topic = random_.choice(["flights", "flights", "delays", "задержки", LONG_TOPIC, SCHEDULE_TOPIC])
    pairs = [f"UNIQ_KEY\x01{random_.getrandbits(128):032X}"] if random_.random() < 0.9 else []
    if random_.random() < 0.7:
        words = [f"N{random_.randrange(50)}" + random_.choice(["", "é", "𝄞"]) for _ in range(random_.randrange(1, 4))]
        pairs.append("KEYS\x01" + random_.choice([" ", "  "]).join(words))
    if random_.random() < 0.6:
        pairs.append(f"TAGS\x01{random_.choice(['late', 'early', 'ß', 'x' * 40])}")
    if topic == SCHEDULE_TOPIC:
        pairs.append(f"DELAY\x01{random_.choice(['1', '3', '18', '40', '0', 'none'])}")
    random_.shuffle(pairs)
    properties = "\x02".join(pairs) + random_.choice(["", "\x02"]) if pairs else ""
    return Message(
        topic=topic,
        queue_id=random_.randrange(3),
        body=random_.randbytes(random_.randrange(0, 300)),
        properties=properties.encode(),
        flag=number,
        sys_flag=random_.choice(TRANSACTIONS),
        born_host=random_.choice([V4, V4, V6]),
    )


def store_options(root: Path, **changes: Any) -> StoreOptions:
    given: dict[str, Any] = {
        "root": root,
        "segment_size": 64 << 10,
        "queue_entry_count": 100,
        "index_slot_count": 500,
        "index_entry_count": 400,
        "message_size_max": 4096,
        "clean_first_s": 1e9,
    }
    return StoreOptions(**given | changes)


async def write_store(root: Path, count: int, *, seed: int = 7, **changes: Any) -> StoreOptions:
    """A store of `count` varied messages, stopped cleanly, including batches and both kinds of hosts."""
    random_ = random.Random(seed)
    clock = WallClock()
    number = 0
    for store_host in (V4, V6):
        options = store_options(root, store_host=store_host, **changes)
        async with open_message_store(options, wall_clock_ms=clock) as store:
            while number < count // (2 if store_host is V4 else 1):
                clock.now_ms += random_.randrange(3000)
                messages = [varied_message(random_, number + place) for place in range(random_.choice([1, 1, 1, 5]))]
                put = put_batch(store.log, messages) if len(messages) > 1 else store.log.put(messages)
                results = await put
                assert {result.status for result in results} == {PutStatus.PUT_OK}
                number += len(messages)
            await dispatched(store)
    return options
