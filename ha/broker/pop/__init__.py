"""POP consumption: a message is delivered for a limited time, and again unless it is acknowledged in that time."""
