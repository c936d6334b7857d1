"""The commands together, and how each of them ends: what is printed, and the exit code.

0: done. 1: the run failed. 2: wrong usage or bad input. 130: stopped by Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

import nhgd
from nhgd.cli.bench import bench
from nhgd.cli.check import check
from nhgd.cli.clean import clean
from nhgd.cli.data import data
from nhgd.cli.demo import demo
from nhgd.cli.launch import started_by_someone
from nhgd.cli.list import list_names
from nhgd.cli.run import run
from nhgd.errors import InputError, RunError, unknown


class Program(TyperGroup):
    """A group of commands that never ends in a traceback for what a user can cause."""

    given: list[str]

    def main(self, args: Any = None, *more: Any, **extra: Any) -> Any:
        """Run a command and exit."""
        self.given = given = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False  # the exceptions come here instead of being printed there
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                code = super().main(given, *more, **extra)
            except InputError as error:
                code = _fail(str(error), 2, given)
            except RunError as error:
                code = _fail(str(error), 1, given)
            except (torch.OutOfMemoryError, MemoryError) as error:
                code = _fail(
                    f"The memory does not suffice: {str(error).splitlines()[0] if str(error) else 'full'}", 1, given
                )
            except KeyboardInterrupt as stop:
                code = _interrupted(given, stop)
            except BrokenPipeError:
                # The reader went away, as `| head` does; nothing more can be said to it.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                code = 1
            except Exception as error:
                # Typer's own errors, whose classes live in click or in typer, depending on its version.
                if type(error).__name__ == "Abort":
                    code = _interrupted(given)
                elif hasattr(error, "format_message"):
                    code = _fail(_usage(error), 2, given)
                else:
                    raise
        if code and started_by_someone():
            # Threads that wait for a lost process inside torch could hold up an orderly end.
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
        """Find the command, or say which one may have been meant."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise unknown("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def _usage(error: Any) -> str:
    """One sentence from an error of the argument parser."""
    name = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption":
        near = getattr(error, "possibilities", None) or []
        return f"There is no option {name}.{f' Did you mean {near[0]}?' if near else ''}"
    return str(error.format_message())


def _fail(sentence: str, code: int, given: list[str]) -> int:
    print(f"Error: {sentence}", file=sys.stderr)
    if "--json" in given and os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        print(json.dumps({"error": sentence}))
    return code


def _interrupted(given: list[str], stop: KeyboardInterrupt | None = None) -> int:
    return _fail(f"Stopped by Ctrl-C. {str(stop or '') or 'Nothing was written.'}", 130, given)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"Warning: {message}", file=sys.stderr)


app = typer.Typer(
    cls=Program,
    name="nhgd",
    help="Bilevel optimisation: clean noisy labels, choose a ridge, and check any method against the exact hypergradient.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """The options that stand before a command."""
    if version:
        print(f"nhgd {nhgd.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)


for name, command in (
    ("demo", demo),
    ("list", list_names),
    ("run", run),
    ("check", check),
    ("bench", bench),
    ("clean", clean),
):
    app.command(name)(command)
app.add_typer(data, name="data")
