"""The log on disk: commitlog, consume queues, key index, and what keeps them. No sockets, no peers."""
