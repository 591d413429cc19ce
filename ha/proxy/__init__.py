"""The front for RocketMQ 5's gRPC clients: it translates their calls to remoting requests (docs/grpc.md).

`front.Front` is the service of a gRPC server (ha/grpc). It reaches brokers through a `brokers.Brokers`: the node's own
broker (ha/node/grpc.py), or a cluster (`python -m ha.proxy`). This module imports nothing, so that nodes without a gRPC
port can import `ha.proxy.options` without loading protobuf.
"""
