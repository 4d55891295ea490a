"""The HTML report opens offline without a word, shows the figures of the JSON, and nothing in them becomes markup."""

import html
import itertools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from octavo import cli
from octavo.bench import charts, report, report_figures, report_tables, results
from octavo.bench.client import Answer
from octavo.bench.echo import EchoServer, even
from octavo.bench.measures import percentile, summary
from octavo.bench.serve import details
from octavo.errors import InvalidConfig

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application")

PARTS = (("device", 0.9), ("sampling", 0.05), ("plan", 0.03), ("not attributed", 0.02))


def kind(seconds: float, limit: float) -> dict[str, Any]:
    return {
        "steps": 10,
        "tokens": 100,
        "seconds": seconds,
        "bytes": 2e9,
        "flops": 8e9,
        "limit_seconds": limit,
        "limited_by": "bandwidth",
        "achieved_share": limit / seconds,
        "bytes_per_second": 2e9 / seconds,
        "flops_per_second": 8e9 / seconds,
        "parts": [{"name": name, "share": share, "ms": 1e2 * seconds * share} for name, share in PARTS],
    }


ROOFLINE = {
    "machine": {"name": "A machine", "dtype": "bfloat16", "measured_at": "2026-01-01 00:00:00"},
    "bandwidth": 2e10,
    "flops": 1e12,
    "kinds": {"prefill": kind(0.5, 0.1), "decode": kind(0.2, 0.15)},
    "total": kind(0.7, 0.25),
    "parts_from": "timers in every step",
}


def serving(**changes: Any) -> dict[str, Any]:
    """A result of known requests: number i is sent at i / 10 s, its first token comes after 100 + i ms."""
    answers = [Answer(number=i, sent=i / 10, prompt_tokens=8, output_tokens=5) for i in range(40)]
    for i, answer in enumerate(answers):
        first = answer.sent + 0.1 + i / 1000
        answer.times = [first + 0.02 * gap for gap in range(5)]
        answer.end = answer.times[-1]
    found = summary(answers, {}, [50, 90, 99]) | details(answers)
    found |= {"endpoint_type": "openai", "model_id": "tiny", "date": "20260101-000000", "request_rate": "10"}
    return found | {"configuration": {"load": {"max_concurrency": 8}}} | results.environment() | changes


def batch() -> dict[str, Any]:
    rows = [
        {"batch_size": size, "output_throughput": 50.5 * size, "mean_ttft_ms": 10.0 * size, "mean_tpot_ms": 2.0 + size}
        for size in (1, 2, 4)
    ]
    return {"kind": "batch", "model_id": "tiny", "rows": rows, "roofline": ROOFLINE} | results.environment()


