"""Benchmarks: figures printed, nothing asserted on time. See README.md."""
