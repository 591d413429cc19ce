"""A whole cluster in one trio run, with a simulated network, disk and clock: `python -m tests.sim --help`."""
