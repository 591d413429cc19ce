"""What went wrong with RocketMQ's HA service, case by case: what happened there, and what happens here instead.

Each test cites the report on RocketMQ's tracker that it is about.
"""
