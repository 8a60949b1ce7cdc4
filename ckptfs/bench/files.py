"""Result files, and what is drawn of them, on the local disk.

read_result(path)            decoded, or an error that names the file
try_place(path)              an error now rather than after the measuring
write_result(path, result)   directories are made; a file that was there is replaced as a whole
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

from ckptfs.bench.results import Result, decode_result, encode_result
from ckptfs.errors import ManifestError
from ckptfs.storage.os_errors import translated
from ckptfs.uri import Uri

__all__ = ["read_result", "try_place", "write_file", "write_result"]


def read_result(path: str | Path) -> Result:
    """Read the result in a file.

    Args:
        path: The file.

    Returns:
        The result.

    Raises:
        NotFoundError: There is no such file.
        AccessError: It may not be read.
        ManifestError: It is no result.
        UriError: The path is none of a mounted filesystem.
    """
    uri = Uri.parse(str(path))
    source = Path(uri.local_path)
    with translated(uri, "read"):
        raw = source.read_bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ManifestError(
            "no benchmark result: not even text",
            uri=str(path),
            hint="give the JSON file that ckptfs bench wrote",
        ) from error
    return decode_result(text, str(path))


def try_place(path: str | Path) -> None:
    """Check that ``write_result`` could write there; nothing stays.

    Args:
        path: The file.

    Raises:
        IsADirectoryError: It is a directory; raised as a StorageError.
        AccessError: It may not be written.
        NoSpaceError: The disk is full.
        StorageError: Any other failure.
    """
    uri = Uri.parse(str(path))
    target = Path(uri.local_path)
    made = [p for p in target.parents if not p.exists()]
    aside = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    with translated(uri, "write"):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(b"{}")
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()
            for directory in made:
                with contextlib.suppress(OSError):
                    directory.rmdir()


def write_result(path: str | Path, result: Result) -> None:
    """Write a result: it appears whole, or an error says why not.

    Minutes of measuring are not lost to half a file.

    Args:
        path: The file; its directory is made as needed.
        result: The result.

    Raises:
        StorageError: As for ``write_file``.
    """
    write_file(path, encode_result(result).encode())


def write_file(path: str | Path, data: bytes) -> None:
    """Write a small file, whole under its name or not at all.

    Args:
        path: The file; its directory is made as needed.
        data: Its bytes.

    Raises:
        AccessError: It may not be written.
        NoSpaceError: The disk is full.
        StorageError: Any other failure.
    """
    uri = Uri.parse(str(path))
    target = Path(uri.local_path)
    aside = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    with translated(uri, "write"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.write_bytes(data)
            aside.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
