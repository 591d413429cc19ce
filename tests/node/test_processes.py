"""The three entry points as processes: READY line, signals, exit codes, and what they leave behind."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from tests.cli.cluster import wait_until
from tests.node.processes import FREE_PORTS, Process

pytestmark = pytest.mark.processes

READY_LINE = re.compile(
    r"READY role=(ASYNC_MASTER|SYNC_MASTER|SLAVE) remoting=127\.0\.0\.1:\d+ ha=127\.0\.0\.1:\d+ "
    r"admin=127\.0\.0\.1:\d+ store=\S+\n"
)


@contextmanager
def master(directory: Path, *arguments: str) -> Iterator[Process]:
    with Process("ha.master", *FREE_PORTS, *arguments, directory=directory) as process:
        yield process


def ask(address: str, command: RemotingCommand) -> RemotingCommand:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(encode_command(command))
        parser = RemotingParser()
        while True:
            chunk = connection.recv(65536)
            assert chunk, "closed without an answer"
            answers = parser.feed(chunk)
            if answers:
                return answers[0]


def send(address: str, body: bytes = b"hello", topic: str = "flights") -> RemotingCommand:
    fields = {
        "producerGroup": "p", "topic": topic, "defaultTopic": "TBW102", "defaultTopicQueueNums": "4", "queueId": "0",
        "sysFlag": "0", "bornTimestamp": "1", "flag": "0", "properties": "", "reconsumeTimes": "0", "unitMode": "false",
        "batch": "false",
    }  # fmt: skip
    return ask(address, RemotingCommand(RequestCode.SEND_MESSAGE, opaque=1, ext_fields=fields, body=body))


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def status(address: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(get(address, "/status")[1])
    return answer


def test_a_master_says_where_it_serves_and_stops_in_order(tmp_path: Path) -> None:
    with master(tmp_path, "--set", "brokerRole=SYNC_MASTER") as process:
        ready = process.wait_ready()
        assert READY_LINE.fullmatch(ready["line"])
        assert (ready["role"], ready["store"]) == ("SYNC_MASTER", "data/master")
        for port in ("remoting", "ha", "admin"):
            host, number = ready[port].split(":")
            socket.create_connection((host, int(number)), timeout=5).close()
        assert (tmp_path / "data/master/abort").exists()
        assert process.stop() == 0
    assert not (tmp_path / "data/master/abort").exists()
    assert (tmp_path / "data/master/checkpoint").stat().st_size == 4096
    assert "READY" not in process_log(tmp_path, "ha.master")


def process_log(directory: Path, module: str) -> str:
    return (directory / f"{module}.log").read_text()


@contextmanager
def sighup(handler: signal.Handlers) -> Iterator[None]:
    """What processes started during the block do with SIGHUP at first; nohup may have started this one."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_name_server_stops_at_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with sighup(signal.SIG_DFL), Process("ha.namesrv", "--set", "listenPort=0", directory=tmp_path) as process:
        ready = process.wait_ready()
        assert re.fullmatch(r"READY role=NAMESRV remoting=127\.0\.0\.1:\d+\n", ready["line"])
        process.signal(number)
        assert process.wait_exit() == 0


def test_a_clean_stop_keeps_everything(tmp_path: Path) -> None:
    with master(tmp_path) as process:
        ready = process.wait_ready()
        assert [send(ready["remoting"], b"%d" % n).code for n in range(10)] == [0] * 10
        end = status(ready["admin"])["commitlog"]["max_offset"]
        assert process.stop() == 0
    with master(tmp_path) as process:
        ready = process.wait_ready()
        state = status(ready["admin"])
        assert state["commitlog"]["max_offset"] == end
        assert state["store"]["recovered_clean"] is True
        assert process.stop() == 0


def test_kill_leaves_the_abort_file_and_the_next_start_recovers(tmp_path: Path) -> None:
    with master(tmp_path, "--set", "flushDiskType=SYNC_FLUSH") as process:
        ready = process.wait_ready()
        assert send(ready["remoting"]).code == 0
        end = status(ready["admin"])["commitlog"]["max_offset"]
        process.signal(signal.SIGKILL)
        assert process.wait_exit() == -signal.SIGKILL
    assert (tmp_path / "data/master/abort").exists()
    with master(tmp_path) as process:
        ready = process.wait_ready()
        state = status(ready["admin"])
        assert state["store"]["recovered_clean"] is False
        assert state["commitlog"]["max_offset"] == end
        assert process.stop() == 0
    assert not (tmp_path / "data/master/abort").exists()


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with master(tmp_path) as process:
        process.wait_ready()
        process.signal(signal.SIGSTOP)  # both signals are pending when it goes on: no race with a quick stop
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGINT)
        process.signal(signal.SIGCONT)
        assert process.wait_exit() == 130
    assert (tmp_path / "data/master/abort").exists()


