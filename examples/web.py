"""A web service that sends a message for each order, and consumes the orders.

hypercorn web:app           # on asyncio
hypercorn -k trio web:app   # on Trio

The environment variable NAMESRV_ADDR names the name servers.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypedDict

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ha.client import (
    Client,
    ClientError,
    Message,
    Producer,
    PushConsumer,
    ReceivedMessage,
    StartFrom,
)


class State(TypedDict):
    """What requests find in `request.state`."""

    producer: Producer


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[State]:
    """Opens the clients when the server starts, and closes them when it stops."""
    async with (
        Client() as client,
        Producer(client, group="shop") as producer,
        PushConsumer(
            client,
            bill,
            group="billing",
            subscriptions={"orders": "*"},
            start_from=StartFrom.FIRST,
        ),
    ):
        yield {"producer": producer}


async def create_order(request: Request) -> JSONResponse:
    """Answers 201 once the order is stored."""
    body = await request.body()
    if not body:
        return JSONResponse({"error": "the order is empty"}, status_code=400)
    producer: Producer = request.state.producer
    try:
        result = await producer.send(Message("orders", body))
    except ClientError as error:  # after retries, such as no broker for 10 s
        return JSONResponse({"error": str(error)}, status_code=503)
    answer = {"id": result.message_id, "status": result.status.name}
    return JSONResponse(answer, status_code=201)


async def bill(message: ReceivedMessage) -> None:
    """Handles an order. If it raises, the order is delivered again later."""
    print("billed", message.body.decode(), flush=True)


routes = [Route("/orders", create_order, methods=["POST"])]
app = Starlette(routes=routes, lifespan=lifespan)
