"""The page of a server in a browser."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dist.serve import app
from tests.helpers import needs
from tests.helpers.serving import Server, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


# What a person would do, and what is seen of it, told to the server by a name that it has not.
ACT = """<script>
const seen = {errors: []};
onerror = (m) => { seen.errors.push(String(m)); };
onunhandledrejection = (e) => { seen.errors.push(String(e.reason)); };
const until = async (holds) => { while (!holds()) await new Promise((r) => setTimeout(r, 20)); };
const turns_shown = () => [...document.querySelectorAll(".turn")].map((e) => e.textContent);
const say = async (text) => {
  $("text").value = text;
  const key = {key: "Enter", bubbles: true, cancelable: true};
  $("text").dispatchEvent(new KeyboardEvent("keydown", key));
  await until(() => running === null);
};
(async () => {
  seen.note = $("note").textContent;
  $("temperature").value = "0"; $("max_tokens").value = "5";
  await say("the <b>fox</b>");
  seen.first = turns_shown(); seen.how = document.querySelector(".how").textContent;
  seen.bold = document.querySelectorAll(".turn b, .turn img").length;
  await say("a dog"); seen.second = turns.length;
  for (const word of ["seven", "wizards"]) await say(word);
  seen.forgotten = $("said").lastElementChild.textContent; seen.kept = turns.length;
  $("max_tokens").value = "0"; await say("x"); seen.error = $("said").lastElementChild.textContent;
  seen.red = document.querySelectorAll(".error").length; seen.after = turns.length;
  $("anew").click(); seen.anew = [turns.length, turns_shown().length];
  $("max_tokens").value = "40"; $("temperature").value = "1"; $("text").value = "the";
  $("form").requestSubmit(); await until(() => running !== null);
  seen.button = $("send").textContent; $("form").requestSubmit();
  await until(() => running === null);
  seen.stopped = $("said").lastElementChild.textContent;
  seen.wide = document.documentElement.scrollWidth - innerWidth;
  seen.paper = getComputedStyle(document.body).backgroundColor;
  await fetch("/v1/models/seen:" + encodeURIComponent(JSON.stringify(seen)));
})();
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "dark"), [(1200, False), (500, True)], ids=["light", "dark and narrow"]
)
def test_the_page_works_in_a_browser(
    width: int, dark: bool, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chromium = needs.chromium()
    told: list[str] = []
    check, respond = app._check_name, app.HTMLResponse

    def note(served: app.Served, name: str) -> None:
        if name.startswith("seen:"):
            told.append(name.removeprefix("seen:"))
        check(served, name)

    def acted(page: str, headers: dict[str, str]) -> Any:
        return respond(page.replace("</html>", f"{ACT}</html>"), headers=headers)

    monkeypatch.setattr(app, "_check_name", note)
    monkeypatch.setattr(app, "HTMLResponse", acted)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}"]
    flags += ["--remote-debugging-port=0", f"--window-size={width},900"]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    browser = subprocess.Popen(
        [chromium, *flags, f"http://127.0.0.1:{server.port}/"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: bool(told))
    finally:
        browser.terminate()
        browser.wait()
    seen = json.loads(told[0])
    assert seen["errors"] == [] and seen["note"] == "sees 48 tokens"
    assert seen["first"][0] == "the <b>fox</b>" and len(seen["first"]) == 2 and seen["bold"] == 0
    (answer,) = server.chat("the <b>fox</b>", temperature=0, max_tokens=5)["choices"]
    assert seen["first"][1] == answer["message"]["content"]
    assert re.fullmatch(r"\d tokens, \d+ a second; (it wrote the end|the limit .*)", seen["how"])
    assert "earlier turns are forgotten" in seen["forgotten"] and seen["kept"] < 8
    assert "`int` >= 1" in seen["error"] and seen["red"] == 1 and seen["after"] == seen["kept"]
    assert seen["anew"] == [0, 0] and seen["button"] == "Stop"
    assert seen["stopped"] == "stopped" or "tokens, " in seen["stopped"]
    assert seen["wide"] <= 0 and (seen["paper"] == "rgb(20, 23, 28)") == dark
