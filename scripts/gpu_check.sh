#!/bin/sh
# Checks and measures Octavo on a machine with an NVIDIA GPU: kernels, engine, then a short benchmark.
# scripts/gpu_check.sh [kernels] [engine] [bench] [-- options of benchmarks/gpu.py]; logs go to $OUT (default: out).
set -u
cd "$(dirname "$0")/.."
out=${OUT:-out}
mkdir -p "$out"
export PYTHONPATH="src:tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OCTAVO_LOGGING_LEVEL="${OCTAVO_LOGGING_LEVEL:-INFO}"
parts=
while [ $# -gt 0 ] && [ "$1" != -- ]; do parts="$parts $1"; shift; done
[ $# -gt 0 ] && shift
for part in ${parts:-kernels engine bench}; do
  echo "=== $part $(date +%T)"
  case $part in
    kernels) timeout 280 python3 -m pytest -x -q -p no:cacheprovider -n 8 tests/test_kernels.py > "$out/kernels.log" 2>&1 ;;
    engine)
      # The test of memory looks at the whole GPU, so it runs alone.
      timeout 100 python3 -m pytest -q -p no:cacheprovider --tb=short tests/test_cuda_engine.py -k "share or llama" > "$out/engine.log" 2>&1
      timeout 300 python3 -m pytest -q -p no:cacheprovider -n 6 --tb=short tests/test_cuda_engine.py -k "not share" >> "$out/engine.log" 2>&1 ;;
    bench) timeout 560 python3 benchmarks/gpu.py --json "$out/bench.json" "$@" > "$out/bench.log" 2>&1 ;;
    *) echo "unknown part $part"; exit 2 ;;
  esac
  echo "=== $part ended with $? $(date +%T)"
  tail -n 40 "$out/$part.log"
done
