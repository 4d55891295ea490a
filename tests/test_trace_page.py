"""The page of a trace in headless Chromium: ten thousand steps, and the block tables that the trace has."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_device import request
from octavo.core.blocks import BlockPool
from octavo.core.scheduler import Scheduler
from octavo.core.step import Step, StepResult
from octavo.engine.loop import Loop
from octavo.observe.trace import Recording, TraceFile, read
from octavo.trace.command import html
from octavo.trace.life import History, fold

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")

NUM_STEPS = 10_000
HOSTILE = "</script><img src=x onerror=alert(1)>"


class Device:
    """Says anything, at once."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def launch(self, step: Step) -> None:
        self.step = step

    def sample(self, masks: object = None) -> Any:
        tokens = [[self.rng.randrange(500)] if chunk.samples else [] for chunk in self.step.chunks]
        return lambda: StepResult(tokens)

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A busy server: shared beginnings, chunks, a pool that is too small."""
    path, rng = tmp_path_factory.mktemp("trace") / "run.trace", random.Random(1)
    scheduler = Scheduler(BlockPool(200, 16), 16, 128, 1024)
    loop = Loop(scheduler, Device(rng), 1)
    recording = Recording(TraceFile(str(path)), scheduler, 1, "tiny")
    stems = [[rng.randrange(500) for _ in range(100)] for _ in range(3)]
    count = 0
    for _ in range(NUM_STEPS):
        if rng.random() < 0.06 or not scheduler.has_work:
            prompt = rng.choice([*stems, []]) + [rng.randrange(500) for _ in range(rng.randint(5, 200))]
            name = HOSTILE if count == 7 else f"chat-{count}"
            scheduler.add(request(name, prompt, rng.randint(20, 300), ignore_eos=True))
            count += 1
        loop.step()
    recording.close()
    return path


@pytest.fixture(scope="module")
def history(trace_file: Path) -> History:
    return fold(read(trace_file))


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, trace_file: Path, tmp_path: Path) -> Iterator[Any]:
    """The page, loaded. It must not complain, and must not ask anybody for anything."""
    target = tmp_path / "page.html"
    html(trace_file, output=target)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1200, "height": 800}, color_scheme=request.param)
        page = context.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append("a dialog"))
        asked: list[str] = []
        page.on("request", lambda one: asked.append(one.url))
        page.goto(target.as_uri())
        page.wait_for_selector(".cell")
        yield page
        browser.close()
        assert complaints == []
        assert [url for url in asked if not url.startswith("data:")] == [target.as_uri()]


def move(page: Any, step: int) -> None:
    """As the slider does it; what is drawn is there when the next frame is."""
    page.evaluate(
        "step => { const s = document.getElementById('step'); s.value = step; s.dispatchEvent(new Event('input'));"
        " return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))); }",
        step,
    )


def table(page: Any) -> list[tuple[int, int]]:
    cells = page.eval_on_selector_all(".cell", "cells => cells.map(c => [c.dataset.block, c.dataset.filled])")
    return [(int(block), int(filled)) for block, filled in cells]


def pixels(page: Any, canvas: str) -> int:
    """Different colours on a canvas."""
    script = """id => { const c = document.getElementById(id);
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height);
        return new Set(new Uint32Array(d.data.buffer)).size; }"""
    return int(page.evaluate(script, canvas))


def test_the_block_table_is_the_trace_s(page: Any, history: History) -> None:
    assert len(history.steps) > 0.95 * NUM_STEPS
    rng, size, held = random.Random(2), history.settings.block_size, 0
    preempted = [life for life in history.lives if life.num_preemptions]
    assert len(preempted) > 10
    for life in [*rng.sample(history.lives, 10), *rng.sample(preempted, 5)]:
        page.select_option("#request", str(life.arrival.number))
        steps = [step for stay in life.stays for step in (stay.first, stay.ends[-1][0], stay.end) if step >= 0]
        for step in rng.sample(steps, min(3, len(steps))):
            step = min(step, len(history.steps) - 1)
            move(page, step)
            stay = next((stay for stay in life.stays if stay.holds(step)), None)
            expected = []
            if stay is not None:
                done = stay.computed(step)
                expected = [(b, min(max(done - i * size, 0), size)) for i, b in enumerate(stay.table(step))]
                held += 1
            assert table(page) == expected, f"{life.id} at step {step}"
            assert page.text_content("#now").startswith(f"step {step} of {len(history.steps) - 1} ")
    assert held > 15


def test_everything_is_reached_by_keys_and_clicks(page: Any, history: History) -> None:
    assert page.text_content("#summary").startswith(f"tiny: {len(history.lives)} requests, {len(history.steps)} steps")
    assert pixels(page, "grid") > 50 and pixels(page, "timeline") > 5
    page.focus("#lines")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    move_done = "() => document.getElementById('now').textContent.startsWith('step 11 ')"
    page.wait_for_function(move_done)
    assert page.input_value("#request") == "1"
    page.keyboard.press("Alt+ArrowRight")
    changes = {s for stay in history.lives[1].stays for s in (stay.first, stay.end, *(at for at, _ in stay.blocks))}
    expected = min(step for step in changes if step > 11)
    page.wait_for_function(f"() => document.getElementById('now').textContent.startsWith('step {expected} ')")
    page.keyboard.press("End")
    page.wait_for_function("() => document.getElementById('now').textContent.startsWith('step 9')")
    for _ in range(4):
        page.keyboard.press("+")
    page.wait_for_function("() => document.getElementById('axis-from').textContent > 'step 9'")
    page.keyboard.press("0")
    page.wait_for_function("() => document.getElementById('axis-from').textContent === 'step 0'")
    box = page.locator("#grid-cursor").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_function("() => document.getElementById('tip').textContent.startsWith('block')")
    assert 0.45 < int(page.input_value("#step")) / len(history.steps) < 0.55


def test_an_id_stays_text(page: Any, history: History) -> None:
    assert history.lives[7].id == HOSTILE
    page.select_option("#request", "7")
    assert page.query_selector("img") is None
    assert page.text_content("#request option:checked") == f"7: {HOSTILE}"
