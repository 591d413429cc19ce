"""The log on disk: commitlog, consume queues, key index, and the services that maintain them. No sockets, no peers."""
