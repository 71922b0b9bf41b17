"""The command tree and its exit codes: 0, 2 with an error line, 130 (Ctrl-C), 143 (SIGTERM)."""

import sys
from collections.abc import Sequence

import cyclopts

from rookery.cli.demo import demo, new
from rookery.cli.doctor import doctor
from rookery.cli.evolve import evolve
from rookery.cli.fleet import fleet
from rookery.cli.grpo import grpo
from rookery.cli.loop_command import evaluate, genome, icm, league, make_loop_app, pipeline, sft
from rookery.cli.runs import runs, ui
from rookery.cli.serve import keys, serve
from rookery.cli.terminal import fail
from rookery.compose import KINDS
from rookery.errors import RookeryError, missing_extra
from rookery.runtime.stopping import Stopped, stop_signals

__all__ = ["app", "main"]

app = cyclopts.App(
    name="rookery",
    help="One vLLM fleet, every way to make a model better on it.",
    version_flags=["--version"],
    help_on_error=False,
    suppress_keyboard_interrupt=False,  # else every signal would exit with 130
)
app.command(demo)
app.command(new)
app.command(evaluate, name="eval")
app.command(genome)
app.command(grpo)
app.command(icm)
app.command(evolve)
app.command(sft)
app.command(pipeline)
app.command(league)
app.command(fleet)
app.command(serve)
app.command(keys)
app.command(runs)
app.command(ui)
app.command(doctor)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line, or `words` as one, and exit."""
    for kind in KINDS:
        if kind not in app:
            app.command(make_loop_app(kind, help=f"Run the loop {kind}.", summary="Run the loop."))
    try:
        with stop_signals():
            code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except cyclopts.CycloptsError as error:
        fail(_explain(error))
        sys.exit(2)
    except RookeryError as error:
        fail(str(error))
        sys.exit(2)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        fail(str(missing))
        sys.exit(2)
    except Stopped as stop:
        sys.exit(stop.code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: cyclopts.CycloptsError) -> str:
    """Describe a usage error, and name the command whose help says more. Cyclopts itself names a
    missing argument by a flag that its help does not show."""
    command = " ".join(("rookery", *(error.command_chain or ())))
    text, argument = str(error), error.argument
    if isinstance(error, cyclopts.MissingArgumentError) and argument is not None:
        if argument.index is not None and error.keyword is None and not argument.tokens:
            text = f"`{command}` needs {argument.name.removeprefix('--').upper()}."
    elif isinstance(error, cyclopts.UnusedCliTokensError) and error.unused_tokens:
        text = f"`{command}` does not take {' '.join(error.unused_tokens)!r}."
    return f"{text} See `{command} --help`."
