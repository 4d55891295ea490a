"""Programs asked with a time limit, so that nothing that hangs or crashes takes the doctor with it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from octavo import env


class ProbeFailed(Exception):
    """The text says why, without a full stop."""


def ask(command: Sequence[str], seconds: float) -> tuple[int, str, str]:
    """Exit status, standard output and standard error.

    Raises:
        ProbeFailed: it could not be started, or was not done in time; then it was ended, with all it had started.
    """
    name = os.path.basename(command[0])
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a group of its own, which can be ended as a whole
            env=env.for_child(sys.path),
        )
    except OSError as error:
        raise ProbeFailed(f"{name} cannot be started ({error.strerror or error})") from None
    try:
        out, told = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise ProbeFailed(f"{name} did not answer in {seconds:g} seconds") from None
    return process.returncode, out, told


def ask_module(module: str, arguments: Sequence[str], seconds: float) -> Any:
    """What a module of this package prints as the last line of its output, which is JSON.

    Raises:
        ProbeFailed: it crashed or hung.
    """
    status, out, told = ask([sys.executable, "-P", "-m", module, *arguments], seconds)
    lines = out.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        last = told.strip().splitlines()
        raise ProbeFailed(f"{module} {how}" + (f" ({last[-1][:200]})" if last else "")) from None
