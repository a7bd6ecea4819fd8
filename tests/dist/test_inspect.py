"""``myllm inspect``: what is traced is what the model computes, and the page shows it."""

import base64
import dataclasses
import html
import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from dist import cli
from dist.inspect.cli import facts, page_of
from dist.inspect.trace import Trace, trace
from dist.model import load_model
from reference import model, ops
from reference.config import Config
from reference.cross_entropy import nll
from reference.params import decoder_layout
from reference.presets import TINY
from reference.softmax import softmax
from reference.types import Array
from tests.helpers import needs
from tests.helpers.runs import prepare_texts, save_run_file, text
from tokenizer import Tokenizer, train_from_iterator

POST = dataclasses.replace(TINY, norm_placement="post", norm="layernorm", tied=False)
UNTIED = dataclasses.replace(TINY, tied=False, head_bias=True)


def weights(config: Config) -> dict[str, Array]:
    layout = decoder_layout(config)
    rng = np.random.default_rng(0)
    master = layout.init(0) + 0.05 * rng.normal(size=layout.size).astype(np.float32)
    return layout.views(master)


def an_text(config: Config, n: int = 11) -> Array:
    return np.random.default_rng(1).permutation(config.vocab_size)[:n].astype(np.int32)


@pytest.mark.parametrize("config", [TINY, POST, UNTIED], ids=["pre", "post", "untied"])
def test_the_trace_is_what_the_model_computes(config: Config) -> None:
    params, ids = weights(config), an_text(config)
    found = trace(params, config, ids, 4)
    z = model.logits(ops, params, config, ids[None])[0, :-1].astype(np.float64)
    p = softmax(z)
    at = np.arange(len(ids) - 1)
    np.testing.assert_allclose(found.loss, nll(z, ids[1:]), rtol=1e-5)
    np.testing.assert_allclose(found.true_p[-1], p[at, ids[1:]], rtol=1e-5)
    np.testing.assert_array_equal(found.best[-1], np.argsort(-z, axis=1, kind="stable")[:, :4])
    np.testing.assert_array_equal(found.rank, np.sum(z > z[at, ids[1:], None], axis=1))
    L, T = config.n_layers, len(ids)
    assert found.attention.shape == (L, config.n_heads, T, T)
    np.testing.assert_allclose(found.attention.sum(-1), 1, rtol=1e-5)
    assert not np.triu(found.attention, 1).any()
    assert found.x_norm.shape == found.dx_norm.shape == (L + 1, T)
    table = params["embedding.weight"]
    np.testing.assert_allclose(found.x_norm[0], np.linalg.norm(table[ids], axis=1), rtol=1e-5)


def test_the_gradient_that_arrives_is_that_of_the_embedding() -> None:
    """Each id occurs once and the head is another table: a row's gradient is that of its token."""
    params, ids = weights(UNTIED), an_text(UNTIED)
    found = trace(params, UNTIED, ids, 3)
    layout = decoder_layout(UNTIED)
    grads = layout.views(np.zeros(layout.size, np.float32))
    _, cache = model.loss_forward(ops, params, UNTIED, ids[None, :-1], ids[None, 1:])
    model.loss_backward(1.0, cache, grads)
    rows = np.linalg.norm(grads["embedding.weight"][ids], axis=1)
    np.testing.assert_allclose(found.dx_norm[0, :-1], rows[:-1], rtol=1e-4)
    assert found.dx_norm[:, -1].max() == 0  # nothing is predicted from the last token


def test_the_lens_reads_a_layer_as_if_the_model_ended_there() -> None:
    params, ids = weights(TINY), an_text(TINY)
    found = trace(params, TINY, ids, 3)
    shorter = dataclasses.replace(TINY, n_layers=1)
    kept = {n: w for n, w in params.items() if not n.startswith("layers.") or "layers.0." in n}
    z = model.logits(ops, kept, shorter, ids[None])[0, :-1]
    np.testing.assert_array_equal(found.best[1], np.argsort(-z, axis=1, kind="stable")[:, :3])


# ---- the page ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a model that reads text."""
    folder = tmp_path_factory.mktemp("run")
    changes = {"train__steps": 4, "model__n_layers": 2}
    config = prepare_texts(folder, **changes)
    assert cli.main(["train", str(save_run_file(config, folder / "run.toml"))]) == 0
    return folder / "run"


