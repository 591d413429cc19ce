"""Lets PySpark find the data source: it looks for top-level modules `pyspark_…` with a `DefaultSource`.

An exception here would prevent Spark from finding any Python data source, so halog without its extra `spark` only
warns.
"""

import warnings

__all__ = []

try:
    from ha.spark.data_source import HalogDataSource as DefaultSource
except ImportError as error:
    warnings.warn(f"the data source halog can't be loaded ({error}); install halog[spark]", stacklevel=1)
else:
    __all__ += ["DefaultSource"]
