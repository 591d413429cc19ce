"""Known failures of RocketMQ's HA service, case by case: what happened there, and what halog does instead.

Each test cites the issue on RocketMQ's tracker.
"""
