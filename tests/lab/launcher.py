"""torchrun with an agent that has imported torch and ckptfs, and forks its workers: seconds of CPU less for each.

python -m tests.lab.launcher --nnodes 2 ... /path/of/a/script.py ARGUMENTS

It is torch's own launcher with its options ``--run-path`` and ``--start-method fork``. A script that ends
well must return: its agent waits for what a worker that leaves by SystemExit would have returned.
"""

from __future__ import annotations

import sys

from torch.distributed.run import main

from tests.multiprocess.harness import warm_up

if __name__ == "__main__":
    warm_up()
    main(["--run-path", "--start-method", "fork", *sys.argv[1:]])
