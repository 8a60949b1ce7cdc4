"""Node-local disks on one machine: one URI is a different directory on every simulated node.

    nodes+file:///tmp/x/@node/run  ->  /tmp/x/a/run on node "a", /tmp/x/b/run on node "b"
    nodes+file:///tmp/x            ->  /tmp/x/a        and        /tmp/x/b

The node is the value of CKPTFS_NODE, else of torchrun's GROUP_RANK, else "0". ``str(root)`` is the same
on every rank, as with real node-local disks. If the path contains ``@node``, any directory below it may
be opened. Without it the root itself is the mount point, and only the root may be opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckptfs.errors import UriError
from ckptfs.storage.base import Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.uri import Uri, check_key

__all__ = ["MARK", "node_directory", "open_nodes", "this_node"]

MARK = "@node"


def this_node(environment: Mapping[str, str] | None = None) -> str:
    """The simulated node of this process, by ``environment``; None: the process's own variables."""
    variables = os.environ if environment is None else environment
    return variables.get("CKPTFS_NODE") or variables.get("GROUP_RANK") or "0"


def node_directory(uri: Uri, node: str) -> str:
    """Return the real directory of a URI on a node.

    Args:
        uri: A URI of ``nodes+file``.
        node: The simulated node.

    Raises:
        UriError: The node is not one component of a path.
    """
    check_key(node)
    if not node or "/" in node:
        raise UriError(f"a node is one component of a path, not {node!r}", uri=uri)
    parts = uri.path.split("/")
    if MARK not in parts:
        return f"{uri.path.rstrip('/')}/{node}"
    return "/".join(node if part == MARK else part for part in parts)


def open_nodes(uri: Uri, storage_options: Mapping[str, Any]) -> Storage:
    """The factory of ``nodes+file`` for the registry of storages.

    Args:
        uri: ``nodes+file:///path``.
        storage_options: Must be empty.

    Raises:
        UriError: The protocol is another one, or an option is given.
    """
    if uri.protocol != "nodes+file" or storage_options:
        raise UriError("simulated nodes are directories: nodes+file:///path", uri=uri)
    return LocalStorage(uri, directory=node_directory(uri, this_node()))
