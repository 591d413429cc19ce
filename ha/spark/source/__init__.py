"""Reads the log: options, start and end of a query, its tasks; from files or over the network."""
