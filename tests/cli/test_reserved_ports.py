"""Ports for processes that are started while other runs choose ports, too."""

import random
import socket
import subprocess
import sys

from ha.cli.cluster.processes import reserved_ports

CHOOSE = """
import random
from ha.cli.cluster.processes import reserved_ports
random.seed(7)
with reserved_ports(5) as ports:
    print(*ports)
"""


def chosen_elsewhere() -> set[int]:
    """The ports that another process with the same random numbers chooses."""
    done = subprocess.run([sys.executable, "-c", CHOOSE], capture_output=True, text=True, check=True)
    return {int(word) for word in done.stdout.split()}


def test_ports_are_not_chosen_again_before_their_process_has_opened_them() -> None:
    random.seed(7)
    with reserved_ports(5) as ports:
        assert len(set(ports)) == 5
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", ports[0]))  # free for the process that it is meant for
        random.seed(7)
        with reserved_ports(5) as others:
            assert not set(ports) & set(others)
        assert not set(ports) & chosen_elsewhere()
    assert set(ports) & chosen_elsewhere()


def test_ports_of_nodes_that_do_not_run_are_not_chosen_again() -> None:
    random.seed(7)
    with reserved_ports(5) as ports:
        pass
    random.seed(7)
    with reserved_ports(5, ports) as others:
        assert not set(ports) & set(others)
