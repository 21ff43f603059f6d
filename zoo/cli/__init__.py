"""The command line. Each command is a module here, imported when it is called, so that `zoo --help` waits for nothing.

Exit codes: 0 done; 1 the run failed; 2 wrong usage or a wrong recipe, told in one line on standard error.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from zoo.cli._parser import RunFailed
from zoo.registry import RecipeError, did_you_mean

COMMANDS = {
    "fit": "train a recipe",
    "validate": "measure a checkpoint on the held-out validation documents",
    "test": "measure a checkpoint on the held-out test documents",
    "predict": "loss of every token of the test documents",
    "list": "names that a recipe may use: recipes, mixers, gates, ffns, routers, residuals, tasks",
    "show": "what a recipe builds: layers, parameters, operations, states, backends",
    "generate": "let a checkpoint write",
    "compare": "recipes under one protocol, at equal budgets, over several seeds: a report",
    "probe": "what a checkpoint does on a text: loss by position, gates, attention, hidden states",
    "import": "a transformers checkpoint as a run folder: recipe and weights",
    "export": "a checkpoint as a folder that transformers loads",
    "bench": "how fast: ops beside their peers, or a whole model",
    "check": "hold a gate, a mixer or an FFN of your own to the zoo's contracts",
}
# a module named `list` would hide the builtin from its package; `import` is no name of a module
_MODULES = {
    **dict.fromkeys(("fit", "validate", "test", "predict"), "run"),
    "list": "listing",
    "import": "hf_import",
    "export": "hf_export",
}

HELP = f"""usage: zoo COMMAND ...

The model zoo for hybrid language models.

commands:
{chr(10).join(f"  {name:<10}{text}" for name, text in COMMANDS.items())}

options:
  -h, --help  this text; `zoo COMMAND --help` for a command's options
  --version   the version
  --debug     with any command: show the traceback of an error (as ZOO_DEBUG=1 does)

zoo fit --config qwen3_next/tiny
zoo show kimi_linear/tiny
zoo generate runs/qwen3_next-tiny --prompt 'def '
zoo check my_gate.py
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("ZOO_DEBUG", "0") not in ("", "0")
    if "--debug" in args:
        args.remove("--debug")
        debug = True
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # a console script lacks it, and `class_path: my_module.MyData` needs it
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # formulas and models' texts go to any terminal
    try:
        return _dispatch(args)
    except RecipeError as error:
        return _complain(error, 2, debug)
    except RunFailed as error:
        return _complain(error, 1, debug)
    except SystemExit as done:  # a parser that has printed its help
        return int(done.code or 0)
    except KeyboardInterrupt as stop:
        print(f"zoo: {stop if stop.args else 'interrupted'}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # the reader (`| head`) has seen enough; what is still buffered must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if args else 2
    if args[0] == "--version":
        from zoo import __version__

        print(f"zoo {__version__}")
        return 0
    command, *rest = args
    if command not in COMMANDS:
        what = "option" if command.startswith("-") else "command"
        known = ["--help", "--version", "--debug"] if what == "option" else COMMANDS
        raise RecipeError(f"unknown {what} '{command}'{did_you_mean(command, known)}")
    module = importlib.import_module(f"zoo.cli.{_MODULES.get(command, command)}")
    result: int = module.main(command, rest)
    return result


def _complain(error: Exception, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    print("zoo: error: " + " ".join(str(error).split()), file=sys.stderr)
    return code