def test_a_closed_terminal_stops_a_node_cleanly(tmp_path: Path) -> None:
    """Both the kernel and the shell send SIGHUP; `ha cluster up` ends with it, so that its nodes get SIGTERM, too."""
    with sighup(signal.SIG_DFL), master(tmp_path) as process:
        process.wait_ready()
        process.signal(signal.SIGSTOP)
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):
            process.signal(number)
        process.signal(signal.SIGHUP)
        assert process.wait_exit() == 0
    assert not (tmp_path / "data/master/abort").exists()


def test_a_process_that_ignores_sighup_goes_on(tmp_path: Path) -> None:
    """As nohup starts it."""
    with sighup(signal.SIG_IGN), Process("ha.namesrv", "--set", "listenPort=0", directory=tmp_path) as process:
        process.wait_ready()
        process.signal(signal.SIGHUP)
        process.signal(signal.SIGTERM)
        assert process.wait_exit() == 0
        assert "signal=SIGTERM" in process.log()


def test_a_send_that_waits_for_a_slave_is_answered_at_the_stop(tmp_path: Path) -> None:
    """It would wait for a minute; the stop takes a second and says what is true: stored, not replicated."""
    keys = ("brokerRole=SYNC_MASTER", "inSyncReplicas=2", "slaveTimeout=60000")
    with master(tmp_path, *(part for key in keys for part in ("--set", key))) as process:
        ready = process.wait_ready()
        host, port = ready["ha"].split(":")
        with socket.create_connection((host, int(port))) as silent_slave, ThreadPoolExecutor(1) as threads:
            silent_slave.sendall(bytes(8))  # "I have nothing", and never a word about what it gets
            wait_until(lambda: status(ready["admin"])["ha"]["in_sync"] == 1)
            answer = threads.submit(send, ready["remoting"])
            wait_until(lambda: status(ready["admin"])["ha"]["waiting_request_count"] == 1)
            began = time.monotonic()
            assert process.stop() == 0
            assert time.monotonic() - began < 10
            assert (answer.result(10).code, answer.result().ext_fields["queueOffset"]) == (12, "0")


