"""What every test runs under."""

from __future__ import annotations

import os

# torch's TCPStore server looks up the name of every address that connects, in the one thread that
# serves all ranks. Where a name server does not answer, each connection would cost 5 s: one is
# enough to notice it. Read by glibc at the first look-up, inherited by every rank.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
