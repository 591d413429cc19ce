"""h2spec, the conformance tests of HTTP/2 servers, against the gRPC server. Needs Go."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.grpc.test_server import Echo, in_thread, serving

H2SPEC = "github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible"
INSTALL_S, RUN_S = 400.0, 100.0


@pytest.mark.long
@pytest.mark.processes
async def test_h2spec_finds_nothing(tmp_path: Path) -> None:
    def run(address: str) -> str:
        environment = {**os.environ, "GOBIN": str(tmp_path), "GOFLAGS": "-mod=mod"}
        subprocess.run(["go", "install", H2SPEC], env=environment, check=True, timeout=INSTALL_S)
        host, _, port = address.rpartition(":")
        command = [str(tmp_path / "h2spec"), "--host", host, "--port", port, "--strict"]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S).stdout

    async with serving(Echo()) as (_, address):
        output = await in_thread(run, address)
    assert " 0 skipped, 0 failed" in output, output
