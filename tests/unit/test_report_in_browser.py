"""The report in a real browser: nothing sticks out at the width of a desk or of a phone."""

import html
import json
import re
import shutil
import subprocess

import pytest

from pharos.report.page import build_report
from report_fixtures import small_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]
OPTIONS = ["--window-size=1600,1000", "--virtual-time-budget=5000", "--dump-dom"]
# The frame has the width; its document, with every detail opened, says how wide it really is.
FRAME = """<!doctype html><meta charset="utf-8"><body>
<iframe id="page" width="{width}" height="900" srcdoc="{page}"></iframe>
<script>
const frame = document.getElementById("page");
frame.onload = () => {{
  const root = frame.contentDocument.documentElement;
  frame.contentDocument.querySelectorAll("details").forEach((each) => {{ each.open = true; }});
  const measured = {{ width: root.clientWidth, content: root.scrollWidth }};
  document.body.textContent = "measured " + JSON.stringify(measured);
}};
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_does_not_scroll_sideways(tmp_path, width):
    page = build_report(**small_run(tmp_path / "results"), out_dir=tmp_path / "out", title="Pharos")
    # The page forbids scripts, and the frame would inherit that; measuring needs one.
    text = re.sub(r"<meta http-equiv=.Content-Security-Policy.[^>]*>", "", page.read_text())
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width, page=html.escape(text, quote=True)))
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *OPTIONS, frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
    )
    found = re.search(r"measured (\{.*?\})", html.unescape(done.stdout))
    assert found, done.stderr[-2000:]
    measured = json.loads(found[1])
    assert measured["width"] > width - 40
    assert measured["content"] <= measured["width"]
