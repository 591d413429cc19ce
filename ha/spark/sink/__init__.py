"""Writing into topics, each row once per micro-batch. `writers` has the rules, `committed_source` the readers' side."""