def test_a_log_that_nobody_reads_stops_nobody(tmp_path: Path) -> None:
    """stderr is a pipe that was full before the start, as one is whose reader hangs."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    filler = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        with suppress(BlockingIOError):
            while True:
                os.write(filler, bytes(4096))
        into_pipe = ("sh", "-c", 'exec "$@" 2> "$0"', str(pipe))
        with Process("ha.master", *FREE_PORTS, directory=tmp_path, prefix=into_pipe) as process:
            ready = process.wait_ready()
            assert send(ready["remoting"]).code == 0
            assert process.stop() == 0
    finally:
        os.close(reader)
        os.close(filler)


def test_a_master_without_stderr_writes_its_log_nowhere(tmp_path: Path) -> None:
    """Descriptor 2 is then the first file that it opens."""
    without = ("sh", "-c", 'exec "$@" 2>&-', "sh")
    with Process("ha.master", *FREE_PORTS, directory=tmp_path, prefix=without) as process:
        ready = process.wait_ready()
        assert send(ready["remoting"]).code == 0
        assert process.stop() == 0
    assert not any(b"ha.store" in path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file())


def test_what_does_not_stop_in_time_is_ended(tmp_path: Path) -> None:
    """A service that hangs in its own closing; the rest of the entry point is the real one."""
    program = (
        "import ha.process, sys, trio\n"
        "from contextlib import asynccontextmanager\n"
        "from ha.config import NameServerConfig\n"
        "@asynccontextmanager\n"
        "async def stuck(config):\n"
        "    yield 'READY role=stuck'\n"
        "    with trio.CancelScope(shield=True):\n"
        "        await trio.sleep_forever()\n"
        "sys.exit(ha.process.Entry('stuck', NameServerConfig, stuck).main())\n"
    )
    (tmp_path / "stuck.py").write_text(program)
    with Process("stuck", "--set", "shutdownTimeout=300", directory=tmp_path) as process:
        process.wait_ready()
        assert process.stop() == 70
        assert "process.shutdown_timed_out timeout_s=0.3" in process.log()


def test_a_bug_is_told_with_its_traceback(tmp_path: Path) -> None:
    program = (
        "import ha.process, sys\n"
        "from contextlib import asynccontextmanager\n"
        "from ha.config import NameServerConfig\n"
        "@asynccontextmanager\n"
        "async def broken(config):\n"
        "    raise AssertionError('of a peer:\\n2026-01-01T00:00:00.000Z INFO forged\\x1b[2J')\n"
        "    yield ''\n"
        "sys.exit(ha.process.Entry('broken', NameServerConfig, broken).main())\n"
    )
    (tmp_path / "broken.py").write_text(program)
    with Process("broken", directory=tmp_path) as process:
        assert process.wait_exit() == 70
        lines = process.log().splitlines()
        assert any(line.endswith("AssertionError: of a peer:") for line in lines)
        assert any(line.endswith(r"INFO forged\x1b[2J") for line in lines)
        assert not [line for line in lines if line.startswith("2026-01-01")]


def test_the_first_process_of_a_container_can_be_stopped_while_it_imports(tmp_path: Path) -> None:
    """The kernel would ignore a signal that such a process doesn't handle."""
    program = (
        "import os, signal, sys\n"
        "own = os.getpid()\n"
        "os.getpid = lambda: 1\n"
        "sys.argv = ['-m']\n"  # as while `python -m` looks for the module
        "import ha\n"
        "os.kill(own, signal.SIGTERM)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_as_many_files_as_the_system_allows(tmp_path: Path) -> None:
    with master(tmp_path) as process:
        process.wait_ready()
        limits = Path(f"/proc/{process.popen.pid}/limits").read_text()
        soft, hard = re.findall(r"^Max open files +(\S+) +(\S+)", limits, re.MULTILINE)[0]
        assert soft == hard
        assert process.stop() == 0


def test_a_signal_ends_the_start_too(tmp_path: Path) -> None:
    """A name server that doesn't answer holds up the start; SIGTERM then stops a broker that was never READY."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"namesrvAddr=127.0.0.1:{silent.getsockname()[1]}"
        with master(tmp_path, "--set", address) as process:
            silent.settimeout(30)
            silent.accept()[0].close()  # the store is open by now
            assert process.stop() == 0
    assert not (tmp_path / "data/master/abort").exists()


@pytest.mark.parametrize("module", ["ha.master", "ha.slave", "ha.namesrv"])
def test_usage(tmp_path: Path, module: str) -> None:
    with Process(module, "--nonsense", directory=tmp_path) as process:
        assert process.wait_exit() == 2
        assert "unrecognized arguments: --nonsense" in process.log()


@pytest.mark.parametrize(
    ("module", "setting", "said"),
    [
        ("ha.master", "brokerRol=SLAVE", "brokerRol: is unknown; accepted: brokerRole, which is the nearest known key"),
        (
            "ha.master",
            "fileReservedTime=2147483648",
            "fileReservedTime: 2147483648 overflows a Java int; accepted: an ",
        ),
        ("ha.master", "brokerRole=SLAVE", "brokerRole: SLAVE is not a master role; accepted: ASYNC_MASTER, "),
        ("ha.slave", "brokerRole=ASYNC_MASTER", "brokerRole: ASYNC_MASTER is not a slave role; accepted: SLAVE"),
        ("ha.slave", "brokerId=0", "brokerId: 0 is reserved for the master"),
        ("ha.master", "brokerIP1=no.such.host.invalid", "brokerIP1: no.such.host.invalid"),
        ("ha.namesrv", "listenPort=x", "listenPort: 'x' is not an integer; accepted: an integer from 0 to 65535"),
    ],
)
def test_wrong_configuration(tmp_path: Path, module: str, setting: str, said: str) -> None:
    free = () if setting.startswith("listenPort") else ("--set", "listenPort=0")
    with Process(module, *free, "--set", setting, directory=tmp_path) as process:
        assert process.wait_exit() == 78
        assert f"{module}: {said}" in process.log()
        assert "Traceback" not in process.log()
    assert not (tmp_path / "data").exists()


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for key in ("listenPort", "haListenPort", "adminListenPort"):
            with master(tmp_path, "--set", f"{key}={port}", "--set", "namesrvAddr=127.0.0.1:1") as process:
                assert process.wait_exit() == 69
                assert f"{key}: can't listen on 127.0.0.1:{port}: Address already in use" in process.log()
        with Process("ha.namesrv", "--set", f"listenPort={port}", directory=tmp_path) as process:
            assert process.wait_exit() == 69
    assert "Traceback" not in process_log(tmp_path, "ha.master")


def test_a_locked_store(tmp_path: Path) -> None:
    with master(tmp_path) as first:
        first.wait_ready()
        with master(tmp_path) as second:
            assert second.wait_exit() == 69
            assert "data/master/lock is locked by another process" in second.log()
        assert first.stop() == 0


def damaged_by_a_cut(tmp_path: Path, *, segment_count: int) -> Path:
    """Truncate the first segment of a cleanly closed store, so that messages below the checkpoint are lost."""
    with master(tmp_path) as process:
        ready = process.wait_ready()
        for number in range(14 * segment_count):
            assert send(ready["remoting"], bytes([65 + number % 26]) * 60_000).code == 0
        assert process.stop() == 0
    first = tmp_path / "data/master/commitlog/00000000000000000000"
    assert len(list(first.parent.iterdir())) == segment_count
    with first.open("r+b") as log:
        log.truncate(1000)
    return first


def test_a_damaged_store_is_served_where_it_is_whole(tmp_path: Path) -> None:
    first = damaged_by_a_cut(tmp_path, segment_count=3)
    with master(tmp_path) as process:
        ready = process.wait_ready()
        assert send(ready["remoting"], b"and on it goes").code == 0
        with urllib.request.urlopen(f"http://{ready['admin']}/status", timeout=10) as answer:
            damage = json.loads(answer.read())["damage"]["log"]
        assert damage["open_count"] >= 1
        assert damage["open"][0]["file"] == first.name
        assert damage["open_bytes"] == 1 << 20
        assert process.stop() == 0
        assert f"commitlog.damage_found file={first.name}" in process.log()


def forget_checksums(tmp_path: Path) -> None:
    for path in (tmp_path / "data/master/checksums").iterdir():
        path.unlink()


def test_a_store_that_can_not_be_told_from_another_one(tmp_path: Path) -> None:
    """Without checksums a single file of another size may as well mean that mappedFileSizeCommitLog was changed."""
    first = damaged_by_a_cut(tmp_path, segment_count=1)
    forget_checksums(tmp_path)
    with master(tmp_path) as process:
        assert process.wait_exit() == 65
        assert f"{first.relative_to(tmp_path)} is damaged at byte" in process.log()
        assert "nothing was deleted" in process.log()
    assert first.stat().st_size == 1000


def test_a_store_whose_other_segments_tell_its_size(tmp_path: Path) -> None:
    first = damaged_by_a_cut(tmp_path, segment_count=3)
    forget_checksums(tmp_path)
    with master(tmp_path) as process:
        process.wait_ready()
        assert process.stop() == 0
        assert f"commitlog.damage_found file={first.name} begin=0 end={1 << 20}" in process.log()
    assert first.stat().st_size == 1 << 20


def test_a_store_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with master(tmp_path, "--set", "storePathRootDir=file/store") as process:
        assert process.wait_exit() == 74
        assert "file/store" in process.log()
        assert "Traceback" not in process.log()


def test_sources_of_configuration(tmp_path: Path) -> None:
    (tmp_path / "broker.conf").write_text(
        "brokerName=from-file\nregionId=from-file\nbrokerClusterName=from-file\npopCkMaxBufferSize=1\n"
    )
    environment = {"HA_REGION_ID": "from-environment", "HA_brokerClusterName": "from-environment"}
    arguments = ("--config", "broker.conf", *FREE_PORTS, "--set", "brokerClusterName=from-set")
    with Process("ha.master", *arguments, "--print-config", directory=tmp_path, environment=environment) as process:
        assert process.wait_exit() == 0
        assert process.popen.stdout is not None
        printed = process.popen.stdout.read().splitlines()
    assert {"brokerName=from-file", "regionId=from-environment", "brokerClusterName=from-set"} <= set(printed)
    assert "preallocateCommitLog=true" in printed
    with Process("ha.master", *arguments, directory=tmp_path, environment=environment) as process:
        ready = process.wait_ready()
        assert status(ready["admin"])["cluster_name"] == "from-set"
        assert process.log().count("config.keys_ignored keys=popCkMaxBufferSize\n") == 1
        assert process.stop() == 0


def test_master_and_slave_find_each_other_by_the_name_server_alone(tmp_path: Path) -> None:
    with Process("ha.namesrv", "--set", "listenPort=0", directory=tmp_path) as names:
        name_server = f"namesrvAddr={names.wait_ready()['remoting']}"
        common = ("--set", name_server, "--set", "brokerName=a")
        with (
            master(tmp_path, *common, "--set", "brokerRole=SYNC_MASTER") as first,
            Process("ha.slave", *FREE_PORTS, *common, directory=tmp_path) as second,
        ):
            at_master, at_slave = first.wait_ready(), second.wait_ready()
            assert READY_LINE.fullmatch(at_slave["line"])
            wait_until(lambda: status(at_master["admin"])["ha"]["in_sync"] == 1)
            assert get(at_slave["admin"], "/ready") == (200, "ready\n")
            assert send(at_master["remoting"]).code == 0
            assert send(at_slave["remoting"]).code != 0
            wait_until(lambda: status(at_slave["admin"])["commitlog"] == status(at_master["admin"])["commitlog"])
            assert first.stop() == 0
            wait_until(lambda: get(at_slave["admin"], "/ready")[0] == 503)
            code, why = get(at_slave["admin"], "/ready")
            assert (code, why.startswith("not ready: not connected to its master")) == (503, True)
            assert get(at_slave["admin"], "/live") == (200, "live\n")
            assert second.stop() == 0
        assert names.stop() == 0
    files = [tmp_path / f"data/{role}/commitlog/00000000000000000000" for role in ("master", "slave")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_any_bytes_on_any_port_end_that_connection_alone(tmp_path: Path) -> None:
    garbage = [
        b"\x00" * 64,
        b"\xff" * 64,
        struct.pack(">i", 2**31 - 1) + b"x" * 1000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /status HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n",
        b"POST /ready HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
        b"GET /" + b"a" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 200,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x00",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"GET /status HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nHTTP2-Settings: !!!\r\nConnection: Upgrade\r\n\r\n",
        b"GET /status HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n\xff\xff\xff\xff",
    ]
    with master(tmp_path) as process:
        ready = process.wait_ready()
        for port in ("remoting", "ha", "admin"):
            host, number = ready[port].split(":")
            for text in garbage:
                with socket.create_connection((host, int(number)), timeout=1) as stranger:
                    try:
                        stranger.sendall(text)
                        stranger.shutdown(socket.SHUT_WR)
                        while stranger.recv(65536):
                            pass
                    except OSError:
                        pass  # reset, or kept waiting: both are answers
        assert send(ready["remoting"]).code == 0
        assert status(ready["admin"])["ha"]["slave_count"] == 0
        assert get(ready["admin"], "/ready") == (200, "ready\n")
        assert process.stop() == 0
        assert "Traceback" not in process.log()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("errors.DiskFailed(Path('log'), 'fdatasync', 'EIO')", 74),
        ("errors.DiskFull(Path('log'), 1)", 74),
        ("errors.CorruptLog(Path('log'), 1, 'zeroes')", 65),
        ("errors.DamagedBytes(1, 2, 'zeroes')", 65),
        ("errors.StoreLocked(Path('lock'))", 69),
        ("errors.AddressInUse('listenPort', 'x', 1, 'taken')", 69),
        ("errors.ConfigError('a', 'b', 'c')", 78),
        ("ConnectionResetError(104, 'a connection that nobody looked after')", 70),
        ("AssertionError('ours')", 70),
        (r"AssertionError('ours\x1b[2J')", 70),
    ],
)
def test_what_a_failure_while_serving_exits_with(tmp_path: Path, error: str, code: int) -> None:
    """Raised by a background task, two nurseries deep, as the store's would be."""
    program = (
        "import ha.process, sys, trio\n"
        "from contextlib import asynccontextmanager\n"
        "from pathlib import Path\n"
        "from ha import errors\n"
        "from ha.config import NameServerConfig\n"
        "async def fail():\n"
        f"    raise {error}\n"
        "@asynccontextmanager\n"
        "async def failing(config):\n"
        "    async with trio.open_nursery() as outer, trio.open_nursery() as inner:\n"
        "        inner.start_soon(fail)\n"
        "        yield 'READY role=failing'\n"
        "sys.exit(ha.process.Entry('failing', NameServerConfig, failing).main())\n"
    )
    (tmp_path / "failing.py").write_text(program)
    with Process("failing", directory=tmp_path) as process:
        assert process.wait_exit() == code
        assert ("Traceback" in process.log()) == (code == 70)
        assert "\x1b" not in process.log()
