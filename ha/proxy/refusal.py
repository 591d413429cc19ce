"""Refusals of calls: a code and a message for the status of the response."""

from __future__ import annotations

from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand

from .messages import Code

_CODES: dict[int, Code] = {
    ResponseCode.SUCCESS: Code.OK,
    ResponseCode.SYSTEM_BUSY: Code.TOO_MANY_REQUESTS,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: Code.NOT_IMPLEMENTED,
    ResponseCode.TOPIC_NOT_EXIST: Code.TOPIC_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: Code.CONSUMER_GROUP_NOT_FOUND,
    ResponseCode.NO_PERMISSION: Code.FORBIDDEN,
}


class CallRefused(Exception):  # noqa: N818
    """The call is answered with `code` and `message` as its status."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def code_of(response: RemotingCommand) -> Code:
    """Returns the gRPC code for a broker's response code; INTERNAL_SERVER_ERROR if there is no equivalent."""
    return _CODES.get(response.code, Code.INTERNAL_SERVER_ERROR)


def reason_of(response: RemotingCommand) -> str:
    """Returns why a broker has refused a request."""
    return response.remark or f"broker answered code {response.code}"


def check(response: RemotingCommand) -> RemotingCommand:
    """Returns a broker's answer if its code is SUCCESS. Raises CallRefused otherwise."""
    if response.code != ResponseCode.SUCCESS:
        raise CallRefused(code_of(response), reason_of(response))
    return response
