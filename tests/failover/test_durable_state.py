"""Completeness after a start, depending on how the last process ended."""

import pytest

from ha.failover.durable_state import DurableState, StartConditions
from tests.failover.group import MemoryFile

Changes = dict[str, object]

CLEAN: Changes = {"was_stopped_cleanly": True}
SYNC: Changes = {"flushes_first": True}
OTHER_BOOT: Changes = {"boot_id": "b"}
NO_BOOT: Changes = {"boot_id": None}
EMPTY: Changes = {"is_empty": True, "has_term": False}
NO_TERM: Changes = {"has_term": False}
OTHER_MEMBER: Changes = {"member": "c/b/2"}
SHORTER: Changes = {"is_shorter": True}


def start(*changes: Changes) -> StartConditions:
    made: Changes = {"boot_id": "a", "flushes_first": False, "was_stopped_cleanly": False}
    made |= {"is_empty": False, "has_term": True, "is_shorter": False, "member": "c/b/1"}
    for change in changes:
        made |= change
    return StartConditions(**made)  # type: ignore[arg-type]


async def state_after(*starts: StartConditions) -> DurableState:
    file = MemoryFile()
    for each in starts:
        state = DurableState(file)
        await state.begin(each)
    return state


@pytest.mark.parametrize(
    ("starts", "is_complete"),
    [
        ([start(CLEAN)], True),
        ([start()], False),  # an unclean stop of an earlier release, which kept no state
        ([start(CLEAN), start()], True),  # killed: the kernel still had its pages
        ([start(CLEAN), start(OTHER_BOOT)], False),
        ([start(CLEAN), start(OTHER_BOOT, CLEAN)], True),
        ([start(CLEAN, NO_BOOT), start(NO_BOOT)], False),
        ([start(CLEAN, SYNC), start(OTHER_BOOT, SYNC)], True),
        ([start(CLEAN), start(OTHER_BOOT, SYNC)], False),  # what the earlier process acknowledged was not flushed
        ([start(CLEAN), start(SYNC), start(OTHER_BOOT, SYNC)], False),  # nor does finding it in the page cache flush it
        ([start(CLEAN), start(CLEAN, SYNC), start(OTHER_BOOT, SYNC)], True),
        ([start(CLEAN, SYNC), start(), start(OTHER_BOOT)], False),
        ([start(CLEAN), start(OTHER_BOOT), start(OTHER_BOOT)], False),  # incomplete until it has caught up
        ([start(CLEAN), start(OTHER_BOOT), start(OTHER_BOOT, CLEAN)], False),
        ([start(CLEAN), start(CLEAN, NO_TERM)], False),  # the log was deleted
        ([start(CLEAN), start(SHORTER)], False),  # a failed sync: the kernel had dropped the pages
        ([start(CLEAN, SYNC), start(SYNC, SHORTER)], False),
        ([start(CLEAN), start(SHORTER), start(CLEAN)], False),
        ([start(CLEAN, SHORTER)], False),
        ([start(CLEAN), start(CLEAN, OTHER_MEMBER)], False),  # two members' volumes were exchanged
        ([start(CLEAN), start(CLEAN, OTHER_MEMBER), start(CLEAN)], False),
        ([start(CLEAN), start(CLEAN, NO_TERM), start(CLEAN)], False),  # and copied in part since
    ],
)
async def test_the_log_is_complete_if_nothing_can_be_lost(starts: list[StartConditions], is_complete: bool) -> None:
    assert (await state_after(*starts)).is_complete is is_complete


async def test_a_caught_up_member_is_complete_under_the_same_kernel() -> None:
    file = MemoryFile()
    for each, is_complete in ((start(CLEAN), True), (start(OTHER_BOOT), False)):
        state = DurableState(file)
        await state.begin(each)
        assert state.is_complete is is_complete
    await state.mark_complete()
    for each, is_complete in ((start(OTHER_BOOT), True), (start(), False)):
        state = DurableState(file)
        await state.begin(each)
        assert state.is_complete is is_complete


async def test_a_state_of_an_earlier_release_may_be_any_members() -> None:
    file = MemoryFile()
    file.content = b'{"bootId":"a","flushesFirst":false,"isComplete":true,"isNew":false,"group":null}'
    state = DurableState(file)
    await state.begin(start())
    assert state.is_complete


async def test_an_empty_store_is_new_until_it_has_caught_up() -> None:
    state = await state_after(start(CLEAN, EMPTY), start(), start(OTHER_BOOT, CLEAN))
    assert state.is_new
    assert not state.is_complete
    await state.mark_complete()
    assert not state.is_new
    assert not (await state_after(start(CLEAN), start(OTHER_BOOT, EMPTY))).is_new  # it had a log, and lost all of it


@pytest.mark.parametrize(
    "content",
    [b'{"bootId":"a","flushesFirst":tru', b'{"bootId":"\xff","flushesFirst":true,"isComplete":true,"isNew":false}'],
    ids=["truncated", "not UTF-8"],
)
async def test_a_damaged_file_proves_nothing(content: bytes) -> None:
    file = MemoryFile()
    file.content = content
    state = DurableState(file)
    await state.begin(start(CLEAN))
    assert not state.is_complete
