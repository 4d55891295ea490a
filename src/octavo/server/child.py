"""Runs a process of the server: `python -m octavo.server.child MODULE FOLDER ...`.

Whatever ends MODULE's `main`, also an import that fails, leaves its cause and mend in FOLDER/cause, where the
supervisor reads what to say last.
"""

import importlib
import sys
import traceback
from pathlib import Path

from octavo.engine.protocol import CAUSE_FILE
from octavo.errors import OctavoError
from octavo.findings.explain import cause


def main() -> None:
    module, folder, *_ = sys.argv = sys.argv[1:]
    try:
        importlib.import_module(module).main()
    except Exception as error:
        if not isinstance(error, OctavoError):
            traceback.print_exc()
        file = Path(folder) / CAUSE_FILE
        if not file.exists():  # the first cause is the one
            file.write_text(cause(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
