"""What every command has: --json, --help, an entry in the docs; and completion in the shell."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import pytest

from ckptfs.cli.main import COMMANDS, ckptfs
from ckptfs.cli.output import Exit, exit_of, hint_text
from ckptfs.errors import (
    AccessError,
    CkptfsError,
    CollectiveError,
    ControlPlaneLostError,
    CredentialsError,
    Failure,
    IncompleteCheckpointError,
    MissingDriverError,
    NoSpaceError,
    NotFoundError,
)
from tests.cli.conftest import Cli, Place, a_run
from tests.cli.damage import DAMAGES

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
HEADINGS = {"unpin": "pin and unpin", "pin": "pin and unpin"}


def commands_of(name: str) -> list[click.Command]:
    """The command, or those below it."""
    context = click.Context(ckptfs)
    found = ckptfs.get_command(context, name)
    assert found is not None
    if isinstance(found, click.Group):
        below = [found.get_command(context, one) for one in found.list_commands(context)]
        return [one for one in below if one is not None]
    return [found]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json_help_and_a_section(name: str, cli: Cli) -> None:
    """A command takes --json, says in --help what it does, and has its section in the docs."""
    for made in commands_of(name):
        options = {option for param in made.params for option in param.opts}
        assert "--json" in options, made.name
        assert made.help, made.name
    ran = cli(name, "--help")
    assert ran.exit == 0
    assert "Usage: ckptfs" in ran.out
    sections = re.split(r"(?m)^## ", DOCS.read_text())
    section = next(s for s in sections if s.partition("\n")[0] == HEADINGS.get(name, name))
    assert f"ckptfs {name}" in section


def test_help_imports_no_command() -> None:
    """``ckptfs --help`` names every command and imports none of them, no torch and no rich."""
    script = (
        "import sys\n"
        "from ckptfs.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print(*sorted(m for m in sys.modules if m.startswith(('ckptfs.cli.', 'torch', 'rich'))))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    *_, modules = ran.stdout.splitlines()
    assert modules.split() == ["ckptfs.cli.main"]
    for name, (_, told) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(told[:20])}", ran.stdout, re.MULTILINE), name


def test_exit_codes_are_those_of_the_docs() -> None:
    """The table of the docs has every code, and no other."""
    section = DOCS.read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", section)} == {
        int(e) for e in Exit
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_gets_its_completion(shell: str) -> None:
    """What the docs tell to put into the start-up file is a script for that shell."""
    env = os.environ | {"_CKPTFS_COMPLETE": f"{shell}_source"}
    ran = subprocess.run(
        [Path(sys.executable).with_name("ckptfs")],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if shell == "bash" and ran.returncode:
        pytest.skip(f"no bash that click completes for: {ran.stderr.strip()}")
    assert "_CKPTFS_COMPLETE" in ran.stdout
    assert f"_CKPTFS_COMPLETE={shell}_source ckptfs" in DOCS.read_text()


def test_commands_and_options_are_completed() -> None:
    """Half a command and half an option are completed to those that there are."""

    def completed(words: str, number: int) -> list[str]:
        env = os.environ | {
            "_CKPTFS_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(number),
        }
        ran = subprocess.run(
            [Path(sys.executable).with_name("ckptfs")],
            env=env, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return [line.partition(",")[2] for line in ran.stdout.splitlines()]

    assert completed("ckptfs l", 1) == ["ls", "log", "latest"]
    assert completed("ckptfs ls --so", 2) == ["--sort"]


@pytest.mark.parametrize("kind", [CollectiveError, ControlPlaneLostError])
def test_an_unknown_outcome_has_its_own_code(kind: type[CkptfsError]) -> None:
    """Whatever the error is called: a script that tries again after a failure must not do so here."""
    assert exit_of(kind("lost", outcome="unknown")) is Exit.UNKNOWN
    assert exit_of(kind("lost", outcome="failed")) is Exit.STORAGE


# -- next to a training job --------------------------------------------------------------------------


@pytest.mark.parametrize("rank", ["0", "3"])
def test_rank_in_the_environment_silences_no_command_of_one_process(
    cli: Cli, local: Place, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    """What a training rank, or a shell on its machine, calls prints its answer and its errors, as JSON
    too, whatever RANK is.
    """
    a_run(local)
    monkeypatch.setenv("RANK", rank)
    assert cli("latest", local.uri).out == f"{local.uri}/step_20\n"
    for name in ("ls", "log", "verify", "gc"):
        assert "step_20" in cli(name, local.uri, "--json").out or name == "gc"
        assert cli(name, local.uri).out
    lost = cli("latest", f"{local.uri}-not")
    assert (lost.exit, bool(lost.err)) == (Exit.NOT_FOUND, True)


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        ([CredentialsError], Exit.ACCESS),
        ([MissingDriverError], Exit.USAGE),
        ([NoSpaceError], Exit.STORAGE),
        ([IncompleteCheckpointError], Exit.NO),
        ([RuntimeError, CredentialsError], Exit.ACCESS),
        ([RuntimeError], Exit.STORAGE),
        ([NotFoundError, AccessError], Exit.NOT_FOUND),
    ],
)
def test_a_collective_error_ends_with_the_code_of_its_cause(
    kinds: list[type[Exception]], code: Exit
) -> None:
    """Of the first rank with a failure that is an error of ours, also where that derives from another."""
    failures = {
        rank: Failure(rank, "n", f"{kind.__module__}.{kind.__qualname__}", "x")
        for rank, kind in enumerate(kinds)
    }
    assert exit_of(CollectiveError("x", failures=failures)) is code


def test_nothing_is_wrapped_in_a_pipe() -> None:
    """A line of any length is one line for the next program."""
    table = subprocess.run(
        [sys.executable, "-c", _LONG_TABLE], capture_output=True, text=True, check=True
    )
    assert [len(line.rstrip()) for line in table.stdout.splitlines()] == [1, 3000]


_LONG_TABLE = """
from ckptfs.cli.output import CommandResult, print_answer, table
print_answer("x", CommandResult({}, lambda c: table(c, ("A",), [("b" * 3000,)])), as_json=False)
"""


_PYTHON = re.compile(
    r"\w\(\)|\b(?:if_exists|unlogged|takeover|verify|storage_options)=|prepare_run"
)


@pytest.mark.parametrize(
    "command", ["ls", "latest", "inspect", "verify", "log", "rm -y", "gc", "cp"]
)
@pytest.mark.parametrize(
    "damage", ["missing manifest", "future manifest", "garbage entry", "nowhere"]
)
def test_a_hint_names_commands_and_no_calls(
    cli: Cli, tmp_path: Path, command: str, damage: str
) -> None:
    """Who reads an error at a terminal has no Python at hand: its hint names what can be typed there."""
    place = Place("file", str(tmp_path / "run"))
    if DAMAGES[damage].on_a_run:
        a_run(place)
    hurt = DAMAGES[damage].plant(place)
    where = f"{hurt.uri}/step_20" if command in {"inspect", "rm -y", "cp"} else hurt.uri
    more = [str(tmp_path / "copy" / "step_20")] if command == "cp" else []
    ran = cli(*command.split(), where, *more)
    assert _PYTHON.search(ran.err) is None, ran.err


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        ('choose another name, or if_exists="replace"', "choose another name, or --overwrite"),
        ("call list_checkpoints() on its parent to see what exists", "run ckptfs ls on its parent"),
        ("nothing was deleted; the next save or prepare_run settles it", "the next job of the run"),
        (
            "another process commits it now: call prepare_run() to settle it",
            "run ckptfs gc --delete to settle it",
        ),
        (
            'the data file may be intact: load with verify="off" to read it unverified',
            "the data file may be intact: a load in Python can read it unverified",
        ),
        (
            "then remove the checkpoint again or call prepare_run()",
            "again or start a job of the run",
        ),
        (
            "its run is /data/run; ckptfs.load(state, uri) loads this checkpoint",
            "ckptfs inspect shows this checkpoint",
        ),
        ("storage_options key= and secret= or profile=; anon=True", "-o key= and -o secret="),
        (
            'load the right one by its name, pass unlogged="ignore" to continue with step_2, or move',
            "",
        ),
    ],
)
def test_hints_of_the_library_in_the_words_of_the_command_line(hint: str, words: str) -> None:
    """Each phrase that names a call has one that names a command."""
    told = hint_text(hint)
    assert words in told
    assert _PYTHON.search(told) is None


SECRETS = {
    "key": "AKIA0123456789ABCDEF",
    "secret": "s3cr3t/w1th+slashes==",
    "token": "sess10n-t0ken",
}


class _Refusing(BaseHTTPRequestHandler):
    """A store that refuses everybody, and keeps how it was asked."""

    def _answer(self) -> None:
        self.server.requests_seen.append(f"{self.path} {self.headers}")  # type: ignore[attr-defined]
        body = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = _answer  # noqa: N815 - names of the base class
    do_PUT = _answer  # noqa: N815

    def do_HEAD(self) -> None:
        self.server.requests_seen.append(f"{self.path} {self.headers}")  # type: ignore[attr-defined]
        self.send_response(403)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Nothing."""


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
@pytest.mark.parametrize("given", ["options", "environment"])
def test_no_credentials_at_any_verbosity(scheme: str, given: str) -> None:
    """Libraries log whole requests at -vv: who pastes that into an issue gives nothing away."""
    pytest.importorskip("s3fs")
    environment = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
    options = {"client_kwargs.endpoint_url": "http://{}"}
    if given == "options":
        options |= SECRETS
    else:
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        environment |= dict(zip(names, SECRETS.values(), strict=True))
    sent, shown = _refused_listing(f"{scheme}://bucket/run", options, environment)
    assert SECRETS["token"] in sent
    assert len(shown.splitlines()) > 10, "nothing was logged"
    for secret in SECRETS.values():
        assert secret not in shown


