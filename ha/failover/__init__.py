"""Elects the master of a failover group: the state that its members agree on, and the service that stores it (etcd).

Imports nothing of logs, of connections between brokers or of requests; the service is reached only through `Agreement`.
"""
