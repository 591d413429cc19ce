"""Compares the log as a Spark table with spark-sql-kafka, and measures the Arrow reader alone."""
