"""The command `fastattn`: train, translate, evaluate, demo, info, check.

Results go to standard output, progress and warnings to standard error; `--json` prints one JSON
document instead of text. Slow imports are left to the commands that need them.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence

from fastattn.cli import demo, info, train, translate
from fastattn.cli.arguments import DONE, WRONG_INPUT, Parser
from fastattn.cli.errors import report

EPILOG = """\
exit codes: 0 success, 1 a check failed, nothing could be checked or training diverged, 2 wrong
input or a missing package, 3 the default text could not be downloaded, 130 interrupted, 141 the
output pipe was closed, 143 terminated
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(arguments)
    options = parser.parse_args(arguments)
    if options.version:
        import fastattn

        print(f"fastattn {fastattn.__version__}")
        return DONE
    if options.command is None:
        parser.print_help()
        return WRONG_INPUT
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escape characters that its encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        command: Callable[[argparse.Namespace], int] = options.run
        status = command(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except (Exception, KeyboardInterrupt) as error:
        code = report(error, options.command)
        if code is None:
            raise
        return code


def make_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; it has the options of `check` only if that is the command."""
    parser = Parser(
        prog="fastattn",
        description="Attention kernels behind a drop-in Transformer: try it, train it, check it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    demo.add(commands)
    train.add(commands)
    translate.add_translate(commands)
    translate.add_evaluate(commands)
    info.add_info(commands)
    info.add_check(commands, with_options=bool(arguments) and arguments[0] == "check")
    return parser
