"""Writes into topics, each row once per micro-batch. `writers` documents the guarantees, `committed_source` is for
readers."""
