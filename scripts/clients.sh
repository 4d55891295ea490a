#!/usr/bin/env bash
# Runs other people's clients, unmodified, against a real server with the real SmolLM2: each in an environment of its own.
# scripts/clients.sh [langchain] [litellm] [lm-eval] [guidellm] [aiperf]; docs/clients.md has what they proved.
# PYTHON runs the server (default python3), CLIENTS holds the environments (default .clients), TORCH is what guidellm gets.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
envs=${CLIENTS:-.clients}
torch=${TORCH:-torch==2.13.0}
model=smollm2
port=${PORT:-8137}
url=http://127.0.0.1:$port
mkdir -p "$envs/runs"
envs=$(cd "$envs" && pwd)
runs=$envs/runs
export LITELLM_LOCAL_MODEL_COST_MAP=True HF_HOME=$runs/hf DO_NOT_TRACK=1

install() { # NAME REQUIREMENT...: an environment, made once
  local name=$1
  shift
  test -e "$envs/$name/.done" && return
  echo "Installing $name ..."
  test -x "$envs/$name/bin/python" || "$python" -m venv "$envs/$name"
  "$envs/$name/bin/python" -m pip --disable-pip-version-check install --quiet "$@"
  touch "$envs/$name/.done"
}

langchain() {
  install langchain langchain-openai
  "$envs/langchain/bin/python" tests/clients/langchain_client.py "$url" $model
}

litellm() {
  install litellm litellm
  "$envs/litellm/bin/python" tests/clients/litellm_client.py "$url" $model
}

lm-eval() { # the tokenizer is the server's own: /tokenizer_info, /tokenize
  install lm-eval 'lm-eval[api]'
  rm -rf "$runs/lm-eval"
  "$envs/lm-eval/bin/python" tests/clients/lm_eval_client.py write "$runs/lm-eval"
  "$envs/lm-eval/bin/lm-eval" run --model local-completions \
    --model_args "model=$model,base_url=$url/v1/completions,num_concurrent=4,tokenizer_backend=remote" \
    --tasks octavo_choice,octavo_generate --include_path "$runs/lm-eval" --output_path "$runs/lm-eval/results"
  "$envs/lm-eval/bin/python" tests/clients/lm_eval_client.py check "$runs/lm-eval"
}

guidellm() { # needs torch; a CPU build unless TORCH says otherwise
  install guidellm "$torch" guidellm
  "$python" tests/clients/load_reports.py prompts "$runs/prompts.jsonl"
  "$envs/guidellm/bin/guidellm" run --backend "kind=openai_http,target=$url,model=$model" \
    --profile kind=concurrent,streams=4 --constraint kind=max_requests,count=16 \
    --data "kind=json_file,path=$runs/prompts.jsonl" --output "kind=json,path=$runs/guidellm.json" --disable-progress
  "$python" tests/clients/load_reports.py guidellm "$runs/guidellm.json"
}

aiperf() { # a tokenizer from disk, since the built-in one is fetched; the counts are the server's
  install aiperf aiperf
  rm -rf "$runs/aiperf" && mkdir -p "$runs/aiperf/tokenizer"
  PYTHONPATH=benchmarks "$python" -c "import sys, pathlib, synthetic_tokenizer as t; t.write(pathlib.Path(sys.argv[1]), 49152)" \
    "$runs/aiperf/tokenizer"
  "$envs/aiperf/bin/aiperf" profile --model $model --url "$url" --endpoint-type chat --streaming --ui none \
    --tokenizer "$runs/aiperf/tokenizer" --use-server-token-count --concurrency 4 --request-count 12 --isl 64 --osl 8 \
    --extra-inputs ignore_eos:true --artifact-dir "$runs/aiperf/out"
  "$python" tests/clients/load_reports.py aiperf "$runs/aiperf/out"
}

chosen=${*:-langchain litellm lm-eval guidellm aiperf}
"$python" -m octavo serve $model --host 127.0.0.1 --port "$port" --max-model-len 2048 --kv-cache-memory-bytes 512M \
  --data-dir "$runs/data" > "$runs/server.log" 2>&1 &
server=$!
trap 'kill $server 2> /dev/null; wait $server 2> /dev/null || true' EXIT
for _ in $(seq 600); do
  curl -sf "$url/health" > /dev/null && break
  kill -0 $server 2> /dev/null || { tail "$runs/server.log"; exit 1; }
  sleep 0.2
done

failed=
for client in $chosen; do
  echo "=== $client"
  if $client > "$runs/$client.log" 2>&1; then
    echo "ok"
  else
    failed="$failed $client"
    tail -n 15 "$runs/$client.log"
  fi
  grep -E '^(ok|FAILED|loglikelihood|guidellm|aiperf): ?|^loglikelihood' "$runs/$client.log" || true
done
curl -sf "$url/health" > /dev/null || { echo "the server did not survive"; tail "$runs/server.log"; exit 1; }
test -z "$failed" || { echo "failed:$failed"; exit 1; }
echo "All of these clients work: $chosen"
