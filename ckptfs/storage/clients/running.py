"""A coroutine of a client library, run on the library's own event loop by a thread of ours.

The clients of s3fs and gcsfs are asynchronous; ``ObjectClient`` is not. Both wait here, so that what
Ctrl-C promises about the caller's buffer is written once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run_on"]

T = TypeVar("T")


def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], let_go_s: float) -> T:
    """The result of ``work`` on ``loop``, or its error. Not from the loop's own thread.

    let_go_s: how long an interrupted wait lasts until the request has let go of the caller's memory.
    """
    done = threading.Event()

    async def watched() -> T:
        try:
            return await work
        finally:
            done.set()

    future = asyncio.run_coroutine_threadsafe(watched(), loop)
    try:
        return future.result()
    except BaseException:
        # Ctrl-C: the request must be over before the caller's buffer is the caller's again.
        if future.cancel():
            done.wait(let_go_s)
        raise
