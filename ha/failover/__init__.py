"""Who is master: what the members of a broker group agree on, and the service that keeps it.

Knows no log, no connection between brokers and no request; the agreement service is reached through `Agreement` alone.
"""
