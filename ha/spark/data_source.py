"""The data source `halog`, from which Spark gets readers and writers.

Spark starts one process to find data sources, one to create this one, and one to plan the query. Methods import the
modules that they need, so that each process loads only what it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from ha.spark.worker_errors import without_traceback

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter
    from pyspark.sql.types import StructType

    from ha.spark.source.batch_reader import HalogReader
    from ha.spark.source.stream_reader import HalogStreamReader


class HalogDataSource(DataSource):
    """Topics of a halog or RocketMQ log as a table or a stream: read from store directories or over the network, and
    written over the network.

    Created by Spark in short-lived processes, and pickled between them, so it holds only the options. All methods
    except `name` raise OptionError for options and columns that they don't accept; none accepts the options of a
    permanent table.
    """

    @classmethod
    def name(cls) -> str:
        """Returns the name for `format(…)`."""
        return "halog"

    @without_traceback()
    def schema(self) -> StructType:
        """Returns the columns that the options select. Options of a batch or of a stream are accepted."""
        from ha.spark.source.options import parse_any
        from ha.spark.source.schema import spark_schema
        from ha.spark.tables import refuse_table

        refuse_table(self.options)
        return spark_schema(parse_any(self.options).columns)

    @without_traceback()
    def reader(self, schema: StructType) -> HalogReader:
        """Returns a batch reader of the columns in `schema`, which is that of `schema()` or given by the user."""
        from ha.spark.source.batch_reader import HalogReader
        from ha.spark.source.options import parse_options
        from ha.spark.tables import refuse_table

        refuse_table(self.options)
        return HalogReader(parse_options(self.options, "batch"), schema)

    @without_traceback()
    def streamReader(self, schema: StructType) -> HalogStreamReader:  # noqa: N802
        """Returns a stream reader of the columns in `schema`, which is that of `schema()` or given by the user."""
        from ha.spark.source.options import parse_options
        from ha.spark.source.stream_reader import HalogStreamReader
        from ha.spark.tables import refuse_table

        refuse_table(self.options)
        return HalogStreamReader(parse_options(self.options, "stream"), schema)

    @without_traceback()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Returns a batch writer, which stores rows as messages. Raises OptionError also if `overwrite` is set."""
        from ha.spark.sink.writers import make_batch_writer
        from ha.spark.tables import refuse_table

        refuse_table(self.options)
        return make_batch_writer(self.options, schema, overwrite)

    @without_traceback()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """Returns a writer of micro-batches, which stores rows as messages. Raises OptionError also if `overwrite` is
        set."""
        from ha.spark.sink.writers import make_stream_writer

        return make_stream_writer(self.options, schema, overwrite)