def data_of(page: str) -> dict[str, Any]:
    (content,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(content)


def inspected(run: Path, folder: Path, given: str) -> str:
    out = folder / "page.html"
    assert cli.main(["inspect", str(run), "--text", given, "-o", str(out)]) == 0
    return out.read_text(encoding="utf-8")


NASTY = '</script><!-- & "\n\tÜ🙂 __DATA__'


def test_the_page_holds_the_trace_and_nothing_from_elsewhere(run: Path, tmp_path: Path) -> None:
    page = inspected(run, tmp_path, NASTY)
    assert not re.search(r"https?://|src=|href=|@import|url\(", page)
    data = data_of(page)
    found = load_model(str(run), "reference")
    assert found.tokenizer is not None
    tokenizer = Tokenizer.load(found.tokenizer)
    ids = np.array(tokenizer.encode_ordinary(NASTY))
    assert data["ids"] == ids.tolist()
    assert tokenizer.decode(data["ids"]) == NASTY
    traced = trace(found.params, found.config, ids.astype(np.int32), 5)
    # the page has three digits: half a unit of the last is 5e-3 of the number at most
    np.testing.assert_allclose(data["loss"], traced.loss, rtol=5e-3)
    np.testing.assert_allclose(data["dx_norm"], traced.dx_norm, rtol=1e-3)
    assert data["best"] == traced.best.tolist()
    size = len(NASTY.encode()) - len(tokenizer.token_bytes(int(ids[0])))
    assert data["figures"] == (
        f"{len(ids)} tokens; of the {len(ids) - 1} behind the first, which nothing predicts: mean "
        f"loss {traced.loss.mean():.3f} nats, "
        f"{traced.loss.sum() / np.log(2) / size:.3f} bits per byte"
    )
    levels = np.frombuffer(base64.b64decode(data["attention"][1][0]), np.uint8)
    sent = np.zeros((len(ids), len(ids)))
    sent[np.tril_indices(len(ids))] = (levels / 255) ** 2
    np.testing.assert_allclose(sent, traced.attention[1, 0], atol=0.005)
    assert set(map(str, {*data["ids"], *traced.best.flat})) == set(data["names"])


def test_no_token_ends_the_script_that_holds_the_data() -> None:
    names = {"0": "</script><!--", "1": "<script>", "2": "__DATA__", "3": "\u2028&amp;"}
    page = page_of({"names": names})
    assert data_of(page) == {"names": names}
    assert page.count("<!--") == page_of({}).count("<!--")


def test_the_text_may_come_from_standard_input(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the quick brown fox")))
    assert data_of(inspected(run, tmp_path, "-"))["loss"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("x", "the text has 1 token; it must have from 2 to 48"),
        ("", "the text has 0 tokens"),
        ("fox " * 200, "tokens; it must have from 2 to 48, the context of the model"),
    ],
)
def test_a_text_that_does_not_fit_is_said(
    given: str, says: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    assert cli.main(["inspect", str(run), "--text", given, "-o", str(out)]) == 1
    assert says in capsys.readouterr().err and not out.exists()


def test_a_context_of_one_token_is_said() -> None:
    config = dataclasses.replace(TINY, context_length=1)
    with pytest.raises(ValueError, match="the model's context is one token, and of a text's first"):
        trace(weights(config), config, an_text(config, 1), 4)


class Stand(NamedTuple):
    """As much of a model as the page names."""

    path: Path
    config: Config


def test_a_page_takes_the_place_of_a_page_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, page = tmp_path / "run.toml", tmp_path / "page.html"
    other.write_text("[model]\n")
    assert cli.main(["inspect", str(run), "--text", "fox fox", "-o", str(other)]) == 1
    assert "is a file of another kind, and would be lost" in capsys.readouterr().err
    assert other.read_text() == "[model]\n"
    for _ in range(2):
        assert cli.main(["inspect", str(run), "--text", "fox fox", "-o", str(page)]) == 0


def test_a_page_of_four_layers_and_256_tokens_is_small() -> None:
    config = dataclasses.replace(
        TINY, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=4096, context_length=256
    )
    tokenizer = train_from_iterator([text(i) for i in range(50)], 320)
    ids = np.random.default_rng(0).integers(0, 4096, 256).astype(np.int32)
    found: Trace = trace(weights(config), config, ids, 5)
    model: Any = Stand(Path("x"), config)
    assert len(json.dumps(facts(model, found, tokenizer, ids))) < 2_500_000


# ---- in a browser --------------------------------------------------------------------------------

# What a person would do, and what is seen of it, written where the test finds it.
ACT = """<script>
const seen = {errors: window.__errors};
const key = (k) => $("tokens").dispatchEvent(new KeyboardEvent("keydown", {key: k, bubbles: true}));
const move = (target, fx, fy) => { const b = target.getBoundingClientRect(); target.dispatchEvent(
  new PointerEvent("pointermove", {bubbles: true, clientX: b.left + fx * b.width,
  clientY: b.top + fy * b.height})); return $("tip").textContent; };
seen.text = spans.map((s) => s.textContent).join("");
seen.first = at;
key("Home"); seen.home = $("said").textContent;
key("ArrowRight"); seen.right = [at, document.querySelectorAll(".tokens .on").length];
key("End"); seen.end = at;
seen.rows = [$("best").rows.length, $("layers").rows.length];
seen.token_tip = move(spans[2], .5, .5);
seen.map_tip = move($("big"), .01, .99);
seen.later_tip = move($("big"), .99, .01);
buttons[1].click();
seen.chosen = [layer, head, $("where").textContent];
document.querySelector("input[value=attention]").click(); seen.mode = mode;
seen.weights = D.ids.map((_, k) => prob(layer, head, T - 1, k)).reduce((a, b) => a + b);
seen.ink = [...new Set($("big").getContext("2d").getImageData(0, 0, T, T).data)].length;
seen.charts = document.querySelectorAll("svg polyline").length;
seen.wide = document.documentElement.scrollWidth - innerWidth;
seen.width = innerWidth;
seen.paper = getComputedStyle(document.body).backgroundColor;
document.body.style.width = "360px"; document.body.style.margin = "0";
seen.narrow = Math.max(...[...document.body.querySelectorAll(":not(.scroll *):not(#tip)")].map(
  (e) => e.getBoundingClientRect().right));
const result = make("pre", JSON.stringify(seen)); result.id = "seen"; document.body.append(result);
</script>"""
CATCH = "<script>window.__errors = []; onerror = (m) => { __errors.push(String(m)); };</script>"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "dark"), [(1200, False), (1200, True), (500, False)], ids=["light", "dark", "phone"]
)
def test_the_page_works_in_a_browser(width: int, dark: bool, run: Path, tmp_path: Path) -> None:
    chromium = needs.chromium()
    given = "the quick brown fox </script> jumps\n\tover &amp; the lazy dog"
    page = inspected(run, tmp_path, given)
    page = page.replace("<title>", f"{CATCH}<title>", 1).replace("</html>", f"{ACT}</html>")
    (tmp_path / "acted.html").write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={width},1500"]
    if dark:
        flags.append("--blink-settings=preferredColorScheme=0")
    done = subprocess.run(
        [chromium, *flags, "--dump-dom", (tmp_path / "acted.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (found,) = re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    seen = json.loads(html.unescape(found))
    data = data_of(page)
    T, L = len(data["ids"]), data["layers"]
    assert seen["errors"] == []
    assert seen["text"].replace("⏎\n", "\n").replace("⇥\t", "\t") == given
    assert seen["first"] == 1 + int(np.argmax(data["loss"]))
    assert "is the first token" in seen["home"]
    assert seen["right"] == [1, 1] and seen["end"] == T - 1
    assert seen["rows"] == [5, L + 2]
    assert "loss" in seen["token_tip"] and "position 2" in seen["token_tip"]
    assert "query" in seen["map_tip"] and f"({T - 1})" in seen["map_tip"]
    assert "comes later" in seen["later_tip"]
    assert seen["chosen"][:2] == [0, 1] and "attends most to" in seen["chosen"][2]
    assert seen["mode"] == "attention" and abs(seen["weights"] - 1) < 0.05
    assert seen["ink"] > 10 and seen["charts"] == 4
    assert seen["wide"] <= 0 and seen["width"] <= width
    assert 300 < seen["narrow"] <= 360
    assert (seen["paper"] == "rgb(20, 23, 28)") == dark
