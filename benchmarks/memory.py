"""Peak memory of one process: weights + KV cache + what torch and Octavo themselves take.

    python benchmarks/memory.py [--kv 512M]

Runs the work in a fresh process and reads its peak from the kernel.
"""

import argparse
import json
import subprocess
import sys

CHILD = """
import json, resource, sys
from octavo import LLM, SamplingParams
from octavo.core.memory import num_parameters
llm = LLM(dtype="bfloat16", num_threads=2, kv_cache_memory_bytes=sys.argv[1], max_num_seqs=32)
cache = llm.engine.loop.executor.runner.caches
for key, value in cache:  # touch every page, as a full cache would
    key.zero_(); value.zero_()
params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
llm.generate([[7 + i] * 32 for i in range(32)], params, use_tqdm=False)
weights = 2 * num_parameters(llm.engine.spec)  # the checkpoint's own, once: a packed copy counts as everything else
print(json.dumps({
    "weights": weights,
    "cache": sum(t.numel() * t.element_size() for pair in cache for t in pair),
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kv", default="512M", help="bytes of KV cache")
    args = parser.parse_args()
    out = subprocess.run([sys.executable, "-c", CHILD, args.kv], check=True, capture_output=True, text=True).stdout
    found = json.loads(out.splitlines()[-1])
    mib = {name: value / 2**20 for name, value in found.items()}
    rest = mib["peak"] - mib["weights"] - mib["cache"]
    print("| weights | KV cache | everything else | peak |\n| --- | --- | --- | --- |")
    print(
        f"| {mib['weights']:.0f} MiB | {mib['cache']:.0f} MiB | {rest:.0f} MiB (at most 450) | {mib['peak']:.0f} MiB |"
    )


if __name__ == "__main__":
    main()
