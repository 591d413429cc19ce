"""The services of a role: starting, ending, and not waiting after the broker has ended."""

import pytest
import trio
import trio.testing

from ha.broker.role_services import RoleServices


class Service:
    def __init__(self) -> None:
        self.story: list[str] = []
        self.may_start = trio.Event()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self.story.append("starts")
        await self.may_start.wait()
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            self.story.append("ends")


async def test_services_run_from_begin_to_end(nursery: trio.Nursery) -> None:
    services, one = RoleServices(), Service()
    one.may_start.set()
    await nursery.start(services.serve)
    for _ in range(2):
        await services.begin([one.serve])
        await services.end()
    assert one.story == ["starts", "ends"] * 2


@pytest.mark.parametrize("when", ["before", "starting", "running"])
async def test_begin_returns_when_the_broker_ends(when: str) -> None:
    """A change of role can't be cancelled: if it waited, the process would never end."""
    services, one = RoleServices(), Service()

    async def change_role() -> None:
        for _ in range(2):
            await services.begin([one.serve])
            await services.end()

    with trio.fail_after(10):
        async with trio.open_nursery() as others:
            async with trio.open_nursery() as broker:
                await broker.start(services.serve)
                if when == "running":
                    one.may_start.set()
                    await services.begin([one.serve])
                    others.start_soon(services.end)
                elif when == "starting":
                    others.start_soon(change_role)
                    await trio.testing.wait_all_tasks_blocked()
                broker.cancel_scope.cancel()
            await change_role()
