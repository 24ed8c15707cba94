"""Reports in Chromium: nothing is cut at the width of a phone, and text can be read in both colour schemes."""

import html
import json
import re
import shutil
import subprocess

import matplotlib.image
import numpy as np
import pytest

from spec_trainer.measure.evaluation.evaluation_page import evaluation_page
from spec_trainer.report.page import write_report
from spec_trainer.run.directory import RunDirectory

from .full_run import full_summary, records

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]
WIDTHS = (400, 1280)
SCHEMES = {"dark": 0, "light": 1}
LEAST_CONTRAST = 4.5
"""Ratio of luminances that WCAG 2.1 asks of text (level AA)."""
MEASURE = """
const luminance = rgb => {
  const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  return 0.2126 * r + 0.7152 * g + 0.0722 * b
}
const numbers = colour => (colour.match(/[\\d.]+/g) || []).map(Number)
const visible = colour => numbers(colour).length == 3 || numbers(colour)[3] > 0
const behind = node => {
  for (let at = node; at; at = at.parentElement) {
    const colour = at.ownerDocument.defaultView.getComputedStyle(at).backgroundColor
    if (visible(colour)) return numbers(colour).slice(0, 3)
  }
  return [255, 255, 255]
}
const measure = frame => {
  const page = frame.contentDocument, style = node => frame.contentWindow.getComputedStyle(node)
  const contrasts = {}
  for (const node of page.body.querySelectorAll('*')) {
    if (![...node.childNodes].some(child => child.nodeType == 3 && child.textContent.trim())) continue
    const inSvg = node.namespaceURI.endsWith('svg')
    if (['STYLE', 'style', 'title'].includes(node.tagName) || node.closest('metadata')) continue
    const ink = numbers(inSvg ? style(node).fill : style(node).color).slice(0, 3)
    const [light, dark] = [luminance(ink), luminance(behind(node))].sort((a, b) => b - a)
    const name = node.tagName + (node.className && !inSvg ? '.' + node.className : '')
    contrasts[name] = Math.min(contrasts[name] || 99, (light + 0.05) / (dark + 0.05))
  }
  const wide = [...page.body.querySelectorAll('*')].filter(node => {
    const scrolls = node.parentElement.closest('table, pre, .wide, svg')
    return !scrolls && node.getBoundingClientRect().right > frame.contentWindow.innerWidth + 1
  }).map(node => node.tagName)
  return {width: frame.contentWindow.innerWidth, scrolls: page.documentElement.scrollWidth, wide, contrasts}
}
addEventListener('load', () => {
  const found = [...document.querySelectorAll('iframe')].map(measure)
  document.getElementById('found').textContent = JSON.stringify(found)
})
"""


def chromium(folder, scheme: int, *arguments: str) -> str:
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
        f"--user-data-dir={folder / f'profile-{scheme}'}", f"--blink-settings=preferredColorScheme={scheme}",
        *arguments,
    ]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def frames(page: str) -> str:
    """A page that shows another in a frame of each width, and measures it."""
    inside = html.escape(page, quote=True)
    shown = "".join(f'<iframe width={width} height=600 srcdoc="{inside}"></iframe>' for width in WIDTHS)
    return f"<!doctype html><meta charset=utf-8>{shown}<pre id=found></pre><script>{MEASURE}</script>"


def load(concurrency: int) -> dict:
    times = {"mean": 8.0, "p50": 7.0, "p99": 20.0}
    side = {"tokens_per_s": 900.0, "tokens_per_s_per_user": 90.0}
    side |= {"time_to_first_token_ms": times, "inter_token_latency_ms": times}
    return {"concurrency": concurrency, "speedup": 1.5, "with_draft": side, "without_draft": side}


EVALUATION = {
    "draft": "runs/mine/draft", "target": "models/" + "a-long-name-" * 12, "engine": "vllm", "seed": 0, "inputs": {},
    "engine_versions": {"vllm": "0.32.0"}, "num_draft_tokens": 2, "temperature": 1.0, "acceptance_length": 2.5,
    "acceptance_length_per_request": 2.4, "speedup": 1.5, "tokens_per_s": 900.0, "generated_tokens": 5000,
    "outputs_equal": True, "warnings": ["a pass took 0.20 s, too short for its speed to count"], "benchmarks": {},
    "acceptance_per_position": [0.8, 0.5], "throughput": [load(1), load(8)], "break_even_concurrency": 20.0,
    "sweep": None,
}  # fmt: skip


def of_a_run(folder) -> str:
    (folder / "config.yaml").write_text(f"target: {'a-long-name-' * 12}\n")
    directory = RunDirectory(folder)
    records(directory)
    tokens = [{"text": f"word{place}", "place": place, "refused": "no\n"} for place in range(7)]
    shown = {"texts": [{"prompt": "p" * 200, "tokens": tokens}], "warnings": ["few tokens"], "seed": 3}
    write_report(directory, "A run", full_summary() | shown | {"serve": {"vllm": "vllm serve " + "x" * 200}})
    return directory.report.read_text()


@pytest.fixture(params=["run", "evaluation"])
def page(request, tmp_path) -> str:
    return of_a_run(tmp_path) if request.param == "run" else evaluation_page(EVALUATION)


def test_a_report_fits_narrow_and_wide_windows_and_can_be_read_in_both_schemes(page, tmp_path):
    (tmp_path / "frames.html").write_text(frames(page))
    (tmp_path / "page.html").write_text(page)
    brightness = {}
    for name, scheme in SCHEMES.items():
        dumped = chromium(tmp_path, scheme, "--dump-dom", f"file://{tmp_path}/frames.html")
        found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dumped, re.DOTALL)[1]))
        assert [one["width"] for one in found] == list(WIDTHS)
        for one in found:
            assert one["scrolls"] <= one["width"], (name, one["wide"])
            assert one["wide"] == []
            faint = {tag: ratio for tag, ratio in one["contrasts"].items() if ratio < LEAST_CONTRAST}
            assert faint == {}, name
            assert len(one["contrasts"]) > 5
        picture = tmp_path / f"{name}.png"
        chromium(
            tmp_path,
            scheme,
            f"--screenshot={picture}",
            "--window-size=800,600",
            f"file://{tmp_path}/page.html",
        )
        brightness[name] = np.median(matplotlib.image.imread(picture)[..., :3])
    assert brightness["dark"] < 0.2 < 0.8 < brightness["light"]
