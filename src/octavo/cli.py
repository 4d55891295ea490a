"""The `octavo` command. Commands are named by import path, so that `--help` loads neither torch nor them."""

import io
import os
import sys
import traceback
from difflib import get_close_matches

from cyclopts import App, CycloptsError, UnusedCliTokensError

from octavo import log
from octavo.errors import OctavoError
from octavo.findings.explain import cause, explain
from octavo.flags import read_config_file
from octavo.version import __version__

app = App(
    name="octavo",
    version=f"octavo {__version__}",
    help="LLM inference with a paged KV cache and continuous batching.",
    config=read_config_file,
    print_error=False,
    exit_on_error=False,
    verbose=False,
    help_epilogue="Start with: octavo pull smollm2, then octavo demo.",
)
app.command("octavo.tools.pull:pull", help="Download a small model that needs no account.")
app.command("octavo.tools.demo:demo", help="A question answered as it streams, then 32 prompts at once.")
app.command("octavo.server.serve:serve", help="Serve a model with the API that OpenAI's clients speak.")
app.command("octavo.tools.chat:chat", help="Talk with the model of a running server.")
app.command("octavo.tools.complete:complete", help="Continue a text on a running server.")
app.command("octavo.tools.run_batch:run_batch", help="Answer a file of requests; begun again it goes on where it was.")
app.command("octavo.bench.profile:profile", help="What each operator of some steps took; also on a running server.")
app.command("octavo.tools.plan:plan", help="Does a model fit, how fast will it be, on which GPU; without loading it.")
for name in ("doctor", "collect-env"):  # users of other engines type the second
    about = "Check this machine and a model: what is wrong, why it matters, what mends it."
    app.command("octavo.doctor.command:doctor", name=name, help=about, show=name == "doctor")
bench = App(name="bench", help="Measure a model or a running server.", print_error=False, exit_on_error=False)
bench.command("octavo.bench.serve:serve", help="Load a running server: TTFT, TPOT, ITL, goodput.")
bench.command("octavo.bench.latency:latency", help="Time to first token and per token of one batch.")
bench.command("octavo.bench.throughput:throughput", help="Requests and tokens per second of many prompts.")
bench.command("octavo.bench.ladder:batch", help="Tokens/s, requests/s and latency by batch size.")
bench.command("octavo.bench.ladder:length", help="Tokens, time and tokens/s by length of the answers.")
bench.command("octavo.bench.startup:startup", help="Time to ready and to the first token, each in a new process.")
bench.command("octavo.bench.sweep:sweep", help="A server at every combination of options; the highest good rate.")
bench.command("octavo.bench.compare:compare", help="Ratios of two sides' results, with confidence intervals.")
bench.command("octavo.bench.report:report", help="One HTML page of the JSON results of these commands.")
bench.command("octavo.bench.machine:machine", help="What this machine reaches: bytes/s and FLOP/s.")
app.command(bench)
recorded = "What the scheduler did in a run recorded with --trace FILE."
trace = App(name="trace", help=recorded, print_error=False, exit_on_error=False)
trace.command("octavo.trace.command:show", help="All requests, or one's life and its block table step by step.")
trace.command("octavo.trace.command:replay", help="The recorded arrivals again with other settings, without a model.")
trace.command("octavo.trace.command:html", help="One page: blocks over time, requests, block tables.")
app.command(trace)
app.command("octavo.tools.generate:generate", help="Complete a prompt, or answer it as a chat message.")


def main() -> None:
    """Run a command; the last line of a failure is its cause and what to do."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):  # absent when closed
            output.reconfigure(errors="backslashreplace")  # a model writes any character, whatever the terminal knows
    try:
        log.set_up()
        _check_command()
        app()
    except CycloptsError as error:
        print(
            f"octavo: {_cause(error)} See {' '.join(('octavo', *(error.command_chain or ())))} --help.", file=sys.stderr
        )
        sys.exit(2)
    except OctavoError as error:
        sys.exit(f"octavo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still held back would fail again at the end
        # A reader that has enough, such as `head`, is no fault.
        known = explain(error)
        sys.exit(None if isinstance(error, BrokenPipeError) else f"octavo: {known.line if known else error}")
    except Exception as error:  # whatever it is, the last line says the cause
        if explain(error) is None:
            traceback.print_exc()
        sys.exit(f"octavo: {cause(error)}")


def _check_command() -> None:
    """Refuse a name that is no command here: cyclopts would import every command, and torch, to say so."""
    name = sys.argv[1] if len(sys.argv) > 1 else "-"
    commands = [known for known in app if not known.startswith("-")]
    if name.startswith("-") or name in commands:
        return
    near = get_close_matches(name, commands, 1)
    meant = f"Did you mean {near[0]}? " if near else ""
    there_are = f"There are {', '.join(commands)}. See octavo --help."
    print(f"octavo: {name!r} is no command. {meant}{there_are}", file=sys.stderr)
    sys.exit(2)


def _cause(error: CycloptsError) -> str:
    if isinstance(error, UnusedCliTokensError):
        # A text may begin with a hyphen, so a mistyped option was taken for it, and what follows is left over.
        command = app
        for name in error.command_chain or ():
            command = command[name]
        known = {name for option in command.assemble_argument_collection() for name in option.names}
        for given in sys.argv[2:]:
            if (
                given.startswith("--")
                and (name := given.partition("=")[0].replace("_", "-")) not in known
                and len(name) > 2
            ):
                near = get_close_matches(name, known, 1)
                return f"Unknown option: {name}." + (f" Did you mean {near[0]}?" if near else "")
        return f"Not expected: {' '.join(error.unused_tokens or ())}. A text of several words goes into quotes."
    return str(error)
