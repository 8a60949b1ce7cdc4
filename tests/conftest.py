"""What every test runs under."""

from __future__ import annotations

import os
import signal

# torch's TCPStore server looks up the name of every address that connects, in the one thread that
# serves all ranks. Where a name server does not answer, each connection would cost 5 s: one is
# enough to notice it. Read by glibc at the first look-up, inherited by every rank.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A suite that was started in the background inherits that SIGINT is ignored, and so would every
# process that it starts: what Ctrl-C does could not be shown.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
