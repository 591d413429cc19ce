"""RocketMQ 5.5.0's mqadmin and client with a halog broker that has users and policies."""

import json
from typing import Any

import pytest

from tests.interop.acl2_cases import ALICE, CLUSTER, PASSWORD, SUPER, SUPER_PASSWORD
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.java_client import open_java_client
from tests.interop.mqadmin import open_mqadmin
from tests.interop.processes import Children
from tests.interop.releases import Release


@pytest.mark.parametrize("release", ["5.5.0"], indirect=True)  # 4.9 has no such commands
async def test_mqadmin_and_clients_of_users(children: Children, release: Release) -> None:
    name_server = await start_halog_name_server(children)
    extra: dict[str, object] = {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "initAuthenticationUser": json.dumps({"username": SUPER, "password": SUPER_PASSWORD}),
    }
    broker = HalogBroker(children, "master", name_server, "ASYNC_MASTER", extra=extra)
    await broker.start()
    conf = children.folder / "mqadmin-home" / "conf"
    conf.mkdir(parents=True)
    (conf / "tools.yml").write_text(f"accessKey: {SUPER}\nsecretKey: {SUPER_PASSWORD}\n")
    at = ("-b", broker.address)
    async with (
        open_mqadmin(children, release, name_server) as tool,
        open_java_client(children, release, name_server) as java,
    ):
        await tool.run("createUser", *at, "-u", ALICE, "-p", PASSWORD)
        await tool.run("createUser", "-c", CLUSTER, "-u", "bob", "-p", "the-secret-of-bob", "-t", "Normal")
        await tool.run("updateUser", *at, "-u", "bob", "-s", "disable")
        shown = await tool.run("getUser", *at, "-u", "bob")
        assert [word for word in ("bob", "Normal", "disable") if word not in shown] == []
        listed = await tool.run("listUser", *at)
        assert [word for word in (ALICE, "bob", SUPER) if word not in listed] == []

        policy = ("-s", f"User:{ALICE}", "-r", "Topic:Open", "-a", "Pub,Sub,Get", "-d", "Allow")
        await tool.run("createAcl", *at, *policy)
        await tool.run("updateAcl", *at, *policy, "-i", "127.0.0.1")
        shown = await tool.run("getAcl", *at, "-s", f"User:{ALICE}")
        assert [word for word in ("Topic:Open", "Pub", "127.0.0.1", "Allow") if word not in shown] == []
        assert f"User:{ALICE}" in await tool.run("listAcl", *at)
        await tool.run("updateTopic", *at, "-t", "Open", "-r", "1", "-w", "1")
        await tool.run("updateTopic", *at, "-t", "Closed", "-r", "1", "-w", "1")

        alice: dict[str, Any] = {"accessKey": ALICE, "secretKey": PASSWORD}
        assert (await java.send("Open", **alice))[0]["status"] == "SEND_OK"
        [refused] = await java.send("Closed", **alice)
        assert (
            f"User:{ALICE} has no permission to access Topic:Closed from 127.0.0.1, no matched policies."
            in (refused["error"])
        )
        [refused] = await java.send("Open", **{**alice, "secretKey": "the-secret-of-bob"})
        assert "check signature failed." in refused["error"]

        await tool.run("deleteAcl", *at, "-s", f"User:{ALICE}", "-r", "Topic:Open")
        [refused] = await java.send("Open", **alice)
        assert "no matched policies." in refused["error"]
        await tool.run("deleteUser", *at, "-u", ALICE)
        assert ALICE not in await tool.run("listUser", *at)
    assert broker.child is not None
    errors = broker.child.log.with_suffix(".err").read_text()
    assert "user.changed" in errors
    assert "the-secret" not in errors
