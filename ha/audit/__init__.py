"""Checks copies of a log, each on its own and against the others.

A log is examined in physical ranges (`range.py`), in any process and any order; the facts of the ranges are then folded
in the order of the log (`fold.py`). `ha log` examines ranges one after the other, `ha spark audit` runs them as Spark
tasks. Nothing here imports Spark, and nothing writes to a store.
"""
