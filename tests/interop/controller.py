"""RocketMQ's controller in a real name server, and brokers whose roles it decides."""

import json
from collections.abc import Mapping

import trio

from ha.protocol.bodies import RegisterBrokerBody
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import RegisterBrokerRequest
from ha.protocol.java_json import dumps
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient, open_remoting_client
from ha.store.message_store import MessageStore
from tests.interop.processes import Children, free_ports
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server

BROKER_NAME, CLUSTER_NAME = "broker-a", "InteropCluster"
_IDENTITY = {"clusterName": CLUSTER_NAME, "brokerName": BROKER_NAME}
_BROKER_HEARTBEAT = 904
_ALTER_SET, _ELECT_MASTER, _REGISTER_BROKER, _REPLICA_INFO = 1001, 1002, 1003, 1004
_NEXT_BROKER_ID, _APPLY_BROKER_ID = 1012, 1013


async def start_controller(children: Children, release: Release) -> tuple[str, str]:
    """Starts a name server with a controller in it; returns their addresses."""
    raft = free_ports()
    settings: dict[str, object] = {
        "enableControllerInNamesrv": "true",
        "controllerDLegerGroup": "group1",
        "controllerDLegerPeers": f"n0-127.0.0.1:{raft}",
        "controllerDLegerSelfId": "n0",
        "controllerStorePath": children.folder / "controller-store",
        "enableElectUncleanMaster": "false",
        "notifyBrokerRoleChanged": "true",
    }
    name_server = await start_name_server(children, release, settings=settings)
    controller = f"127.0.0.1:{raft}"
    async with open_remoting_client() as remoting:
        with trio.fail_after(60):
            while True:
                if await _leads(remoting, controller):
                    return name_server, controller
                await trio.sleep(0.2)


async def _leads(remoting: RemotingClient, controller: str) -> bool:
    """Whether it is up, has elected itself, and answers requests reserved to a leader, which its metadata report too
    early."""
    try:
        answer = await remoting.invoke(controller, RemotingCommand(_NEXT_BROKER_ID, ext_fields=_IDENTITY), 5.0)
    except (OSError, trio.BrokenResourceError, trio.TooSlowError):
        return False
    return answer.code == ResponseCode.SUCCESS


def switching_broker(
    children: Children, release: Release, name: str, name_server: str, controller: str, extra: Mapping[str, object]
) -> RocketMqBroker:
    """A real broker whose role the controller decides."""
    settings = {
        "enableControllerMode": "true",
        "controllerAddr": controller,
        "allAckInSyncStateSet": "true",
        "inSyncReplicas": 1,
        "controllerHeartBeatTimeoutMills": 5000,
        "syncControllerMetadataPeriod": 1000,
        "sendHeartbeatTimeoutMillis": 1000,
        "brokerHeartbeatInterval": 500,
        "checkSyncStateSetPeriod": 1000,
        **extra,
    }
    return RocketMqBroker(children, release, name, name_server, "SYNC_MASTER", extra=settings)


class ControllerMember:
    """A member of a broker group, for a controller, that is not a RocketMQ broker; `broker_id` was assigned to it.

    Its broker address is unused: only its state at the controller and the name servers matters here.
    """

    def __init__(self, remoting: RemotingClient, controller: str) -> None:
        self._remoting = remoting
        self._controller = controller
        self.broker_id = 0
        self.broker_address = f"127.0.0.1:{free_ports()}"

    async def join(self) -> None:
        """Applies for a broker id and registers."""
        answer = await self._ask(_NEXT_BROKER_ID, _IDENTITY)
        self.broker_id = int(answer.ext_fields["nextBrokerId"])
        check_code = f"{self.broker_address};{self.broker_id}"
        applied = {"appliedBrokerId": str(self.broker_id), "registerCheckCode": check_code}
        await self._ask(_APPLY_BROKER_ID, _IDENTITY | applied)
        await self._ask(_REGISTER_BROKER, self._identity | {"brokerAddress": self.broker_address})

    async def keep_alive(self, store: MessageStore) -> None:
        """Sends heartbeats until cancelled."""
        while True:
            last = store.epochs.last
            beat = {
                "brokerAddr": self.broker_address,
                "epoch": str(0 if last is None else last.epoch),
                "maxOffset": str(store.log.max_offset.value),
                "confirmOffset": str(min(store.log.dispatch_limit.value, store.log.max_offset.value)),
                "heartbeatTimeoutMills": "5000",
                "electionPriority": "1",
            }
            await self._ask(_BROKER_HEARTBEAT, self._identity | beat)
            await trio.sleep(0.5)

    async def become_master(self) -> int:
        """Is elected; returns the epoch."""
        answer = await self._ask(_ELECT_MASTER, self._identity | {"designateElect": "false", "invokeTime": "1"})
        assert int(answer.ext_fields["masterBrokerId"]) == self.broker_id, answer
        return int(answer.ext_fields["masterEpoch"])

    async def alter_set(self, members: frozenset[int], *, epoch: int, set_epoch: int) -> None:
        """As the master, replaces the sync-state set of `set_epoch`."""
        fields = {"brokerName": BROKER_NAME, "masterBrokerId": str(self.broker_id), "masterEpoch": str(epoch)}
        body = json.dumps({"syncStateSet": sorted(members), "syncStateSetEpoch": set_epoch}).encode()
        await self._ask(_ALTER_SET, fields, body)

    async def wait_set(self, *members: int) -> int:
        """Waits until the controller has this sync-state set; returns its epoch."""
        with trio.fail_after(60):
            while True:
                held, epoch = await self._current_set()
                if held == frozenset(members):
                    return epoch
                await trio.sleep(0.2)

    async def _current_set(self) -> tuple[frozenset[int], int]:
        answer = await self._ask(_REPLICA_INFO, {"brokerName": BROKER_NAME})
        held = json.loads(bytes(answer.body))
        return frozenset(held["syncStateSet"]), int(held["syncStateSetEpoch"])

    async def register_as_master(self, name_server: str, ha_address: str) -> None:
        """Registers at a name server the address from which slaves copy this one's log."""
        header = RegisterBrokerRequest(
            broker_name=BROKER_NAME,
            broker_addr=self.broker_address,
            cluster_name=CLUSTER_NAME,
            ha_server_addr=ha_address,
            broker_id=0,
        )
        body = dumps(RegisterBrokerBody())
        request = RemotingCommand(RequestCode.REGISTER_BROKER, ext_fields=header.to_ext_fields(), body=body)
        answer = await self._remoting.invoke(name_server, request, 10.0)
        assert answer.code == ResponseCode.SUCCESS, answer

    @property
    def _identity(self) -> dict[str, str]:
        return _IDENTITY | {"brokerId": str(self.broker_id)}

    async def _ask(self, code: int, fields: dict[str, str], body: bytes = b"") -> RemotingCommand:
        request = RemotingCommand(code, ext_fields=fields, body=body)
        answer = await self._remoting.invoke(self._controller, request, 10.0)
        assert answer.code == ResponseCode.SUCCESS, (code, answer)
        return answer
