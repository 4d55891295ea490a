"""`octavo doctor`: is everything here as it should be, and if not, why it matters and what mends it."""

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from octavo.doctor import bundle as archive
from octavo.doctor.checks import run, worst
from octavo.doctor.gather import gather
from octavo.doctor.report import EXIT_STATUS, as_json, show
from octavo.errors import InvalidConfig
from octavo.findings.redact import Redactor


def doctor(
    model: str | None = None,
    *,
    host: str = "0.0.0.0",
    port: int = 8000,
    as_json_: Annotated[bool, Parameter(name="--json", negative=())] = False,
    bundle: Path | None = None,
    log: Path | None = None,
    options: Path | None = None,
) -> None:
    """Check this machine and, where one is named, a model: what is wrong, why it matters, what mends it.

    Nothing is started or changed. The exit status is that of the worst finding: 0 in order, 1 a warning, 2 an error.

    Parameters
    ----------
    model
        Folder, GGUF file, pulled model or Hub id to check against this machine. Of a Hub id only the configuration and
        the tokenizer are fetched.
    host
        Address that a server would listen on.
    port
        Port that a server would listen on.
    as_json_
        Print the findings as JSON.
    bundle
        Write a zip archive to attach to an issue: findings, versions, environment, without secrets.
    log
        A server's log, whose last 2,000 lines go into the bundle.
    options
        The options file (YAML) of a server, for the bundle.
    """
    if not 0 <= port <= 65535:
        raise InvalidConfig(f"port={port} is not allowed: it must be an integer from 0 to 65535.")
    if (log or options) and not bundle:
        raise InvalidConfig("--log and --options are for the bundle.", "Give --bundle FILE as well.")
    if bundle and not bundle.absolute().parent.is_dir():
        raise InvalidConfig(f"There is no folder {bundle.absolute().parent}.", "Give --bundle another place.")
    facts = gather(model, host, port)
    results = run(facts)
    redact = Redactor(facts.environment.items())
    if as_json_:
        print(json.dumps(as_json(facts, results, redact), indent=1))
    else:
        show(Console(), facts, results, redact)
    if bundle:
        names = archive.write(bundle, facts, results, redact, log, options)
        print(
            f"{bundle} has {', '.join(names)}. Secrets were removed; look through it before you attach it.",
            file=sys.stderr,
        )
    sys.exit(EXIT_STATUS[worst(results)])
