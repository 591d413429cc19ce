"""The Spark sink: writes the rows of a DataFrame to topics, each row exactly once per micro-batch.

`writers` documents the guarantees. `committed_source` reads a topic without the rows that no batch has committed.
"""
