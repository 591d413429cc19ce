"""Halog under load and over time: many connections, many slaves, hours on a virtual clock, stops in between."""
