"""The targets and their modules. A module is imported only when one of its targets runs, so that the fuzzer can
instrument its imports."""

from importlib import import_module

from tests.fuzz.harness import Harness

MODULES = {
    "remoting_frames": "remoting",
    "remoting_header": "remoting",
    "request_fields": "remoting",
    "java_json": "bodies",
    "bodies": "bodies",
    "registration": "bodies",
    "records": "records",
    "record_fields": "records",
    "batch": "records",
    "properties": "records",
    "message_id": "records",
    "recall_handle": "records",
    "ha_frames": "replication",
    "ha_pump": "replication",
    "ha_master": "replication",
    "ha_slave": "replication",
    "auto_switch_frames": "epochs",
    "epoch_file": "epochs",
    "etcd_answers": "agreement",
    "tables_records": "agreement",
    "pop_records": "pop",
    "pop_handles": "pop",
    "batch_acks": "pop",
    "ha_handshake": "access",
    "heal_fetch": "access",
    "acl_files": "access",
    "user_policies": "access",
    "grpc_signature": "access",
    "admin_credentials": "access",
    "broker": "broker",
    "broker_access": "broker",
    "filter_expressions": "filters",
    "grpc_frames": "grpc",
    "grpc_headers": "grpc",
    "name_server": "namesrv",
    "config_files": "store_files",
    "queue_and_index_files": "store_files",
    "checksum_files": "store_files",
    "queue_ends": "store_files",
    "recovery": "recovery",
    "arrow_records": "arrow",
    "arrow_store": "arrow",
    "configuration": "configuration",
    "spark_options": "configuration",
}
"""Target -> module of this package with an entry of that name in its `HARNESSES`."""


def load(name: str) -> Harness:
    """Import the harness of a target. KeyError if there is none of that name."""
    harnesses: dict[str, Harness] = import_module(f"tests.fuzz.{MODULES[name]}").HARNESSES
    return harnesses[name]
