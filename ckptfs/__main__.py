"""``python -m ckptfs``: the command line, if the script is not on the path."""

from ckptfs.cli.main import main

main()
