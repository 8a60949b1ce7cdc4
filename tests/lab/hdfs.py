"""A real HDFS: NameNode and DataNode of Hadoop 2.7.3 on Java 17, one replica, spoken to by WebHDFS.

    format -> NameNode <- DataNode        all on 127.0.0.1, data in memory
       clients: webhdfs://127.0.0.1:<http port>/ckptfs-lab, user root; redirected to the DataNode

The jars come out of pyspark (tests/lab/install_hdfs.py) and from Debian. Hadoop 2.7 looks into
classes of Java that 17 closes: they are opened by name. Neither brings the web applications that
both daemons insist on: empty ones do.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.lab.process import HOME, HOST, Crew, UnavailableError, need, run
from tests.lab.server import BUCKET, Server

JARS: Final = HOME / "hdfs"
USER: Final = "root"
_DEBIAN: Final = Path("/usr/share/java")
_DEBIAN_JARS: Final = (
    *("jersey1-core", "jersey1-server", "jersey1-servlet", "jersey1-json"),
    *("commons-daemon", "jsr311-api", "jettison", "asm"),
)
_OPENED: Final = ("java.lang", "java.util", "java.net", "java.nio", "sun.nio.ch")
_SERVER: Final = "org.apache.hadoop.hdfs.server"
_LOG4J: Final = """\
log4j.rootLogger=WARN,A
log4j.appender.A=org.apache.log4j.ConsoleAppender
log4j.appender.A.layout=org.apache.log4j.PatternLayout
log4j.appender.A.layout.ConversionPattern=%d %p %c{1}: %m%n
"""


@contextlib.contextmanager
def hdfs() -> Iterator[Server]:
    """An HDFS with one directory; ``bucket`` is authority and directory: "127.0.0.1:<port>/ckptfs-lab"."""
    [java] = need("java")
    classpath = _classpath()
    with Crew("hdfs", in_memory=True) as crew:
        ports = {name: crew.port() for name in ("rpc", "http", "data", "ipc", "data_http")}
        _configure(crew.run_dir, ports)
        command = _command(java, crew.run_dir, classpath)
        run([*command, f"{_SERVER}.namenode.NameNode", "-format", "-force"])
        crew.start("namenode", [*command, f"{_SERVER}.namenode.NameNode"], grace_s=0)
        crew.start("datanode", [*command, f"{_SERVER}.datanode.DataNode"], grace_s=0)
        authority = f"{HOST}:{ports['http']}"
        crew.wait_for(lambda: _is_operational(authority), "the NameNode takes writes")
        yield Server(
            "hdfs",
            "webhdfs",
            f"http://{authority}",
            f"{authority}/{BUCKET}",
            {"user": USER},
            {"HADOOP_USER_NAME": USER, "LAB_HDFS_RPC": f"hdfs://{HOST}:{ports['rpc']}"},
            str(crew.run_dir),
            crew.pids(),
        )


def _classpath() -> list[Path]:
    debian = [_DEBIAN / f"{name}.jar" for name in _DEBIAN_JARS]
    missing = [str(jar) for jar in (JARS, *debian) if not jar.exists()]
    if missing:
        raise UnavailableError(f"not installed: {', '.join(missing)}; run `make lab-install`")
    return [JARS / "*", *debian]


def _command(java: str, run_dir: Path, classpath: list[Path]) -> list[str]:
    """Java with everything but the class to run. Small and quick to start, not quick forever."""
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
    return [
        java,
        *opened,
        "--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
        "-Djava.net.preferIPv4Stack=true",
        f"-Dhadoop.home.dir={run_dir}",
        *("-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
        *("-cp", ":".join(map(str, [run_dir / "conf", run_dir, *classpath]))),
    ]


def _configure(run_dir: Path, ports: Mapping[str, int]) -> None:
    """Hadoop's files: what differs from the defaults."""
    conf = run_dir / "conf"
    conf.mkdir()
    (conf / "log4j.properties").write_text(_LOG4J)
    core = {
        "fs.defaultFS": f"hdfs://{HOST}:{ports['rpc']}",
        "hadoop.tmp.dir": f"{run_dir}/tmp",
        "hadoop.http.staticuser.user": USER,
    }
    site = {
        "dfs.replication": "1",
        "dfs.namenode.http-address": f"{HOST}:{ports['http']}",
        "dfs.namenode.rpc-bind-host": HOST,
        "dfs.datanode.address": f"{HOST}:{ports['data']}",
        "dfs.datanode.ipc.address": f"{HOST}:{ports['ipc']}",
        "dfs.datanode.http.address": f"{HOST}:{ports['data_http']}",
        "dfs.datanode.hostname": HOST,
        "dfs.webhdfs.enabled": "true",
        "dfs.permissions.enabled": "true",
        "dfs.namenode.fs-limits.min-block-size": "65536",
        # It is in memory: a power cut leaves nothing to recover.
        "dfs.namenode.edits.noeditlogchannelflush": "true",
        "dfs.namenode.safemode.extension": "0",
    }
    for file, properties in (("core-site.xml", core), ("hdfs-site.xml", site)):
        lines = [
            f"<property><name>{name}</name><value>{value}</value></property>"
            for name, value in properties.items()
        ]
        (conf / file).write_text("\n".join(["<configuration>", *lines, "</configuration>"]))
    for application in ("hdfs", "datanode", "static"):
        directory = run_dir / "webapps" / application / "WEB-INF"
        directory.mkdir(parents=True)
        (directory / "web.xml").write_text('<web-app version="2.4"></web-app>')


def _is_operational(authority: str) -> bool:
    """Whether the NameNode has left its safe mode and knows its DataNode."""
    connection = http.client.HTTPConnection(authority, timeout=2)
    try:
        connection.request("GET", "/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState")
        beans = json.loads(connection.getresponse().read())["beans"]
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return False
    finally:
        connection.close()
    states = [(bean.get("FSState"), bean.get("NumLiveDataNodes")) for bean in beans]
    return states == [("Operational", 1)]
