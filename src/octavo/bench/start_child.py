"""One start in a process of its own, for `octavo bench startup`: when each part of it was over, as JSON."""

import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Options of the engine come as a JSON file, what was measured goes to another; moments are monotonic seconds."""
    given, found = Path(sys.argv[1]), Path(sys.argv[2])
    options = json.loads(given.read_text())
    begun = time.monotonic()
    from octavo.bench import offline
    from octavo.bench.workload import Item
    from octavo.config import EngineConfig
    from octavo.engine.engine import Engine

    imported = time.monotonic()
    with Engine(EngineConfig.from_keywords("octavo bench startup", **options["engine"])) as engine:
        ready = time.monotonic()
        ids = [
            offline.LOWEST_ID + n % (engine.spec.vocab_size - offline.LOWEST_ID) for n in range(options["input_len"])
        ]
        batch = offline.run(engine, [Item(ids, 1)])
        answered = time.monotonic()
        phases = dict(engine.start_phases)
        settings = offline.configuration(engine)
    found.write_text(
        json.dumps(
            {
                "begun": begun,
                "imported": imported,
                "ready": ready,
                "answered": answered,
                "phases": phases,
                "output_tokens": batch.output_tokens,
                "configuration": settings,
            }
        )
    )


if __name__ == "__main__":
    main()
