#!/usr/bin/env python3
"""The sums of `pagefold fleet --json` by Spark (4.1 or newer), for fleets beyond one machine.

    spark-submit fleet.py TABLE...        files or directories of `pagefold sketch --parquet`

Savings are those of folding within groups where guests are, of the last epoch of each host.
"""

import json
import sys

from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F

PAGE_BYTES = 4096
# Hashes of a union: 2^20, of which the guests of a host need few.
UNION_LG_K = 20


def sums(table):
    """One row for each host and key, as docs/fleet.md defines them."""
    last = F.max("epoch_s").over(Window.partitionBy("host"))
    guests = table.withColumn("last", last).where("epoch_s = last AND guest IS NOT NULL")
    return guests.groupBy("host", "key").agg(
        F.min("group").alias("name"),
        F.count("*").alias("guests"),
        F.sum(F.col("resident_pages") - F.col("zero_pages")).alias("held"),
        F.sum("zero_pages").alias("zeros"),
        F.sum("distinct_pages").alias("distinct_pages"),
        F.max("distinct_pages").alias("most"),
        F.theta_sketch_estimate(F.theta_union_agg("sketch", UNION_LG_K)).alias("union"),
    )


def by_group(sums):
    """Totals of each group. One guest's contents were counted; a union has at least the most of one guest, and at most all."""
    union = F.when(F.col("guests") == 1, F.col("distinct_pages")).otherwise(
        F.least(F.greatest("union", "most"), "distinct_pages")
    )
    total = lambda column: (F.sum(column) * PAGE_BYTES).cast("long")
    return sums.groupBy("name").agg(
        F.countDistinct("host").alias("hosts"),
        F.sum("guests").alias("guests"),
        total(F.col("held")).alias("held_bytes"),
        total(F.col("zeros")).alias("zero_bytes"),
        total(F.col("held") - union).alias("saved_without_zero_bytes"),
        total(F.col("held") - F.col("distinct_pages")).alias("inside_bytes"),
    )


def main(paths):
    spark = SparkSession.builder.appName("pagefold fleet").getOrCreate()
    of_hosts = sums(spark.read.parquet(*paths)).cache()
    groups = [row.asDict() for row in by_group(of_hosts).orderBy("name").collect()]
    totals = ["guests", "held_bytes", "zero_bytes", "saved_without_zero_bytes", "inside_bytes"]
    summary = {"engine": "spark", "hosts": of_hosts.select("host").distinct().count()}
    summary.update({name: sum(group[name] for group in groups) for name in totals})
    summary["groups"] = [{"group": group.pop("name"), **group} for group in groups]
    print(json.dumps(summary, indent=2))
    spark.stop()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
