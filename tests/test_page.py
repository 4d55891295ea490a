"""The web page in headless Chromium, against a server with scripted answers; and what it is served with."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import page_server
from page_server import HOSTILE, Script

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGE = Path(page_server.page.__file__).with_name("page")
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with page_server.serve(script) as address:
        yield address


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page, loaded. It must not complain, and must not ask anybody else for anything."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()
    page.set_default_timeout(5000)
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.complaints = complaints
    yield page
    context.close()
    # A refused request is reported by the browser itself; whatever else is said is a fault.
    assert [text for text in complaints if "the server responded with a status" not in text] == []
    assert [url for url in asked if not url.startswith(address)] == []


def say(page: Any, text: str = "Why?") -> None:
    page.wait_for_selector("#model:enabled")
    page.fill("#message", text)
    page.keyboard.press("Enter")


def answer_text(page: Any) -> str:
    page.wait_for_selector(".assistant .note:not(:empty)")
    return str(page.text_content(".assistant .text"))


@in_browser
def test_a_chat_streams(page: Any, script: Script) -> None:
    assert page.evaluate("document.activeElement.id") == "message"
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.7")
    page.fill("#top_k", "40")
    page.fill("#message", "Why")
    page.press("#message", "Shift+Enter")
    page.type("#message", "so?")
    page.press("#message", "Enter")
    assert answer_text(page) == "The sky is blue."
    assert "5 tokens" in page.text_content(".note")
    assert "ended by itself" in page.text_content(".note")
    assert page.input_value("#message") == ""
    say(page, "And then?")
    page.wait_for_selector(".assistant >> nth=1 >> .note:not(:empty)")
    first, second = script.asked
    assert first["model"] == "tiny"
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why\nso?"}]
    assert (first["temperature"], first["top_k"], first["stream"]) == (0.7, 40, True)
    assert not {"top_p", "min_p", "max_tokens", "seed", "logprobs", "stop"} & set(first)
    assert [m["content"] for m in second["messages"]] == ["Be brief.", "Why\nso?", "The sky is blue.", "And then?"]
    page.click("#chat-clear")
    assert page.query_selector(".message") is None


@in_browser
def test_models_and_retry(page: Any, script: Script) -> None:
    page.wait_for_selector("#model:enabled")
    page.select_option("#model", "tiny-alias")
    say(page)
    answer_text(page)
    page.click("#chat-again")
    page.wait_for_selector(".assistant .note:not(:empty)")
    assert page.locator(".assistant").count() == 1
    assert [body["model"] for body in script.asked] == ["tiny-alias"] * 2
    assert script.asked[0]["messages"] == script.asked[1]["messages"]


@in_browser
@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping(page: Any, script: Script, how: str) -> None:
    script.tokens, script.delay = ["word "] * 500, 0.02
    say(page)
    page.wait_for_selector(".assistant .text:has-text('word word word')")
    if how == "button":
        page.click("#chat-stop")
    else:
        page.keyboard.press("Escape")
    page.wait_for_selector(".note:has-text('stopped by you')")
    assert page.is_visible("#chat-send")
    for _ in range(100):
        if script.left_early:
            break
        page.wait_for_timeout(20)
    assert script.left_early == 1  # the server noticed


@in_browser
@pytest.mark.parametrize("view", ["chat", "completion"])
def test_token_probabilities(page: Any, script: Script, view: str) -> None:
    page.wait_for_selector("#model:enabled")
    page.click(f"#tab-{view}")
    page.check("#probabilities")
    if view == "chat":
        say(page)
    else:
        page.fill("#prompt", "Once")
        page.click("#completion-send")
    page.wait_for_selector(f"#view-{view} .note:not(:empty)")
    tokens = page.locator(f"#view-{view} .token")
    assert tokens.all_text_contents() == script.tokens
    assert "level-3" in tokens.nth(0).get_attribute("class")
    assert "level-0" in tokens.nth(1).get_attribute("class")
    tokens.nth(1).hover()
    assert re.sub(r"\s+", " ", page.inner_text("#tip")).strip() == "·sky 95.1 % ·other 8.21 %"
    page.mouse.move(2, 2)
    assert page.is_hidden("#tip")
    page.focus(f"#view-{view} .text[tabindex]")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "·is" in page.inner_text("#tip")
    (body,) = script.asked
    assert body["logprobs"] == (True if view == "chat" else 5)


@in_browser
def test_a_completion_can_be_continued(page: Any, script: Script) -> None:
    page.wait_for_selector("#model:enabled")
    page.click("#tab-completion")
    page.fill("#prompt", "Once:")
    page.click("details summary")
    page.fill("#stop", "END\n\n###")
    page.fill("#seed", "7")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector("#output .note:not(:empty)")
    page.click("#completion-append")
    assert page.input_value("#prompt") == "Once:The sky is blue."
    (body,) = script.asked
    assert (body["prompt"], body["stop"], body["seed"], body["max_tokens"]) == ("Once:", ["END", "###"], 7, 256)


@in_browser
@pytest.mark.parametrize("probabilities", [False, True])
def test_markup_in_an_answer_stays_text(page: Any, script: Script, probabilities: bool) -> None:
    script.tokens = [HOSTILE, "</div>", "&amp;", " \u202eend"]
    if probabilities:
        page.check("#probabilities")
    say(page, HOSTILE)
    assert answer_text(page) == "".join(script.tokens)
    assert page.text_content(".user .text") == HOSTILE
    assert page.query_selector("#log img, #log script") is None
    assert page.title() == "Octavo"


@in_browser
def test_errors_are_readable(page: Any, script: Script) -> None:
    error = {"message": "This model's maximum context length is 128 tokens.", "param": "max_tokens", "code": 400}
    script.refuses = 400, error, {}
    say(page)
    page.wait_for_selector(".banner")
    assert page.text_content(".assistant .banner") == f"max_tokens: {error['message']}"
    page.click("#chat-clear")
    script.refuses = 503, {"message": "The queue is full.", "param": None, "code": 503}, {"retry-after": "3"}
    say(page)
    page.wait_for_selector(".assistant .banner")
    assert page.text_content(".assistant .banner") == "The queue is full. Try again in 3 s."
    page.click("#chat-clear")
    script.refuses, script.fails_after = None, 2
    say(page)
    assert answer_text(page) == "The sky"  # what came is kept
    assert page.text_content(".assistant .banner") == "The engine stopped: out of memory."
    page.click("#chat-clear")
    script.fails_after, script.tokens = None, ["fine"]
    say(page)
    assert answer_text(page) == "fine"


@in_browser
def test_a_value_out_of_range_is_not_sent(page: Any, script: Script) -> None:
    page.fill("#temperature", "3")
    say(page)
    page.wait_for_timeout(200)
    assert script.asked == []
    assert page.evaluate("document.activeElement.id") == "temperature"
    page.click("#sampling-reset")
    assert page.input_value("#temperature") == ""
    page.press("#message", "Enter")
    assert answer_text(page) == "The sky is blue."


@in_browser
def test_an_api_key(browser: Any, script: Script, address: str) -> None:
    script.key = "secret"
    page = browser.new_page()
    page.set_default_timeout(5000)
    page.goto(address)
    page.wait_for_selector("#pulse:has-text('API key needed')")
    assert page.is_disabled("#model")
    page.fill("#key", "secret")
    page.press("#key", "Tab")
    say(page)
    assert answer_text(page) == "The sky is blue."
    page.reload()  # the tab keeps it, a new one does not
    page.wait_for_selector("#model:enabled")
    assert page.evaluate("localStorage.length") == 0
    page.context.close()


@in_browser
def test_the_live_view(page: Any, script: Script) -> None:
    page.click("#tab-engine")
    page.wait_for_selector("#pulse[data-state=live]")
    tiles = {t.get_attribute("aria-label"): t.text_content() for t in page.query_selector_all(".tile")}
    assert tiles["Running"] == "Running4of 256 places"
    assert tiles["KV cache"] == "KV cache38 %750 of 2,000 blocks"
    assert tiles["Prefix hits"].startswith("Prefix hits62 %")
    assert tiles["Generated"] == "Generated1,235tokens/s"
    rows = [row.inner_text().split("\t") for row in page.query_selector_all("#latency tr")]
    assert rows[0] == ["First token", "18 ms", "41 ms", "1.3 s"]
    assert ["Queue", "–", "–", "–"] in rows
    assert "123,456" in page.text_content("#totals")
    script.snapshot["running"] = 9
    page.wait_for_selector(".tile .number:text-is('9')")
    assert page.get_attribute(".tile .line", "d").count("L") >= 1
    assert "#engine" in page.url


@in_browser
def test_the_keyboard_is_enough(page: Any) -> None:
    """Every control is reached by Tab, in the order of the page, is named and shows its focus."""
    page.wait_for_selector("#model:enabled")
    page.focus(".skip")
    seen: list[Any] = []
    for _ in range(40):
        if seen:
            page.keyboard.press("Tab")
        at = page.evaluate(
            "() => { const e = document.activeElement, s = getComputedStyle(e);"
            " return [e.id || e.className || e.tagName, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0] }"
        )
        if at[0] in ("BODY", "HTML") or at in seen:
            break
        seen.append(at)
    names = [name for name, _ in seen]
    assert names[:5] == ["skip", "tab-chat", "model", "key", "log"]
    for control in ("message", "chat-send", "system", "temperature", "top_p", "top_k", "min_p", "max_tokens"):
        assert control in names, names
    assert all(shown for _, shown in seen), seen
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#view-completion") and page.is_hidden("#view-chat")
    unnamed = page.evaluate(
        "() => [...document.querySelectorAll('input,select,textarea,button')].filter(e => !e.ariaHidden &&"
        " !(e.labels?.length || e.textContent.trim() || e.ariaLabel)).map(e => e.id)"
    )
    assert unnamed == []


@in_browser
@pytest.mark.parametrize("width", [360, 768, 1024])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_and_both_schemes(browser: Any, address: str, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 740}, color_scheme=scheme)
    page = context.new_page()
    page.goto(address)
    for view in ("engine", "completion", "chat"):
        page.click(f"#tab-{view}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
    if width < 820:
        assert page.is_hidden("#temperature")
        page.click("#view-chat [data-opens-settings]")
        assert page.is_visible("#temperature")
    ratio = page.evaluate(
        """() => {
          const light = (css) => css.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
          const ground = light(getComputedStyle(document.body).backgroundColor);
          return ['body', '.hint p', '#sampling-label'].map((one) => {
            const ink = light(getComputedStyle(document.querySelector(one)).color);
            return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
          });
        }"""
    )
    assert min(ratio) >= 4.5  # WCAG AA
    context.close()


def test_files_and_headers() -> None:
    client = TestClient(page_server.build(Script()))
    for path in ["/", *(f"/page/{file.name}" for file in PAGE.iterdir() if file.suffix != ".html")]:
        found = client.get(path)
        assert found.status_code == 200, path
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"
    assert client.get("/page/app.js").headers["content-type"].startswith("text/javascript")
    for name in ("../page.py", "..%2fpage.py", "%2e%2e/page.py", "nothing.js", "page.py"):
        assert client.get(f"/page/{name}").status_code == 404, name


def test_nothing_comes_from_elsewhere_and_nothing_writes_markup() -> None:
    for file in PAGE.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), file.name
    index = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*src=)", index)
    for name in re.findall(r'(?:src|href)="page/([^"]+)"', index):
        assert (PAGE / name).is_file(), name


@in_browser
def test_thoughts_are_folded_and_calls_are_answered(page: Any, script: Script) -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    script.tokens = ["Let me look."]
    script.deltas = [
        {"reasoning": HOSTILE, "reasoning_content": HOSTILE},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
        {"tool_calls": [{**call, "index": 1, "id": "call_2"}]},
        {"tool_call_errors": [{"index": 1, "reason": "it ends too early"}]},
    ]
    tools = '[{"type": "function", "function": {"name": "weather"}}]'
    page.click("text=Tools and JSON schema")
    page.fill("#tools", tools)
    page.fill("#schema", '{"type": "object"}')
    say(page)
    assert answer_text(page) == "Let me look."
    assert not page.is_visible(".thought")
    page.click("text=Thought")
    assert page.text_content(".thought") == HOSTILE
    assert page.text_content(".call") == 'weather{"city": "Paris"}'
    assert page.locator(".call").count() == 1
    assert "it ends too early" in page.text_content(".calls")
    assert "calls a tool" in page.text_content(".note")
    page.fill(".results input", "Sunny.")
    page.click("text=Give results")
    page.wait_for_selector(".assistant >> nth=1 >> .note:not(:empty)")
    first, second = script.asked
    assert first["tools"][0]["function"]["name"] == "weather"
    assert (first["tool_choice"], first["response_format"]["json_schema"]["schema"]) == ("auto", {"type": "object"})
    assert second["messages"][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert second["messages"][2] == {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."}


@in_browser
def test_a_box_without_json_is_refused_before_it_is_sent(page: Any, script: Script) -> None:
    page.click("text=Tools and JSON schema")
    for box, wrong in (("#tools", "{}"), ("#tools", "["), ("#schema", "[]"), ("#schema", "null")):
        page.fill(box, wrong)
        say(page)
        assert page.evaluate(f"document.querySelector('{box}').validity.customError")
        page.fill(box, "")
    assert script.asked == []
