"""The page in Chromium: no errors, the run's own numbers, and its tooltips. Skipped where there is none."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from graphpasses.html_report import ShownRun, render_page
from graphpasses.parity import compare_runs
from graphpasses.parity.run_file import Run
from graphpasses.simulate import predict
from tests.html_report.conftest import BIAS_FIRST, CLUSTER, PASSES, WriteRun, layout

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium and chromedriver")

# As root there is no sandbox; the rest keeps the browser off the network.
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1300,1000"
)
DARK = "--blink-settings=preferredColorScheme=0"
DIFFERS = {step: ["layers.0.up.bias", "layers.1.up.weight"] for step in (2, 3)}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Chrome]]:
    """Starts a browser, once for each choice of flags."""
    browsers: dict[tuple[str, ...], Chrome] = {}

    def start(*flags: str) -> Chrome:
        if flags not in browsers:
            options = webdriver.ChromeOptions()
            options.binary_location = CHROMIUM
            profile = tmp_path_factory.mktemp("profile")
            for flag in (*FLAGS.split(), *flags, f"--user-data-dir={profile}"):
                options.add_argument(flag)
            browsers[flags] = Chrome(options=options, service=Service(DRIVER))
        return browsers[flags]

    yield start
    for browser in browsers.values():
        browser.quit()


@pytest.fixture
def browser(start: Callable[..., Chrome]) -> Chrome:
    return start()


@pytest.fixture
def runs(write_run: WriteRun) -> list[Run]:
    return [
        write_run("eager", layout()),
        write_run("graph", layout(BIAS_FIRST), differs=DIFFERS, passes=PASSES),
        write_run("same", layout()),
    ]


def open_page(browser: Chrome, path: Path, *runs: Run) -> None:
    path.write_bytes(render_page([ShownRun(run, CLUSTER) for run in runs]))
    browser.get(path.as_uri())
    assert browser.get_log("browser") == []


def find(browser: Chrome, selector: str) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, selector)


def texts(browser: Chrome, selector: str) -> list[str]:
    """Texts of elements, also of those that are folded away."""
    found: list[str] = browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent.trim())", selector
    )
    return found


def cells_of(browser: Chrome, selector: str) -> list[list[str]]:
    """Texts of the cells of each row."""
    script = "return Array.from(document.querySelectorAll(arguments[0]), row => row.innerHTML)"
    rows: list[str] = browser.execute_script(script, f"{selector} tbody tr")
    return [re.findall(r"<td>\s*(.*?)\s*</td>", row) for row in rows]


AT_REST = """
const [element, done] = arguments;
element.scrollIntoView({block: "center"});
let before = "";
(function look() {
  const now = JSON.stringify(element.getBoundingClientRect());
  if (now === before) return done();
  before = now;
  requestAnimationFrame(() => requestAnimationFrame(look));
})();
"""


def hover(browser: Chrome, element: WebElement) -> str:
    browser.execute_async_script(AT_REST, element)  # a page of hundreds of drawings takes its time
    ActionChains(browser).move_to_element(element).perform()
    (tip,) = find(browser, "#tip")
    assert tip.is_displayed()
    return tip.text


def test_numbers_are_those_of_the_runs(browser: Chrome, runs: list[Run], tmp_path: Path) -> None:
    open_page(browser, tmp_path / "page.html", *runs)
    assert texts(browser, "#runs .steps") == [str(len(run.steps)) for run in runs]
    divergence = compare_runs(*runs[:2]).divergence
    assert divergence is not None
    assert texts(browser, "#B .divergence .step") == [str(divergence.step)]
    differing = [[fqn, "differs", "differs"] for fqn in divergence.gradients]
    assert cells_of(browser, "#B .differing") == differing
    cells = [cell.get_attribute("class") for cell in find(browser, "#strip-B i")]
    assert cells == ["equal", "equal", "differs", "differs"]
    assert {cell.get_attribute("class") for cell in find(browser, "#strip-C i")} == {"equal"}

    prediction = predict(runs[0].header.layouts, runs[1].header.layouts, CLUSTER)
    assert texts(browser, "#B .num-reordered") == [str(len(prediction.reordered))]
    assert texts(browser, "#B .num-buckets") == ["2"]
    numbers = {fqn: row for fqn, *row in cells_of(browser, "#B .numbers")}
    for side, run in ((1, runs[0]), (2, runs[1])):
        for bucket in run.header.layouts.buckets:
            for entry in bucket.entries:
                assert numbers[entry.fqn][0] == str(entry.padded_numel)
                assert numbers[entry.fqn][side].strip() == str(entry.offset)
    assert {fqn: int(row[3]) for fqn, row in numbers.items() if row[3] != "0"} == {
        each.fqn: each.num_elements for each in prediction.reordered
    }
    (report,) = PASSES.passes
    assert cells_of(browser, "#B .passes") == [
        [report.name, "bitwise", "2", "40 → 33", "7 → 3", f"{report.seconds:.4f}"]
    ]


def test_hovering_names_parameter_and_offset(browser: Chrome, runs: list[Run], tmp_path: Path) -> None:
    open_page(browser, tmp_path / "page.html", *runs)
    tip = hover(browser, find(browser, "#B .half.top .seg")[0])
    assert tip.splitlines()[0] == "layers.0.up.weight"
    assert tip.splitlines()[1] == "byte 0 of 6,478, 3,200 elements of each rank's part"
    assert "in the other run: byte 64 of 6,478" in tip
    tip = hover(browser, find(browser, "#B .half.bottom .seg")[0])  # 1 % wide, and on it what is reordered
    assert tip.splitlines()[:2] == ["layers.0.up.bias", "byte 0 of 6,478, 32 elements of each rank's part"]
    assert hover(browser, find(browser, "#B .half.top .ring-row i")[0]).endswith(": channel 0, ring 0")
    assert hover(browser, find(browser, "#strip-B i")[2]) == "step 2: 2 gradients and 2 weights differ"
    browser.execute_script("scrollTo(0, 0)")
    ActionChains(browser).move_to_element(find(browser, "h1")[0]).perform()
    assert not find(browser, "#tip")[0].is_displayed()


def test_bars_are_to_scale(browser: Chrome, runs: list[Run], tmp_path: Path) -> None:
    open_page(browser, tmp_path / "page.html", *runs)
    (bar, *_) = find(browser, "#B .half.top .bar")
    widths = [segment.rect["width"] / bar.rect["width"] for segment in bar.find_elements(By.CSS_SELECTOR, ".seg")]
    assert widths[0] == pytest.approx(3200 / 3239, abs=0.002)
    assert widths[1] == pytest.approx(32 / 3239, abs=0.002)
    joins = find(browser, "#B .group > .pair .joins polygon")
    assert [join.get_attribute("data-tip") for join in joins] == ["layers.0.up.weight", "layers.0.up.bias"]


def test_400_buckets(browser: Chrome, write_run: WriteRun, tmp_path: Path) -> None:
    """Equal layers are one drawing, so the page stays short; all are there when unfolded."""
    runs = [
        write_run(f"{num}", layout(order, num_layers=400)) for num, order in enumerate([BIAS_FIRST[::-1], BIAS_FIRST])
    ]
    open_page(browser, tmp_path / "page.html", *runs)
    assert len(find(browser, "#B .pair")) == 400
    assert browser.execute_script("return document.body.scrollHeight") < 2500
    (more,) = find(browser, "#B .group > details")
    assert more.text == "399 more that look the same: layers.1 … layers.399"
    browser.execute_script("arguments[0].open = true", more)
    assert hover(browser, find(browser, "#B .pair")[-1].find_element(By.CSS_SELECTOR, ".seg")).startswith(
        "layers.399."
    )


def test_light_and_dark(start: Callable[..., Chrome], runs: list[Run], tmp_path: Path) -> None:
    """Text stands out from what is behind it by WCAG's 4.5, in both."""
    contrast = """
        const channels = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
        const light = (color) => channels(color).map(c => c / 255)
          .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
          .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        const back = (each) => {
          while (each && getComputedStyle(each).backgroundColor === "rgba(0, 0, 0, 0)") each = each.parentElement;
          return light(getComputedStyle(each).backgroundColor);
        };
        return [...document.querySelectorAll("p, td, th, summary, .seg b, pre span, .side")].map(each => {
          const [low, high] = [light(getComputedStyle(each).color), back(each)].sort((a, b) => a - b);
          return [each.outerHTML.slice(0, 80), (high + 0.05) / (low + 0.05)];
        });
    """
    backs = []
    for browser in (start(), start(DARK)):
        open_page(browser, tmp_path / "page.html", *runs)
        backs.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
        found = browser.execute_script(contrast)
        assert len(found) > 50
        assert [each for each in found if each[1] < 4.5] == []
    assert backs == ["rgb(255, 255, 255)", "rgb(20, 23, 28)"]
