"""The log as a Spark table beside spark-sql-kafka, and the Arrow core alone."""
