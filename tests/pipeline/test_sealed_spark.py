"""Sealed files and rollups as Spark reads them, with its vectorised reader and without."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pytest

from pipeline.store import history_files
from pipeline.store.sealing import DAY, HOUR
from tests.parts import do_without
from tests.pipeline.test_sealing import GPUS, T0, Seal

READ = """
import json, sys
from pyspark.sql import SparkSession
found = []
for vectorised in ("true", "false"):
    session = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false") \\
        .config("spark.sql.session.timeZone", "UTC").getOrCreate()
    session.conf.set("spark.sql.parquet.enableVectorizedReader", vectorised)
    rows = session.read.parquet(sys.argv[1] + "/gpu")
    minutes = session.read.parquet(sys.argv[1] + "/rollup_60/gpu")
    read = rows.selectExpr("count(*)", "count(distinct entity)", "sum(cast(energy AS decimal(38,0)))",
                           "sum(temperature)", "max(sm_clock)", "cast(min(time) as double)", "min(site)",
                           "count(distinct day)").collect()[0]
    rolled = minutes.selectExpr("count(*)", "sum(energy_count)", "max(temperature_max)").collect()[0]
    found.append([*read[:6], read[6], read[7], *rolled])
print(json.dumps(found, default=str))
"""


@pytest.fixture
def spark() -> str:
    """The Python of a virtual environment with Spark."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fleetpulse" / "spark" / "bin" / "python"
    found = os.environ.get("FLEETPULSE_TEST_SPARK", str(cache))
    if not Path(found).exists():
        do_without("spark", "no Spark here: run 'make parts', or set FLEETPULSE_TEST_SPARK to a Python with pyspark")
    return found


@pytest.mark.extended
def test_spark_and_pyarrow_read_the_same_from_hours_and_merged_days(tmp_path: Path, spark: str) -> None:
    store = Seal(tmp_path)
    store.add(T0, 240)  # four hours, the last of a day; two of them are merged
    store.add(T0 + DAY, 60, site="a b/..")
    number = 60 * GPUS
    store.add(T0 + DAY, 60, temperature=np.full(number, np.nan, "f4"), energy=np.full(number, (1 << 63) - 1, "u8"))
    store.sealer.seal(T0 + DAY + HOUR)
    store.restart()  # removes the hours of the merged day, which otherwise stay for ten minutes
    store.database.close()
    folder = history_files.history_folder(store.path)
    rows = pyarrow.dataset.dataset(folder / "gpu", partitioning="hive").to_table()
    ran = subprocess.run([spark, "-c", READ, str(folder)], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-2000:]
    for found in json.loads(ran.stdout.splitlines()[-1]):
        assert found[0] == rows.num_rows == (240 + 60) * GPUS + number
        assert found[1] == len(set(rows["entity"].to_pylist()))
        assert int(found[2]) == sum(v for v in rows["energy"].to_pylist() if v is not None)
        assert found[4] == max(v for v in rows["sm_clock"].to_pylist() if v is not None)
        assert found[5] == T0 / 1e6
        assert (found[6], found[7]) == ("a b/..", 2)
        assert found[8] == (240 + 60) * GPUS + number
        assert found[9] == rows.num_rows - rows["energy"].null_count
