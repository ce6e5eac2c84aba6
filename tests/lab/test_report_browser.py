"""The page in a real browser. Chromium is looked for; LASTLAYER_CHROMIUM names another one."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from made_runs import NASTY, make

from lastlayer.lab.report import write_report

pytest.importorskip("altair")
pytest.importorskip("vl_convert")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="the browser test needs playwright: pip install playwright"
)

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)
PHONE, DESKTOP = (400, 800), (1300, 800)


def _chromium() -> str | None:
    named = os.environ.get("LASTLAYER_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser():
    path = _chromium()
    with playwright.sync_playwright() as started:
        if path is None and not Path(started.chromium.executable_path).exists():
            pytest.skip(
                "no Chromium: install Debian's package chromium, run `playwright install "
                "chromium`, or set LASTLAYER_CHROMIUM"
            )
        # Chromium has no sandbox for root.
        flags = [*FLAGS, *(["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else [])]
        running = started.chromium.launch(executable_path=path, args=flags)
        yield running
        running.close()


@pytest.fixture(scope="module")
def address(nasty_report):
    return (nasty_report / "report.html").as_uri()


class Watched:
    """A page, and all that it said and asked for."""

    def __init__(self, browser, address, size=DESKTOP, **options):
        width, height = size
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, accept_downloads=True, **options
        )
        self.page = self.context.new_page()
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        self.wait()

    def wait(self):
        """Until every chart is drawn."""
        self.page.wait_for_function(
            "[...document.querySelectorAll('.chart')].every(c => c.dataset.ready === 'true')"
        )

    def chart(self, key):
        return self.page.locator(f"#{key} .chart")

    def text_of(self, key):
        return self.chart(key).locator("svg").text_content()


@pytest.fixture(scope="module")
def opened(browser, address):
    """One page for the tests that leave it as it was."""
    watched = Watched(browser, address)
    yield watched
    # Whatever the tests did, nothing went wrong and nothing was fetched.
    assert watched.said == []
    assert [url for url in watched.asked if not url.startswith(("blob:", "data:"))] == [address]
    watched.context.close()


def test_it_opens_without_errors_or_requests(opened, address):
    assert opened.said == []
    assert opened.asked == [address]
    assert opened.page.locator(".chart svg").count() == 8
    for chart in opened.page.locator(".chart").all():
        assert chart.locator("path, line").count() > 10
        assert chart.get_attribute("aria-label")


def test_nothing_of_the_data_is_run(opened):
    page = opened.page
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None
    assert NASTY in page.locator(".about").text_content()
    assert page.locator("#cards .token", has_text="</script>").count() == 8


def test_a_script_that_is_not_the_page_s_own_does_not_run(opened):
    opened.page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        " document.body.append(s); s.remove(); }"
    )
    assert opened.page.evaluate("window.hacked") is None
    # The browser told of the violation, as it should.
    assert "Content Security Policy" in opened.said.pop()


def test_selectors_change_the_charts(opened):
    page = opened.page
    for key, label, view, title in (
        ("tradeoff", "peak memory", "peak_memory_mb", "peak memory (MB)"),
        ("curves", "over time", "seconds", "seconds of training"),
        ("deciles", "top-1 accuracy", "top1", "top-1 accuracy"),
    ):
        before = opened.text_of(key)
        page.locator(f"#{key} .views label", has_text=label).first.click()
        page.wait_for_selector(f"#{key} .chart[data-view='{view}']")
        assert title in opened.text_of(key)
        assert opened.text_of(key) != before
        page.locator(f"#{key} .views label").first.click()
        page.wait_for_function(
            "([key, view]) => document.querySelector(`#${key} .chart`).dataset.view !== view",
            arg=[key, view],
        )
        assert opened.text_of(key) == before


def test_selectors_work_by_keyboard(opened):
    page = opened.page
    page.locator("#curves .views input").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#curves .chart[data-view='seconds']")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#curves .chart[data-view='steps']")


def test_the_legend_hides_a_head_everywhere(opened):
    page = opened.page
    symbols = page.locator("#tradeoff .chart .mark-symbol path")
    cards = page.locator("#cards .card")
    assert (symbols.count(), cards.count()) == (8, 8)
    chip = page.locator(".legend [data-head='0']")
    chip.press("Enter")
    page.wait_for_function(
        "document.querySelectorAll('#tradeoff .chart .mark-symbol path').length === 7"
    )
    assert chip.get_attribute("aria-pressed") == "false"
    assert cards.count() == 7
    assert "Full softmax" not in page.locator("#cards").text_content()
    for i in range(1, 8):
        page.locator(f".legend [data-head='{i}']").click()
    assert cards.count() == 0
    page.locator("#show-all").click()
    page.wait_for_function(
        "document.querySelectorAll('#tradeoff .chart .mark-symbol path').length === 8"
    )
    assert cards.count() == 8


def test_the_table_sorts_by_its_headings(opened):
    page = opened.page
    heading = page.locator("table.summary thead th", has=page.locator("[data-sort='2']"))
    column = heading.evaluate("th => th.cellIndex")

    def values():
        cells = page.locator(f"table.summary tbody tr > :nth-child({column + 1})").all()
        found = [cell.get_attribute("data-value") for cell in cells]
        # The baseline has no value, and stays last.
        assert found[-1] == "" not in found[:-1]
        return [float(value) for value in found[:-1]]

    for order, reverse in (("ascending", False), ("descending", True)):
        heading.locator("button").click()
        assert heading.get_attribute("aria-sort") == order
        assert values() == sorted(values(), reverse=reverse)
    page.locator("table.summary [data-sort='0']").click()
    ranks = page.locator("table.summary tbody tr > :first-child").all_text_contents()
    assert ranks == [*(str(i) for i in range(1, 9)), ""]


def test_the_explorer_shows_contexts_and_paths(opened):
    page = opened.page
    context = page.locator("#context-tokens")
    assert "⏎" in context.text_content()
    page.locator("#after").click()
    assert "⇥" in context.text_content()
    page.locator("#before").click()
    page.locator("#context").select_option("4")
    assert "</script><img" in context.text_content()
    page.locator("#context").select_option("0")
    assert page.locator("#cards .path").count() == 1
    assert page.locator("#cards .path li").count() == 7
    assert page.locator("#cards li.hit .token").first.text_content() == "len"


def test_the_explorer_shows_rows_and_labels(browser, report_of):
    watched = Watched(browser, (report_of("labels") / "report.html").as_uri(), PHONE)
    page, row = watched.page, watched.page.locator("#context-tokens")
    assert page.locator("#context option").count() == 6
    assert "no label" in row.text_content()
    assert "σ" not in row.text_content()
    # By keyboard alone.
    page.locator("#after").focus()
    for _ in range(3):
        page.keyboard.press("Enter")
    assert row.locator(".target").all_text_contents()[:2] == ["science fiction", "drama"]
    assert NASTY[:20] in row.locator(".target").nth(2).text_content()
    assert "−1.2σ" in row.text_content()
    assert page.locator("#cards .card").count() == 3
    card = page.locator("#cards .card").first
    assert re.findall(r"\d+", card.locator(".said").text_content()) == ["2", "3", "2"]
    signs = card.locator(".sign").all_text_contents()
    assert [sign[0] for sign in signs] == ["●"] * 2 + ["○"] * 3
    assert card.locator("details li.hit .token").all_text_contents() == ["science fiction"]
    page.locator("#before").click()
    assert row.locator(".target").count() == 2
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert watched.said == []
    watched.context.close()


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_data_can_be_saved(opened, tmp_path, kind):
    with opened.page.expect_download() as waiting:
        opened.page.locator(f"[data-download='{kind}']").click()
    waiting.value.save_as(tmp_path / "data")
    text = (tmp_path / "data").read_text(encoding="utf-8")
    if kind == "csv":
        assert len(text.splitlines()) == 9
    else:
        assert json.loads(text)["data"]["name"] == NASTY


@pytest.mark.parametrize(("kind", "beginning"), [("png", b"\x89PNG"), ("svg", b"<svg")])
def test_charts_can_be_saved(opened, tmp_path, kind, beginning):
    with opened.page.expect_download() as waiting:
        opened.page.locator(f"#curves [data-save='{kind}']").click()
    waiting.value.save_as(tmp_path / "chart")
    assert waiting.value.suggested_filename == f"curves-steps.{kind}"
    assert (tmp_path / "chart").read_bytes().startswith(beginning)


def test_colours_follow_the_system_and_the_button(opened):
    page = opened.page
    page.emulate_media(color_scheme="dark")

    def paper():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    def axis():
        label = page.locator("#tradeoff .chart .role-axis-title text").first
        return label.evaluate("node => getComputedStyle(node).fill")

    dark = paper(), axis()
    page.locator("#theme").click()
    light = paper(), axis()
    assert light[0] == "rgb(255, 255, 255)"
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    page.locator("#theme").click()
    assert (paper(), axis()) == dark
    page.emulate_media(media="print")
    assert (paper(), axis()) == light
    assert not page.locator("#theme").is_visible()
    assert not page.locator(".views").first.is_visible()
    page.emulate_media(media="screen", color_scheme="light")
    assert page.locator("#theme").is_visible()


@pytest.mark.parametrize("kind", ["one seed", "all failed", "nothing yet", "labels"])
def test_every_comparison_opens(browser, report_of, kind):
    watched = Watched(browser, (report_of(kind) / "report.html").as_uri())
    assert watched.said == []
    watched.context.close()


def test_recommendation_steps_epochs_and_time_are_seen_without_scrolling(opened):
    page = opened.page
    page.set_viewport_size({"width": DESKTOP[0], "height": DESKTOP[1]})
    for chosen in ("h1", ".runner-up", ".tiles"):
        found = page.locator(chosen).bounding_box()
        assert found["y"] + found["height"] <= DESKTOP[1], chosen
    tiles = page.locator(".tiles").inner_text()
    assert all(word in tiles for word in ("steps", "epochs", "time per step", "training time"))


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_long_names_and_options_stay_whole(browser, tmp_path, size):
    out = make(tmp_path, heads=4, seeds=2, late={"adaptive": 0.2})
    asked = json.loads((out / "compare.json").read_text())
    asked["heads"][1]["label"] = "adaptive cutoffs=1000,4000,16000"
    (out / "compare.json").write_text(json.dumps(asked))
    write_report(out, pictures=False)
    watched = Watched(browser, (out / "report.html").as_uri(), size)
    parts = watched.page.locator("h1 .whole").all()
    assert any("--budget" in each.text_content() for each in parts)
    assert all(each.evaluate("node => node.getClientRects().length") == 1 for each in parts)
    assert "cutoffs=1000,4000,16000)" in watched.text_of("equal")
    assert "…" not in watched.text_of("equal")
    watched.context.close()


def test_the_baseline_is_a_labelled_line_in_the_charts_of_quality(opened):
    for key in ("tradeoff", "equal", "curves"):
        assert "unigram baseline 90" in opened.text_of(key)


def test_points_have_tooltips(opened):
    page = opened.page
    shown = page.locator("#vg-tooltip-element")
    for key in ("tradeoff", "curves", "equal"):
        page.locator(f"#{key} .chart .mark-symbol path").last.hover()
        page.wait_for_selector("#vg-tooltip-element.visible")
        assert "head" in shown.inner_text()
        assert "perplexity" in shown.inner_text()
        page.mouse.move(0, 0)
        page.wait_for_selector("#vg-tooltip-element.visible", state="detached")


def test_a_family_has_the_same_colour_on_every_page(opened, browser, report_of):
    def colours(page):
        return {
            button.text_content(): button.locator("svg").get_attribute("style")
            for button in page.locator(".legend [data-head]").all()
        }

    watched = Watched(browser, (report_of("some failed") / "report.html").as_uri())
    here, there = colours(opened.page), colours(watched.page)
    watched.context.close()
    assert len(set(here.values())) == len(here)
    assert there
    assert all(here[name] == colour for name, colour in there.items())


def test_learning_rates_that_were_tried_fold_out(browser, tmp_path):
    out = make(tmp_path, heads=2, seeds=1)
    tried = [{"lr": 0.002, "score": 5.4}, {"lr": 0.006, "score": 5.2}, {"lr": 0.018, "score": None}]
    rates = {"full": {"lr": 0.006, "steps": 50, "tried": tried}}
    (out / "rates.json").write_text(json.dumps(rates))
    write_report(out, pictures=False)
    watched = Watched(browser, (out / "report.html").as_uri(), PHONE)
    fold = watched.page.locator(".rates")
    assert not fold.locator("table").is_visible()
    fold.locator("summary").click()
    assert fold.locator("td.best").all_text_contents() == ["0.006: 5.20"]
    assert "not finite" in fold.inner_text()
    assert watched.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    watched.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_it_fits_and_can_be_photographed(opened, tmp_path, size, scheme):
    page = opened.page
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    # Charts follow the window.
    page.wait_for_function(
        "width => [...document.querySelectorAll('.chart svg')]"
        ".every(svg => svg.getBoundingClientRect().right <= width)",
        arg=size[0],
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for chart in page.locator(".chart").all():
        drawn = chart.locator("svg").bounding_box()
        assert drawn["x"] >= 0
        assert drawn["x"] + drawn["width"] <= size[0]
    for chart in page.locator("#equal .chart text, #step_time .chart text").all():
        assert "…" not in chart.text_content()
    for button in page.locator(".legend button, .tiles > div, .views").all():
        if button.is_visible():
            place = button.bounding_box()
            assert place["x"] + place["width"] <= size[0]
    picture = tmp_path / "page.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    # A blank page of this size would be some 20 kB.
    assert picture.stat().st_size > 150_000
