"""``ckptfs``: the group of commands. Each module is imported when its command runs.

    look      ls  latest  log  watch
    inspect   inspect
    verify    verify
    doctor    doctor
    change    rm  pin  unpin  gc
    copy      cp
    export    export
    bench     bench  bench report  bench compare

``ckptfs ls`` must answer at once: nothing here or in ``look`` imports torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib import import_module
from types import TracebackType

import click

from ckptfs._version import __version__
from ckptfs.progress import printable
from ckptfs.uri import MASK, mask_credentials

__all__ = ["COMMANDS", "ckptfs", "main"]

# By command: its module, and what ``ckptfs --help`` says of it without importing that.
COMMANDS = {
    "ls": ("ckptfs.cli.look:ls", "List runs and checkpoints: step, state, age, size, ranks."),
    "log": ("ckptfs.cli.look:log", "Show who saved, fenced and deleted what, when, from where."),
    "latest": (
        "ckptfs.cli.look:latest",
        "Print the newest committed checkpoint; fail if it is too old.",
    ),
    "watch": (
        "ckptfs.cli.look:watch",
        "Print each commit, failure, fence and delete as it happens.",
    ),
    "inspect": (
        "ckptfs.cli.inspect:inspect",
        "Show the tensors of a checkpoint, or compare two.",
    ),
    "verify": (
        "ckptfs.cli.verify:verify",
        "Check whether a checkpoint is complete; --deep compares bytes.",
    ),
    "cp": (
        "ckptfs.cli.copy:cp",
        "Copy a checkpoint or a run, verified and resumable.",
    ),
    "rm": ("ckptfs.cli.change:rm", "Delete one checkpoint."),
    "gc": ("ckptfs.cli.change:gc", "Find what dead jobs left behind; --delete removes it."),
    "pin": ("ckptfs.cli.change:pin", "Exclude a checkpoint from retention."),
    "unpin": ("ckptfs.cli.change:unpin", "Let retention delete a pinned checkpoint again."),
    "export": (
        "ckptfs.cli.export:export",
        "Convert to safetensors, a torch.save file or plain DCP.",
    ),
    "doctor": ("ckptfs.cli.doctor:doctor", "Test a storage from where the job runs."),
    "bench": (
        "ckptfs.cli.bench:bench",
        "Measure save and load speed, compared with other writers.",
    ),
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        found: click.Command = getattr(import_module(module), name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckptfs")
@click.option(
    "-v", "--verbose", count=True, help="Log what happens; give it twice for every detail."
)
@click.pass_context
def ckptfs(context: click.Context, verbose: int) -> None:
    """Look at, check, copy, clean and measure PyTorch checkpoints on any storage.

    Exit codes: 0 done; 1 no (damaged, too old, different); 2 wrong call; 3 not found; 4 not
    permitted; 5 the storage failed; 6 busy or taken by somebody else; 7 unknown.
    """
    from ckptfs.cli.options import secrets_in

    levels = (logging.WARNING, logging.INFO, logging.DEBUG)
    handler = logging.StreamHandler()
    # The options of the command add their secrets (``storage_options``).
    context.obj = secrets_in(os.environ)
    handler.setFormatter(_SafeFormatter(context.obj))
    logging.basicConfig(level=levels[min(verbose, 2)], handlers=[handler])


class _SafeFormatter(logging.Formatter):
    """Formats each record as one line with credentials masked.

    Libraries log requests with credentials and with names that anybody may have chosen. secrets: texts
    that are masked wherever they occur; more may be added later.
    """

    def __init__(self, secrets: set[str]) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")
        self._secrets = secrets

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - a name of logging's
        record.message = self._safe(record.message)
        return super().formatMessage(record)

    def formatException(  # noqa: N802
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        return "\n".join(map(self._safe, super().formatException(ei).splitlines()))

    def _safe(self, text: str) -> str:
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, MASK)
        return printable(mask_credentials(text))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script. Ends the process."""
    ckptfs.main(args=None if arguments is None else list(arguments), prog_name="ckptfs")
