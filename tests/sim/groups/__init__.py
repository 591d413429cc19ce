"""Whole failover groups in the simulation: real members, and a simulated agreement service."""
