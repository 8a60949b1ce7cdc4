"""Servers of directories that fsspec reaches: OpenSSH's sftp, an FTP and a WebDAV of PyPI. Each serves
``<run_dir>/files``, which a test may look into.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from tests.lab.process import HOST, Crew, need, run, status_of
from tests.lab.server import Server

USER, PASSWORD = "lab", "lab-password"


@contextlib.contextmanager
def sftp() -> Iterator[Server]:
    """OpenSSH, for the user who runs it and a key of its own."""
    [program, keygen] = need("sshd", "ssh-keygen")
    with Crew("sftp") as crew:
        port, home = crew.port(), Path(crew.run_dir)
        files = _files(home)
        for name in ("host", "user"):
            run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", home / name])
        lines = [
            f"Port {port}",
            f"ListenAddress {HOST}",
            f"HostKey {home}/host",
            f"AuthorizedKeysFile {home}/user.pub",
            f"PidFile {home}/sshd.pid",
            "PasswordAuthentication no",
            "StrictModes no",
            "UsePAM no",
            "MaxStartups 100",
            "Subsystem sftp internal-sftp",
        ]
        (home / "sshd_config").write_text("\n".join(lines) + "\n")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # Debian's service makes it
        crew.start("sftp", [program, "-D", "-e", "-f", str(home / "sshd_config")])
        crew.wait_for(lambda: _listens(port), f"port {port} answers")
        options = {
            "port": port,
            "username": getpass.getuser(),
            "key_filename": str(home / "user"),
            "look_for_keys": False,
            "allow_agent": False,
        }
        yield Server(
            *("sftp", "sftp", f"ssh://{HOST}:{port}", f"{HOST}{files}", options),
            run_dir=str(home),
            pids=crew.pids(),
        )


@contextlib.contextmanager
def ftp() -> Iterator[Server]:
    """pyftpdlib, one user with all rights."""
    [python] = need("python")
    with Crew("ftp") as crew:
        port = crew.port()
        files = _files(Path(crew.run_dir))
        words = ["-m", "pyftpdlib", "-i", HOST, "-p", str(port), "-w", "-d", str(files)]
        crew.start("ftp", [python, *words, "-u", USER, "-P", PASSWORD])
        crew.wait_for(lambda: _listens(port), f"port {port} answers")
        yield Server(
            *("ftp", "ftp", f"ftp://{HOST}:{port}", f"{HOST}:{port}"),
            {"username": USER, "password": PASSWORD},
            run_dir=str(crew.run_dir),
            pids=crew.pids(),
        )


@contextlib.contextmanager
def webdav() -> Iterator[Server]:
    """WsgiDAV, for anybody."""
    [program] = need("wsgidav")
    with Crew("webdav") as crew:
        port = crew.port()
        files = _files(Path(crew.run_dir))
        words = ["--host", HOST, "--port", str(port), "--root", str(files), "--auth", "anonymous"]
        crew.start("webdav", [program, *words, "--server", "cheroot", "-q", "--no-config"])
        endpoint = f"http://{HOST}:{port}"
        crew.wait_for(lambda: status_of(endpoint) is not None, f"{endpoint} answers")
        (files / "lab").mkdir()
        yield Server(
            *("webdav", "webdav", endpoint, "lab", {"base_url": endpoint}),
            run_dir=str(crew.run_dir),
            pids=crew.pids(),
        )


def _files(home: Path) -> Path:
    files = home / "files"
    files.mkdir()
    return files


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False
