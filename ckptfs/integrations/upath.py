"""``upath.UPath("ckptfs+s3://bucket/run")``: found by an entry point; only upath imports it."""

from __future__ import annotations

from typing import Any

from fsspec import get_filesystem_class
from upath import UPath

__all__ = ["CheckpointPath"]


class CheckpointPath(UPath):
    """A path at ``ckptfs+s3://`` and similar.

    upath by itself takes the ``+`` for the end of the scheme.
    """

    __slots__ = ()

    @classmethod
    def _transform_init_args(
        cls, args: tuple[Any, ...], protocol: str, storage_options: dict[str, Any]
    ) -> Any:
        get_filesystem_class(protocol)  # upath asks the classes that are loaded, and warns
        if args:
            storage_options = {**getattr(args[0], "storage_options", {}), **storage_options}
        plain_args = tuple(_plain(arg, protocol) for arg in args)
        return super()._transform_init_args(plain_args, protocol, storage_options)


def _plain(arg: Any, protocol: str) -> Any:
    text = getattr(arg, "path", arg)
    return text.removeprefix(f"{protocol}://") if isinstance(text, str) else text
