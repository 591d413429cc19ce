"""Damaged files: found, logged, healed, and never served."""
