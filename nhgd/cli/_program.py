"""The commands, and how each of them ends: output and exit code.

0: done. 1: the run failed. 2: wrong usage or bad input. 129, 130, 143: ended by SIGHUP, Ctrl-C, SIGTERM.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

import nhgd
from nhgd.cli import _signals as signals
from nhgd.cli._started import leave_error, started_by_someone, will_be_restarted
from nhgd.cli._streams import mute, printable, waiting
from nhgd.errors import InputError, NhgdError, PeerError, RunError, listed, unknown


@dataclass(frozen=True)
class Command:
    """A command: its function or group, in the file of the same name, and its summary."""

    function: str
    summary: str


# A command is imported when it is given, because that takes seconds: torch comes with it.
COMMANDS = {
    "demo": Command(
        "demo",
        "Clean a label set of which 40 % is wrong: accuracy before and after, the wrong labels found, and four methods compared.",
    ),
    "list": Command("list_names", "Methods, inverses, tasks and executions, each with one line."),
    "run": Command(
        "run",
        "Solve a task by a method. --out keeps the result, the history, the command and pictures.",
    ),
    "check": Command(
        "check",
        "Error, time and memory of inverses at the solved inner problem of a task. --set also takes cg.steps=100.",
    ),
    "bench": Command(
        "bench",
        "Several methods, seeds and settings with the same budget each: tables, figures and a page, report.html.",
    ),
    "sweep": Command(
        "sweep",
        "Search for settings of a method on a task, by Optuna. Several processes may share a storage; resumable.",
    ),
    "report": Command(
        "write_report",
        "One page, report.html, of a folder that bench, run, sweep or another command has written. It needs no network.",
    ),
    "theory": Command(
        "theory",
        "Constants of a task, the step sizes and loop lengths of the theorems, and their cost. --set takes task settings.",
    ),
    "reproduce": Command(
        "reproduce",
        "The paper's theorems and tables, measured again. --out keeps the results, and goes on with what is there.",
    ),
    "influence": Command(
        "influence",
        "Influence of every training sample on every outer sample of a task, at its solved inner problem.",
    ),
    "clean": Command(
        "clean",
        "Find mislabelled rows. --out has every row in its order, with weight, suspect, suggested_label and wrong_score added.",
    ),
    "distill": Command(
        "distill",
        "Learn a few images for each class such that a model trained on them alone does well, and measure how well.",
    ),
    "data": Command("data", "Download image sets."),
}


class Program(TyperGroup):
    """A group of commands that never shows a traceback for a user's mistake."""

    given: list[str]

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command for help and completion, without importing it."""
        known = COMMANDS.get(cmd_name)
        return None if known is None else TyperCommand(cmd_name, help=known.summary)

    def loaded(self, name: str) -> Any:
        """The command itself."""
        with waiting(f"nhgd {name}: starting"):
            module = import_module(f"nhgd.cli.{name}")
        found = getattr(module, COMMANDS[name].function)
        if isinstance(found, typer.Typer):
            command: Any = get_group(found)
        else:
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
            alone.command(name)(found)
            command = get_command(alone)
        command.name = name
        return command

    def main(self, args: Any = None, *more: Any, **extra: Any) -> Any:
        """Run a command and exit."""
        self.given = given = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False  # the exceptions come here instead of being printed there
        with warnings.catch_warnings(), nullcontext() if started_by_someone() else signals.raised():
            warnings.showwarning = _show_warning
            try:
                _refuse_empty(given)
                code = super().main(given, *more, **extra)
                sys.stdout.flush()  # so that what fails, fails here
            except InputError as error:
                code = _fail(str(error), 2, given, error)
            except RunError as error:
                code = _fail(str(error), 1, given, error)
            except KeyboardInterrupt as stop:
                code = _interrupted(given, stop)
            except BrokenPipeError:
                mute()  # the reader went away, as `| head` does
                code = 1
            except OSError as error:
                code = _fail(_refused(error), 1, given)
            except Exception as error:
                # Typer's own errors, whose classes live in click or in typer, depending on its version.
                if type(error).__name__ == "Abort":
                    code = _interrupted(given)
                elif hasattr(error, "format_message"):
                    code = _fail(_usage(error), 2, given)
                else:
                    from nhgd._memory import out_of_memory  # and torch, which is there by now if it is its error

                    full = out_of_memory(error)
                    if full is None:
                        raise
                    code = _fail(full, 1, given)
        if code and started_by_someone():
            # Threads that wait for a lost process inside torch could hold up an orderly end.
            with suppress(OSError):
                sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        sys.exit(code or 0)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; Ctrl-C is noted here, before Typer makes something else of it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise typer.Exit(_interrupted(self.given, stop)) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, or suggest the one that was meant."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise unknown("command", args[0], self.list_commands(ctx))
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else self.loaded(name), rest


def _usage(error: Any) -> str:
    """One sentence from an error of the argument parser."""
    name = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption":
        near = getattr(error, "possibilities", None) or []
        return f"There is no option {name}.{f' Did you mean {near[0]}?' if near else ''}"
    return str(error.format_message())


def _refuse_empty(given: list[str]) -> None:
    """An option with nothing as its value would mean the current folder, or the default, without a word."""
    for before, argument in zip(["", *given], given, strict=False):
        if not argument or (argument.startswith("--") and argument.endswith("=") and argument.count("=") == 1):
            name = argument.rstrip("=") or (before if before.startswith("-") else "An argument")
            raise InputError(f"{name} is empty. Give it a value, or omit it.")


def _refused(error: OSError) -> str:
    """Errors of the machine or of standard output; those of a command's own files are handled where they are opened."""
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EFBIG, errno.EDQUOT):
        mute()
        return f"Standard output could not be written: {error.strerror}."
    return f"System error:{f' {error.filename}' if error.filename else ''} {error.strerror or error}."


def _fail(sentence: str, code: int, given: list[str], error: NhgdError | None = None) -> int:
    problems = [printable(one) for one in error.problems] if isinstance(error, InputError) else []
    sentence, *further = listed(problems) if problems else [printable(sentence)]
    if started_by_someone():
        lost = (-1 if error.rank is None else error.rank) if isinstance(error, PeerError) else None
        named = error is not None and bool(error.checkpoint)
        if leave_error(sentence, code, type(error).__name__, lost, named):
            return code  # the launcher prints one sentence for all processes
    print("\n  ".join([f"Error: {sentence}", *further]), file=sys.stderr)
    # Of several processes one speaks, and only the last attempt: standard output is one JSON object.
    if "--json" in given and os.environ.get("RANK", "0") == "0" and not will_be_restarted():
        with suppress(OSError):
            print(json.dumps({"error": sentence} | ({"problems": problems} if problems else {})))
            sys.stdout.flush()
    return code


def _interrupted(given: list[str], stop: KeyboardInterrupt | None = None) -> int:
    number = signals.number_of(stop or KeyboardInterrupt())
    sentence = f"Stopped by {signals.name_of(number)}. {str(stop or '') or 'Nothing was written.'}"
    return _fail(sentence, 128 + number, given)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"Warning: {printable(str(message))}", file=sys.stderr)


app = typer.Typer(
    cls=Program,
    name="nhgd",
    help="Bilevel optimisation: clean noisy labels, choose a ridge, and check any method against the exact hypergradient.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """The options before a command."""
    if version:
        print(f"nhgd {nhgd.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)
