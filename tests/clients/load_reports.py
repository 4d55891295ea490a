"""Prompts for guidellm, and what guidellm's and aiperf's reports must say: `python load_reports.py KIND PATH`."""

import json
import sys
from pathlib import Path

REQUESTS = {"guidellm": 16, "aiperf": 12}


def prompts(path: Path) -> None:
    rows = [{"prompt": f"Write a sentence about the number {i}.", "output_tokens_count": 16} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def guidellm(path: Path) -> None:
    (run,) = json.loads(path.read_text())["benchmarks"]
    metrics = run["metrics"]
    requests = metrics["request_totals"]
    good = [request["output_tokens"] for request in run["requests"]["successful"]]
    print(f"guidellm: {requests['successful']} requests, {requests['errored']} errors, {sum(good)} tokens")
    if (requests["successful"], requests["errored"]) != (REQUESTS["guidellm"], 0) or set(good) != {16}:
        sys.exit("FAILED: every request has 16 tokens and none fails")


def aiperf(folder: Path) -> None:
    report = json.loads((folder / "profile_export_aiperf.json").read_text())
    count, errors = report["request_count"]["avg"], report["request_error_rate"]["avg"]
    length, first = report["output_sequence_length"], report["time_to_first_token"]["avg"]
    print(f"aiperf: {count:.0f} requests, {errors:.0f} % errors, {length['avg']:.0f} tokens each, TTFT {first:.0f} ms")
    if count != REQUESTS["aiperf"] or errors or length["min"] != 8 or length["max"] != 8:
        sys.exit("FAILED: every request has 8 tokens and none fails")
    metrics = json.loads((folder / "server_metrics_export.json").read_text())
    found = sum(1 for name in metrics.get("metrics", {}) if name.startswith(("octavo:", "vllm:")))
    print(f"aiperf: read {found} metrics of the server")
    if not found:
        sys.exit("FAILED: it reads /metrics")


if __name__ == "__main__":
    {"prompts": prompts, "guidellm": guidellm, "aiperf": aiperf}[sys.argv[1]](Path(sys.argv[2]))
