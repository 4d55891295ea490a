#!/bin/sh
# Measures `octavo serve` on one NVIDIA GPU: random weights in the shapes of two models, 256 tokens in, 128 out.
# scripts/gpu_serve.sh [MODEL:CONCURRENCY,CONCURRENCY...]... [-- flags of octavo serve]; results go to $OUT (default: out).
# APIS is the number of API processes (default 8), PROMPTS is ids or text (default ids).
set -u
cd "$(dirname "$0")/.."
out=${OUT:-out}
mkdir -p "$out"
export PYTHONPATH="src:benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
vocabulary=49152
parts=
while [ $# -gt 0 ] && [ "$1" != -- ]; do parts="$parts $1"; shift; done
[ $# -gt 0 ] && shift
port=8123
for part in ${parts:-qwen2.5-1.5b:1,16,64,256 llama-3.1-8b:1,64,256}; do
  model=${part%%:*}
  folder=$(mktemp -d)
  python3 benchmarks/shapes.py "$model" "$folder" $vocabulary
  begin=$(date +%s)
  python3 -m octavo serve "$folder" --load-format dummy --served-model-name "$model" --host 127.0.0.1 --port $port \
    --api-server-count "${APIS:-8}" --max-model-len 4096 "$@" > "$out/$model.server.log" 2>&1 &
  server=$!
  for concurrency in $(echo "${part#*:}" | tr , ' '); do
    case $concurrency in 1) count=16 ;; *) count=$((concurrency * 6)) ;; esac
    echo "=== $model, concurrency $concurrency ($(($(date +%s) - begin)) s after the start)"
    timeout 150 python3 -m octavo bench serve --port $port --random-input-len 256 --random-output-len 128 \
      --vocab-size $vocabulary --prompts "${PROMPTS:-ids}" --max-concurrency "$concurrency" --num-prompts "$count" \
      --num-warmups "$concurrency" --label "$model" --json "$out/serve.jsonl" --ready-check-timeout-sec 120 --self-check warn
    kill -0 $server 2> /dev/null || break
  done
  kill $server 2> /dev/null
  wait $server
  echo "=== $model: the server ended with $? after $(($(date +%s) - begin)) s"
  tail -n 15 "$out/$model.server.log"
  rm -rf "$folder"
  port=$((port + 1))
done
