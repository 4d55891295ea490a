"""`octavo bench latency`: a batch of equal requests, again and again; time to first token, per token, end to end."""

import math
from contextlib import nullcontext
from pathlib import Path

from octavo.bench import offline, report, results, roofline
from octavo.bench.measures import percentile, spread
from octavo.bench.workload import Workload, items
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.errors import InvalidConfig
from octavo.flags import ENGINE, with_options

PERCENTS = (10, 25, 50, 75, 90, 99)


@with_options(positional="model", config=ENGINE)
def latency(
    *,
    input_len: int = 32,
    output_len: int = 128,
    batch_size: int = 8,
    n: int = 1,
    num_iters_warmup: int = 10,
    num_iters: int = 30,
    num_prompts: int | None = None,
    disable_detokenize: bool = False,
    output_json: Path | None = None,
    output_html: Path | None = None,
    config: EngineConfig,
) -> None:
    """Time to first token, time per output token and latency of a batch, in this process.

    Every iteration has fresh random prompts, so that nothing comes from the prefix cache; the end of sequence is
    ignored. TTFT is from giving the batch to a request's first token, TPOT is (latency - TTFT) / (tokens - 1) of a
    request, and the latency printed is that of the whole batch.

    Parameters
    ----------
    input_len
        Tokens of a prompt.
    output_len
        Tokens of an answer.
    batch_size
        Requests at once.
    n
        Samples of each request.
    num_iters_warmup
        Batches before those that count.
    num_iters
        Batches that count.
    num_prompts
        Number of requests that count, in place of --num-iters; whole batches are run.
    disable_detokenize
        Leave tokens as ids.
    output_json
        File for the result.
    output_html
        File for the result as one page with figures, which needs no network and no other file.
    """
    for name, value in (("input_len", input_len), ("output_len", output_len), ("batch_size", batch_size), ("n", n)):
        if value < 1:
            raise InvalidConfig(f"{name}={value} is not allowed: it must be from 1.")
    if num_prompts is not None:
        num_iters = math.ceil(num_prompts / batch_size)
    if num_iters < 1 or num_iters_warmup < 0:
        raise InvalidConfig(f"num_iters={num_iters} and num_iters_warmup={num_iters_warmup} leave nothing to measure.")
    total = num_iters_warmup + num_iters
    with Engine(config) as engine:
        work = Workload(
            num_prompts=batch_size * total, input_len=input_len, output_len=output_len, seed=config.model.seed
        )
        found = items(work, offline.LOWEST_ID, offline.highest_id(engine), lambda text: 0)
        batches = []
        watching = roofline.Roofline(engine)

        def run(place: int) -> offline.Batch:
            part = found[place * batch_size : (place + 1) * batch_size]
            return offline.run(engine, part, detokenize=not disable_detokenize, n=n)

        def again() -> None:
            engine.reset_prefix_cache()
            run(0)

        with results.progress(total, "Batches") as bar:
            for place in range(total):
                with watching if place >= num_iters_warmup else nullcontext():
                    batches.append(run(place))
                bar.update(1)
        settings = offline.configuration(engine)
        limits = watching.result(again)
    measured = batches[num_iters_warmup:]
    latencies = [batch.seconds for batch in measured]
    timings = [timing for batch in measured for timing in batch.timings]
    result = {
        "avg_latency": sum(latencies) / len(latencies),
        "latencies": latencies,
        "percentiles": {str(percent): percentile(latencies, percent) for percent in PERCENTS},
        "warmup_latencies": [batch.seconds for batch in batches[:num_iters_warmup]],
        "input_len": input_len,
        "output_len": output_len,
        "batch_size": batch_size,
        "n": n,
        "total_output_tokens": sum(batch.output_tokens for batch in measured),
        "output_throughput": sum(batch.output_tokens for batch in measured) / sum(latencies),
        **spread("ttft", [timing.first for timing in timings], PERCENTS),
        **spread("tpot", [timing.tpot for timing in timings if n == 1 and timing.output_tokens > 1], PERCENTS),
        **spread("e2el", [timing.end for timing in timings], PERCENTS),
        "date": results.now(),
        "model_id": config.model.model,
        "prefix_cache": "fresh prompts in every iteration: nothing is found in it",
        "configuration": settings,
        "roofline": limits,
        **results.environment(),
    }
    print(f"Avg latency: {result['avg_latency']} seconds")
    for percent, value in result["percentiles"].items():
        print(f"{percent}% percentile latency: {value} seconds")
    for name in ("ttft", "tpot", "e2el") if n == 1 else ("ttft", "e2el"):
        values = [result[f"{kind}_{name}_ms"] for kind in ("mean", "p50", "p90", "p99", "std")]
        mean, middle, high, highest, deviation = values
        print(
            f"{name.upper():<5} mean {mean:.3f} ms, p50 {middle:.3f}, p90 {high:.3f}, p99 {highest:.3f}, "
            f"std {deviation:.3f}"
        )
    print(f"Output throughput: {result['output_throughput']:.2f} tokens/s")
    roofline.show(limits)
    requests = offline.requests(measured)
    if output_json:
        results.write_json(output_json, result | {"requests": offline.without_gaps(requests)})
    if output_html:
        report.write(output_html, result | {"requests": requests})
