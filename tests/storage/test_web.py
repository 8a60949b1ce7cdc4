"""Checkpoints behind a web server, with ranges and without, and in archives: read, and never written."""

from __future__ import annotations

import io
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.errors import (
    AccessError,
    CollectiveError,
    IntegrityError,
    NotFoundError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.registry import open_storage

pytest.importorskip("aiohttp")

SIZE = 3_000_000


class Web(ThreadingHTTPServer):
    """Python's own server over a directory: it ignores ranges unless ``ranges``; without ``sizes`` it
    does not say how long a file is.
    """

    daemon_threads = True

    def __init__(self, root: Path, *, ranges: bool, sizes: bool = True) -> None:
        self.root, self.ranges, self.sizes = root, ranges, sizes
        self.sent: list[tuple[str, int]] = []  # (path, status) of each GET
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        """Of the directory."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error."""

    def wholes(self, name: str) -> int:
        """How often a file was sent from its first byte, as a whole."""
        return sum(path.endswith(name) and status == 200 for path, status in self.sent)


class Handler(SimpleHTTPRequestHandler):
    """One connection."""

    server: Web

    def __init__(self, request: Any, address: Any, server: Web) -> None:
        super().__init__(request, address, server, directory=str(server.root))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Nothing."""

    def send_header(self, keyword: str, value: str) -> None:
        """As the base's, without the length where a test says so."""
        if self.server.sizes or keyword != "Content-Length":
            super().send_header(keyword, value)

    def do_GET(self) -> None:
        """A range, or the whole file."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        ranged = self.server.ranges and asked is not None and path.is_file()
        self.server.sent.append((self.path, 206 if ranged else 200))
        if not ranged or asked is None:
            super().do_GET()
            return
        first, last = int(asked[1]), int(asked[2])
        data = path.read_bytes()
        piece = data[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(piece) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        shutil.copyfileobj(io.BytesIO(piece), self.wfile)


Serve = Callable[..., Web]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers, and ends them."""
    servers: list[tuple[Web, threading.Thread]] = []

    def start(root: Path, *, ranges: bool, sizes: bool = True) -> Web:
        server = Web(root, ranges=ranges, sizes=sizes)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def state(value: float) -> dict[str, Any]:
    """A tensor of 12 MB, and small things behind it."""
    return {"w": torch.arange(float(SIZE)) * value, "v": torch.full((5,), value), "n": int(value)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one checkpoint, in a directory that a server shows or an archive is made of."""
    ckptfs.save(state(3), tmp_path / "top" / "run" / "step_1")
    return tmp_path / "top" / "run"


@pytest.mark.parametrize("ranges", [False, True])
def test_a_checkpoint_loads_over_http(run: Path, serve: Serve, *, ranges: bool) -> None:
    """``load`` and ``restore`` read every byte of a checkpoint behind a web server, with its digests: in
    ranges where it has them, and else the data file whole.
    """
    web = serve(run.parent, ranges=ranges)
    into = state(0)
    ckptfs.load(into, f"{web.url}/run/step_1")
    assert all(torch.equal(into[key], state(3)[key]) for key in ("w", "v"))
    assert into["n"] == 3
    into = state(0)
    with ckptfs.CheckpointManager(f"{web.url}/run") as manager:
        restored = manager.restore(into)
    assert restored is not None
    assert restored.step == 1
    assert torch.equal(into["w"], state(3)["w"])
    if ranges:
        assert web.wholes("__0_0.distcp") == 0


def test_a_server_that_ignores_ranges_sends_a_file_once(tmp_path: Path, serve: Serve) -> None:
    """The first answer says that ranges are ignored: the file is read whole once, and each range of it
    after that without another request.
    """
    data = os.urandom(200_000)
    (tmp_path / "f").write_bytes(data)
    web = serve(tmp_path, ranges=False)
    with open_storage(web.url).open_read("f") as reader:
        for offset, size in ((100_000, 1000), (5, 10), (199_999, 1), (0, 200_000)):
            buffer = bytearray(size)
            reader.read_into(offset, memoryview(buffer))
            assert bytes(buffer) == data[offset : offset + size]
        with pytest.raises(IntegrityError):
            reader.read_into(199_999, memoryview(bytearray(2)))
    assert web.wholes("f") == 2  # the answer that said it, without a byte read, and the file


def test_what_a_server_does_not_tell(tmp_path: Path, serve: Serve) -> None:
    """A file that went is NotFoundError, and one without a length from the server is refused by name."""
    for name in ("gone", "unsized"):
        (tmp_path / name).write_bytes(b"0123456789")
    place = open_storage(serve(tmp_path, ranges=True).url)
    with place.open_read("gone") as reader:
        (tmp_path / "gone").unlink()
        with pytest.raises(NotFoundError):
            reader.read_into(2, memoryview(bytearray(2)))
    with pytest.raises(NotFoundError):
        place.open_read("gone")
    unsized = open_storage(serve(tmp_path, ranges=True, sizes=False).url)
    with pytest.raises(UnsupportedError, match="how long"):
        unsized.open_read("unsized")


def writes(uri: str, options: dict[str, Any]) -> list[Callable[[], object]]:
    """Every way to write a checkpoint."""

    def directory() -> None:
        with ckptfs.checkpoint_dir(f"{uri}/step_3", storage_options=options):
            raise AssertionError("it began to write")

    return [
        lambda: ckptfs.save(state(1), f"{uri}/step_2", storage_options=options),
        lambda: ckptfs.save(state(1), f"{uri}/other/step_2", storage_options=options),
        lambda: ckptfs.save_object(1, f"{uri}/x.pt", storage_options=options),
        lambda: ckptfs.prepare_run(uri, storage_options=options),
        directory,
    ]


@pytest.mark.parametrize("kind", ["http", "zip", "tar"])
def test_saving_there_says_read_only(run: Path, tmp_path: Path, serve: Serve, kind: str) -> None:
    """Saving to http, into a zip or into a tar says that it is read-only, whatever saves."""
    if kind == "http":
        uri, options = f"{serve(run.parent, ranges=True).url}/run", {}
    else:
        archive = shutil.make_archive(str(tmp_path / "packed"), kind, run.parent)
        uri, options = f"{kind}://run", {"fo": archive}
    for write in writes(uri, options):
        with pytest.raises((AccessError, CollectiveError)) as caught:
            write()
        assert f"{kind}:// is read-only" in str(caught.value)


def test_an_archive_is_read(run: Path, tmp_path: Path) -> None:
    """A checkpoint in a zip loads."""
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", run.parent)
    into = state(0)
    ckptfs.load(into, "zip://run/step_1", storage_options={"fo": archive})
    assert torch.equal(into["w"], state(3)["w"])


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_that_is_missing(tmp_path: Path, kind: str) -> None:
    """Without an archive the error says which option names it; one that is not there is named."""
    with pytest.raises(UriError, match="does not name the archive") as caught:
        open_storage(f"{kind}://run")
    assert '"fo"' in str(caught.value)
    absent = str(tmp_path / "absent")
    with pytest.raises(NotFoundError, match=re.escape(absent)):
        open_storage(f"{kind}://run", {"fo": absent}).read("f")
