"""Lets PySpark find the data source: it looks for top-level modules `pyspark_…` with a `DefaultSource`.

An exception here would prevent Spark from finding any Python data source, so halog without its extra `spark` only
warns.
"""

import warnings
from importlib.util import find_spec

__all__ = []

if missing := [name for name in ("pyspark", "pyarrow", "numpy") if find_spec(name) is None]:
    warnings.warn(f"the data source halog needs {', '.join(missing)}; install halog[spark]", stacklevel=1)
else:
    from ha.spark.data_source import HalogDataSource as DefaultSource

    __all__ += ["DefaultSource"]
