"""Damaged files: found, named, healed, and never served meanwhile."""
