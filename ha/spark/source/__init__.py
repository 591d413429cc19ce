"""The Spark source: parses options, plans batches and streams, and reads the log from files or over the network."""
