"""Elects the master of a failover group, whose members keep their shared state in etcd.

Has no code for logs, for connections between brokers or for requests. Only the etcd modules know etcd; the others use
the interface `Agreement`.
"""
