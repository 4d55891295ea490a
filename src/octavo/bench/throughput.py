"""`octavo bench throughput`: many requests given at once to an engine in this process."""

from dataclasses import asdict
from pathlib import Path

from octavo.bench import offline, report, results, roofline
from octavo.bench.serve import WORKLOAD
from octavo.bench.workload import Workload, items
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.errors import InvalidConfig
from octavo.flags import ENGINE, with_options

AGAIN = 64  # requests of the profile that a GPU's roofline needs


@with_options(positional="model", config=ENGINE, work=WORKLOAD)
def throughput(
    *,
    n: int = 1,
    num_warmups: int = 0,
    disable_detokenize: bool = False,
    output_json: Path | None = None,
    output_html: Path | None = None,
    config: EngineConfig,
    work: Workload,
) -> None:
    """Requests and tokens per second of many prompts, all given at once, in this process.

    The prefix cache is empty at the start; the end of sequence is ignored. Tokens are counted, not assumed.

    Parameters
    ----------
    n
        Samples of each request.
    num_warmups
        Requests before the run that count in nothing; they have prompts of their own.
    disable_detokenize
        Leave tokens as ids.
    output_json
        File for the result.
    output_html
        File for the result as one page with figures, which needs no network and no other file.
    """
    if n < 1 or num_warmups < 0:
        raise InvalidConfig(f"n={n} and num_warmups={num_warmups} are not allowed: from 1, and from 0.")
    with Engine(config) as engine:

        def count(text: str) -> int:
            return len(engine.tokenizer.encode(text, add_special_tokens=False)) if engine.tokenizer else len(text) // 4

        top = offline.highest_id(engine)
        found = items(work, offline.LOWEST_ID, top, count)
        if num_warmups:
            other = Workload(**asdict(work) | {"seed": work.seed + 0x5EED, "num_prompts": num_warmups})
            offline.run(engine, items(other, offline.LOWEST_ID, top, count), n=n)
            engine.reset_prefix_cache()
        watching = roofline.Roofline(engine)

        def again() -> None:
            engine.reset_prefix_cache()
            offline.run(engine, found[:AGAIN], detokenize=not disable_detokenize, n=n)

        with results.progress(len(found), "Requests") as bar, watching:
            batch = offline.run(engine, found, detokenize=not disable_detokenize, n=n, bar=bar)
        settings = offline.configuration(engine)
        limits = watching.result(again)
    seconds = batch.tokenization + batch.seconds
    total = batch.prompt_tokens + batch.output_tokens
    print(
        f"Throughput: {len(found) / seconds:.2f} requests/s, {total / seconds:.2f} total tokens/s, "
        f"{batch.output_tokens / seconds:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens: {batch.prompt_tokens}")
    print(f"Total num output tokens: {batch.output_tokens}")
    roofline.show(limits)
    result = {
        "elapsed_time": seconds,
        "tokenization_time": batch.tokenization,
        "num_requests": len(found),
        "total_num_tokens": total,
        "total_prompt_tokens": batch.prompt_tokens,
        "total_output_tokens": batch.output_tokens,
        "requests_per_second": len(found) / seconds,
        "tokens_per_second": total / seconds,
        "output_tokens_per_second": batch.output_tokens / seconds,
        "input_lens": [timing.prompt_tokens for timing in batch.timings],
        "output_lens": [timing.output_tokens for timing in batch.timings],
        "date": results.now(),
        "model_id": config.model.model,
        "prefix_cache": "empty at the start",
        "configuration": settings | {"workload": asdict(work)},
        "roofline": limits,
        **results.environment(),
    }
    requests = offline.requests([batch])
    if output_json:
        results.write_json(output_json, result | {"requests": offline.without_gaps(requests)})
    if output_html:
        report.write(output_html, result | {"requests": requests})
