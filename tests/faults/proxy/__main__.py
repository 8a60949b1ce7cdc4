"""The proxy as a program: ``python -m tests.faults.proxy UPSTREAM FAULTS``."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from dataclasses import asdict

from tests.faults.proxy import FaultProxy


def main(words: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; the URL goes to standard output, the log to ``--log``."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.proxy")
    parser.add_argument("upstream", help="scheme://host:port of the store")
    parser.add_argument("faults", nargs="?", default="", help="ACTION:METHOD:PATH:WHICH; ...")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", help="a file for one line of JSON per request, written at the end")
    told = parser.parse_args(words)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with FaultProxy(told.upstream, told.faults, seed=told.seed, port=told.port) as proxy:
        sys.stdout.write(f"{proxy.url}\n")
        sys.stdout.flush()
        stop.wait()
    if told.log:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(told.log, "w", encoding="utf-8"))
            file.writelines(json.dumps(asdict(e)) + "\n" for e in proxy.log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