RESULTS = {
    "serve": serving(),
    "batch": batch(),
    "startup": {"kind": "startup", "rows": [{"phase": "load", "seconds": 1.5}, {"phase": "warm", "seconds": 0.25}]},
    "compare": {
        "kind": "compare",
        "rows": [{"metric": "median_ttft_ms", "a": 10.0, "b": 9.0, "ratio": 0.9, "low": 0.85, "high": 0.96}],
    },
    "latency": {"avg_latency": 1.25, "p50_ttft_ms": 10.0, "p99_ttft_ms": 20.5, "mean_ttft_ms": 11.5, "n": 1},
    "nothing": {},
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a report from its file, without a network; it must ask for nothing and complain about nothing."""
    said: list[str] = []
    asked: list[str] = []
    context = browser.new_context(viewport={"width": 1200, "height": 800}, offline=True)

    def open_page(*found: dict[str, Any], scheme: str = "light") -> Any:
        report.write(tmp_path / "r.html", *found)
        page = context.new_page()
        page.emulate_media(color_scheme=scheme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "r.html").as_uri())
        return page

    yield open_page
    context.close()
    assert said == []
    assert set(asked) <= {(tmp_path / "r.html").as_uri()}


def cell(page: Any, key: str) -> str:
    return str(page.locator(f'td[data-key="{key}"]').first.text_content())


@in_browser
@pytest.mark.parametrize("name", RESULTS)
def test_every_kind_opens(opened: Any, name: str) -> None:
    found = RESULTS[name]
    page = opened(found)
    shown = {"nothing": "result"}.get(name, name)
    assert page.text_content("h1").startswith(f"octavo bench {shown}")
    assert page.locator("figure").count() == page.locator("figure svg").count()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for key, value in found.items():
        if isinstance(value, float) and page.locator(f'td[data-key="{key}"]').count():
            assert cell(page, key) == f"{value:,.2f}", key


@in_browser
def test_the_figures_are_those_of_the_json(opened: Any) -> None:
    found = RESULTS["serve"]
    page = opened(found)
    for metric in ("ttft", "tpot", "itl", "e2el", "client_queue_time"):
        for part in ("mean", "median", "std", "p50", "p90", "p99"):
            key = f"{part}_{metric}_ms"
            value = found[key]
            assert cell(page, key) == f"{value:,.2f}", key
    assert cell(page, "completed") == "40" and cell(page, "total_output_tokens") == "200"
    assert page.text_content('.tile[data-key="output_throughput"] b') == f"{found['output_throughput']:,.2f}"
    assert page.text_content('[data-key="load.max_concurrency"]') == "8"
    assert cell(page, "torch") == found["versions"]["torch"] and cell(page, "processor") == found["processor"]
    titles = page.locator("figcaption").all_text_contents()
    assert titles == ["Requests over time", "Percentiles", "Time between tokens", "Time to first token"]
    timeline = page.locator("figure >> nth=0")
    assert timeline.locator("rect title").count() == 2 * 40
    told = timeline.locator("rect title").first.text_content()
    assert told == "sent at 0.000 s, first token after 100.0 ms, 5 tokens in 0.180 s"
    counts = [int(text.rsplit(": ")[1]) for text in page.locator("figure >> nth=2 >> rect title").all_text_contents()]
    assert sum(counts) == 40 * 4  # gaps of five tokens each
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@in_browser
def test_rows_and_roofline(opened: Any) -> None:
    page = opened(RESULTS["batch"])
    rows = page.locator("table.rows tbody tr")
    assert [row.split("\t") for row in rows.all_inner_texts()] == [
        ["1", "50.50", "10.00", "3.00"],
        ["2", "101.00", "20.00", "4.00"],
        ["4", "202.00", "40.00", "6.00"],
    ]
    titles = page.locator("figcaption").all_text_contents()
    assert "Throughput against time to first token, by requests in a batch" in titles
    assert titles[-2:] == ["How far from the limit", "Where a step went"]
    text = page.inner_text("body")
    assert "Reached of the limit\t20.0%\t75.0%" in text and "host: plan" in text
    stacked = page.locator("figure >> nth=-1").locator("rect title").all_text_contents()
    assert "decode, device: 90.0%" in stacked and "prefill, host: plan: 3.0%" in stacked


@in_browser
def test_light_dark_and_paper(opened: Any) -> None:
    page = opened(RESULTS["serve"], scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark", media="print")
    assert (dark, light, page.evaluate(ground)) == ("rgb(20, 23, 27)", "rgb(255, 255, 255)", "rgb(255, 255, 255)")


@in_browser
def test_several_results_side_by_side(opened: Any) -> None:
    other = serving(output_throughput=77.25, label="second", configuration={"load": {"max_concurrency": 16}})
    page = opened(RESULTS["serve"], other)
    assert page.text_content("h1") == "octavo bench: 2 results" and page.locator("article").count() == 2
    cells = page.locator('section >> nth=0 >> td[data-key="output_throughput"]').all_text_contents()
    assert cells == [f"{RESULTS['serve']['output_throughput']:,.2f}", "77.25"]
    assert page.locator('td[data-key="load.max_concurrency"]').all_text_contents() == ["8", "16"]


@in_browser
def test_nothing_becomes_markup(opened: Any) -> None:
    hostile = "</title><script>document.title='x'</script><img src=http://example.com/x onerror=alert(1)>"
    found = serving(model_id=hostile, label=hostile, command=hostile, errors={hostile: 2})
    found["rows"] = [{hostile: hostile, "output_throughput": 1.0}, {hostile: hostile, "output_throughput": 2.0}]
    found["configuration"] = {hostile: hostile}
    page = opened(found)
    assert page.locator("script, img").count() == 0 and page.title() == f"octavo bench serve: {hostile}"
    assert hostile in page.text_content(".warning")


@in_browser
@pytest.mark.parametrize("command", ["latency", "throughput", "serve"])
def test_a_command_writes_its_page(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """The page of a run has the figures of the JSON of that run, roofline included where it was in this process."""
    to = ["--output-html", str(tmp_path / "r.html")]
    if command == "serve":
        to += ["--result-filename", str(tmp_path / "r.json"), "--self-check", "off", "--clients", "1"]
        with EchoServer(even(0.02, 0.01, 4)) as server:
            found = run_bench(monkeypatch, "serve", "--port", str(server.port), "--num-prompts", "3", *to)
    else:
        folder = tiny_models.save(tiny_models.oracle(), tmp_path)
        tiny = ["--dtype=float32", "--max-model-len=256", "--kv-cache-memory-bytes=16M", "--num-threads=1"]
        size = ["--num-prompts", "4", "--input-len", "9", "--output-len", "5", "--skip-tokenizer-init", "--device=cpu"]
        found = run_bench(
            monkeypatch, command, str(folder), *tiny, *size, "--output-json", str(tmp_path / "r.json"), *to
        )
    page = browser.new_page()
    page.goto((tmp_path / "r.html").as_uri())
    titles = page.locator("figcaption").all_text_contents()
    assert titles[:4] == ["Requests over time", "Percentiles", "Time between tokens", "Time to first token"]
    keys = {"latency": "mean_ttft_ms", "throughput": "output_tokens_per_second", "serve": "request_throughput"}
    assert cell(page, keys[command]) == f"{found[keys[command]]:,.2f}"
    assert cell(page, "command") == found["command"] and found["command"].startswith(f"octavo bench {command} ")
    if command != "serve":
        assert titles[-2:] == ["How far from the limit", "Where a step went"]
        reached = [f"{kind['achieved_share']:.1%}" for kind in found["roofline"]["kinds"].values()]
        assert "\t".join(["Reached of the limit", *reached]) in page.inner_text("body")
    page.close()


@in_browser
def test_pages_of_tables(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real tables by batch size, and their comparison: cells and marks are those of the JSON."""
    folder = tiny_models.save(tiny_models.oracle(), tmp_path)
    flags = ["--dtype=float32", "--max-model-len=256", "--kv-cache-memory-bytes=16M", "--num-threads=1", "--device=cpu"]
    flags += ["--skip-tokenizer-init", "--batch-sizes", "1,2", "--output-len", "4", "--num-iters", "2"]
    a, b, c = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    page = browser.new_page()
    for path in (a, b):
        to = ["--output-json", str(path), "--output-html", str(path.with_suffix(".html"))]
        found = run_bench(monkeypatch, "batch", str(folder), *flags, *to)
        page.goto(path.with_suffix(".html").as_uri())
        for key in ("output_throughput", "mean_prefill_ms", "mean_detokenization_ms", "cold_batch_seconds"):
            cells = page.locator(f'table.rows td[data-key="{key}"]').all_text_contents()
            assert cells == [report_tables.shown(row[key]) for row in found["rows"]], key
        titles = page.locator("figcaption").all_text_contents()
        assert "Output tokens/s by requests in a batch" in titles and "How far from the limit" in titles
    to = ["--output-json", str(c), "--output-html", str(c.with_suffix(".html"))]
    found = run_bench(monkeypatch, "compare", str(a), str(b), *to)
    page.goto(c.with_suffix(".html").as_uri())
    told = page.locator("figure >> nth=0 >> title").all_text_contents()
    shown = {text.split(": ")[0]: text.split(": ")[1].split(" (")[0] for text in told if ": " in text}
    assert len(found["rows"]) == 10  # five figures of each batch size
    for row in found["rows"]:
        assert shown[report_tables.label_of(row["metric"])] == f"{row['ratio']:.3f}"
    page.close()


def run_bench(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """The JSON that a command wrote."""
    monkeypatch.setattr(sys, "argv", ["octavo", "bench", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    place = next(word for before, word in itertools.pairwise(words) if before in ("--output-json", "--result-filename"))
    return report.read(Path(place))[0]


def test_the_page_is_one_file() -> None:
    for name, found in RESULTS.items():
        text = report.page([found])
        assert not re.search(r"<script|<link|@import|url\(|src=|http-equiv=.refresh", text), name
        assert not [link for link in re.findall(r"https?://[^\s\"'<]+", text) if "w3.org" not in link], name


def test_a_command_line_keeps_secrets() -> None:
    words = ["x", "bench", "serve", "--api-key", "s3cret", "--header=a=s3cret", "--seed", "3", "--label", "a b"]
    assert results.command_line(words) == "octavo bench serve --api-key ... --header=... --seed 3 --label 'a b'"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results.write_json(tmp_path / "a.json", RESULTS["batch"])
    for _ in range(2):
        results.write_json(tmp_path / "b.jsonl", RESULTS["latency"], append=True)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")

    def run(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["octavo", "bench", "report", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code

    assert not run(str(tmp_path / "a.json"), str(tmp_path / "b.jsonl"), "-o", str(tmp_path / "out" / "r.html"))
    assert "3 results" in capsys.readouterr().out
    assert "octavo bench: 3 results" in (tmp_path / "out" / "r.html").read_text()
    assert "No result is given" in str(run())
    assert "is no JSON" in str(run(str(tmp_path / "bad.json")))
    assert "holds no result" in str(run(str(tmp_path / "list.json")))
    assert "cannot be read" in str(run(str(tmp_path / "none.json")))


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [1e-9, 5.0], [float(n) for n in range(5000)], [3.0] * 100])
def test_a_histogram_counts_every_value(values: list[float]) -> None:
    svg = charts.histogram(values, "ms", "gaps")
    counts = [int(found.replace(",", "")) for found in re.findall(r": ([\d,]+)</title>", svg)]
    beyond = re.search(r">([\d,]+) more beyond", svg)
    assert sum(counts) + (int(beyond[1].replace(",", "")) if beyond else 0) == len(values)


def test_axes_hold_their_values() -> None:
    for values in ([0.0], [1e-6, 3e-6], [7.0], [1234567.0], [0.1, 0.30000000000000004]):
        axis = charts.axis("x", values, 0, 100)
        assert axis.high >= max(values) and len(axis.ticks) < 15 and axis.ticks[-1] == pytest.approx(axis.high)
        if min(values) > 0:
            logarithmic = charts.axis("x", values, 0, 100, log=True)
            assert all(-1e-6 <= logarithmic.at(value) <= 100 + 1e-6 for value in values)


def test_percentiles_from_requests_are_those_of_the_table() -> None:
    raw = report_figures.raw_of(RESULTS["serve"])
    for name in ("ttft", "tpot", "e2el", "itl"):
        assert percentile(raw[name], 90) == pytest.approx(RESULTS["serve"][f"p90_{name}_ms"]), name


def test_a_failed_request_is_in_no_figure() -> None:
    found = serving()
    found["ttfts"][3] = found["latencies"][3] = None
    raw = report_figures.raw_of(found)
    assert len(raw["rows"]) == 39 and len(raw["itl"]) == 39 * 4


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="cannot be written"):
        report.write(tmp_path / "file" / "r.html", RESULTS["latency"])


def test_json_and_page_agree_about_infinity() -> None:
    text = report.page([json.loads(json.dumps(results.plain({"kind": "serve", "request_rate": float("inf")})))])
    assert ">inf<" in html.unescape(text)
