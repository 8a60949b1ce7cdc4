"""Puts the jars of an HDFS into .lab/hdfs: out of pyspark 2.4.8, the last on PyPI that brings them all.

    python -m tests.lab.install_hdfs        nothing to do where they are there

pip fetches the package (220 MB) into a directory that is gone afterwards; 40 MB of it stay.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

from tests.lab.hdfs import JARS
from tests.lab.process import HOME

PACKAGE: Final = "pyspark==2.4.8"
# What a NameNode and a DataNode load; the rest of pyspark is Spark.
_WANTED: Final = (
    *("hadoop-annotations", "hadoop-auth", "hadoop-common", "hadoop-hdfs"),
    *("commons-cli", "commons-codec", "commons-collections", "commons-configuration"),
    *("commons-beanutils", "commons-digester", "commons-httpclient", "httpclient", "httpcore"),
    *("commons-io", "commons-lang-", "commons-logging", "commons-math3", "commons-net"),
    *("jackson-core-asl", "jackson-jaxrs", "jackson-mapper-asl", "jackson-xc"),
    *("jetty-", "jsp-api", "javax.servlet-api", "jaxb-api", "jsr305", "xmlenc", "xercesImpl"),
    *("log4j-1", "slf4j-", "guava-1", "protobuf-java", "htrace-core", "leveldbjni-all"),
    *("netty-3", "netty-all", "zookeeper"),
)


def main() -> int:
    """Fetch and unpack; all jars are there, or none."""
    if JARS.is_dir():
        return 0
    HOME.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOME) as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        # pip asks the package for its name; in isolation that fetches a pandoc too new for it.
        alone = ["--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, *alone, "-d", scratch, PACKAGE], check=True)
        [package] = Path(scratch).glob("pyspark-*.tar.gz")
        unpacked = Path(scratch) / "jars"
        unpacked.mkdir()
        with tarfile.open(package, "r|gz") as archive:
            for member in archive:
                name = os.path.basename(member.name)
                if not (name.endswith(".jar") and name.startswith(_WANTED)):
                    continue
                source = archive.extractfile(member)
                if source is not None:
                    with source, (unpacked / name).open("wb") as target:
                        shutil.copyfileobj(source, target)
        os.rename(unpacked, JARS)
    logging.getLogger(__name__).info("%d jars in %s", len(list(JARS.iterdir())), JARS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
