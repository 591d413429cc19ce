"""Whole failover groups in the simulation: real members, and a simulated service on which they agree."""