def _refused_listing(
    uri: str, options: dict[str, str], environment: dict[str, str], exits: Exit = Exit.ACCESS
) -> tuple[str, str]:
    """`ckptfs -vv ls` of a store that refuses everybody: what the server got, and what the command printed.
    "{}" in the URI and the options is replaced by the server's host and port.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    server.requests_seen = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"127.0.0.1:{server.server_port}"
    given = [f"-o{name}={text.replace('{}', host)}" for name, text in options.items()]
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "ckptfs", "-vv", "ls", *given, uri.replace("{}", host)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    finally:
        server.shutdown()
        server.server_close()
    shown = ran.stdout + ran.stderr
    assert ran.returncode == exits, shown
    return "".join(server.requests_seen), shown  # type: ignore[attr-defined]


GOOGLE = "ya29.a0AfH6SMBx-c0mputed_t0ken"
ACCOUNT_KEY = base64.b64encode(b"an account's key, of no account").decode()
SIGNATURE = "c2lnbmF0dXJl0123456789"
SAS = f"sv=2024-08-04&ss=b&srt=sco&sp=rwdl&se=2030-01-01T00:00:00Z&sig={SIGNATURE}"
AZURE = "DefaultEndpointsProtocol=http;BlobEndpoint=http://{}/an;AccountName=an"
DELEGATION = "HAAEcm9vdARyb290AIoBkd3l3gat10n"


@pytest.mark.parametrize(
    ("uri", "options", "sent", "secret"),
    [
        ("gs://bucket/run", {"endpoint_url": "http://{}", "token": GOOGLE}, GOOGLE, GOOGLE),
        (
            "abfs://box/run",
            {"connection_string": f"{AZURE};AccountKey={ACCOUNT_KEY}"},
            "SharedKey an:",
            ACCOUNT_KEY,
        ),
        (
            "abfs://box/run",
            {"connection_string": f"{AZURE};SharedAccessSignature={SAS}"},
            SIGNATURE,
            SIGNATURE,
        ),
        ("webhdfs://{}/run", {"token": DELEGATION}, DELEGATION, DELEGATION),
    ],
    ids=["google", "azure-key", "azure-sas", "hdfs"],
)
@pytest.mark.parametrize("library", ["auto", "fallback"])
def test_no_credentials_of_any_store_at_any_verbosity(
    uri: str, options: dict[str, str], sent: str, secret: str, library: str
) -> None:
    """What obstore, aiohttp, azure, google and urllib3 log. sent: what only the credentials put into a request."""
    fallbacks = {"gs": "gcsfs", "abfs": "adlfs"}
    if library == "fallback":
        if (name := fallbacks.get(uri.partition(":")[0])) is None:
            pytest.skip("it has one client")
        options = options | {"client": name}
    environment = {name: text for name, text in os.environ.items() if not name.startswith("AZURE_")}
    # A NameNode does not refuse with XML: what answers so is called no WebHDFS.
    exits = Exit.STORAGE if uri.startswith("webhdfs") else Exit.ACCESS
    got, shown = _refused_listing(uri, options, environment, exits)
    assert sent in got
    assert "INFO" in shown or "DEBUG" in shown, "nothing was logged"
    assert secret not in shown


def test_what_is_logged_is_one_line_each(capfd: pytest.CaptureFixture[str]) -> None:
    """A name in a checkpoint cannot forge a line of the log, nor change the terminal; nor can a traceback."""
    code = (
        "import logging\n"
        "from ckptfs.cli.main import ckptfs\n"
        "import click\n"
        "click.Context(ckptfs)\n"
        "try:\n    ckptfs.main(['-v', 'latest', '--help'], standalone_mode=False)\n"
        "except SystemExit: pass\n"
        "try:\n    raise ValueError('b\\x1b[2Jb')\n"
        "except ValueError: logging.getLogger('x').exception('a\\nERROR forged\\x1b[2J')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    said = capfd.readouterr().err
    assert "ERROR x: a\\nERROR forged\\x1b[2J" in said
    assert "ValueError: b\\x1b[2Jb" in said
    assert "\x1b" not in said
