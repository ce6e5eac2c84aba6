import csv
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

import altair as alt
from made_costs import SIZES, make_costs
from made_runs import CLASSES, HEADS, KINDS, NASTY, make

from lastlayer.heads.recipes import registered
from lastlayer.lab import errors, show
from lastlayer.lab.errors import LabError
from lastlayer.lab.families import FAMILIES
from lastlayer.lab.records import HeadEntry
from lastlayer.lab.report import figures, look, tables, write_report
from lastlayer.lab.report.explorer import visible
from lastlayer.lab.report.figures import log_ticks
from lastlayer.lab.report.page import content_policy, json_for_script, references
from lastlayer.lab.results import read_results
from lastlayer.lab.verdict import verdict


class Elements(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.data: dict[str, str] = {}
        self._script: str | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._script = dict(attrs).get("id") if tag == "script" else None

    def handle_data(self, data):
        if self._script:
            self.data[self._script] = self.data.get(self._script, "") + data


@pytest.fixture(scope="module")
def folder(nasty_report):
    return nasty_report


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def elements(page):
    return Elements(page)


def test_the_page_holds_the_verdict_and_every_head(folder, page):
    results = read_results(folder)
    text = page.replace("&#34;", '"')
    assert verdict(results).headline in text
    for summary in results.summaries:
        assert summary.title in text


def test_nothing_of_the_data_becomes_markup(elements):
    tags = [tag for tag, _ in elements.found]
    assert "img" not in tags
    assert tags.count("script") == 4
    assert not [a for _, attrs in elements.found for a in attrs if a.startswith("on")]


def test_nothing_is_fetched(elements):
    for tag, attributes in elements.found:
        assert "src" not in attributes
        assert tag not in {"link", "iframe", "object", "embed", "base"}
        link = attributes.get("href", "#")
        assert link.startswith("#") or (tag == "a" and link.startswith("https://arxiv.org/"))


def test_the_policy_names_the_scripts_and_lets_nothing_be_fetched(elements):
    (policy,) = [a["content"] for t, a in elements.found if t == "meta" and "http-equiv" in a]
    assert "default-src 'none'" in policy
    scripts = re.search("script-src ([^;]*)", policy)[1].split()
    assert len(scripts) == 2
    assert all(word.startswith("'sha256-") for word in scripts)


def test_the_data_in_the_page_is_that_of_the_runs(folder, elements):
    held = json.loads(elements.data["everything"])
    results = read_results(folder)
    assert held["data"]["name"] == NASTY
    assert [head["rank"] for head in held["heads"]] == list(range(1, 9))
    assert len(held["runs"]) == len(results.comparison.runs)
    first = results.comparison.runs[0]
    assert held["runs"][0]["test"] == first.test
    assert len(held["runs"][0]["valid"]) == len(first.valid)
    embedded = json.loads(elements.data["embedded"])
    assert embedded["csv"] == (folder / "summary.csv").read_text(encoding="utf-8")
    assert len(embedded["contexts"]) == 6
    assert all(len(each["heads"]) == 8 for each in embedded["contexts"])


def test_hierarchical_heads_have_a_path_in_the_explorer(elements):
    heads = json.loads(elements.data["embedded"])["contexts"][0]["heads"]
    having = {each["head"] for each in heads if each["path"]}
    assert having == {"Hierarchical softmax"}


@pytest.mark.parametrize(
    "value",
    [NASTY, {"<!--": "-->", "]]>": "<script>"}, ["\u2028\u2029", "é", None, 1.5], "\\u003c"],
)
def test_json_in_a_script_is_the_same_value(value):
    text = str(json_for_script({"value": value}))
    assert json.loads(text) == {"value": value}
    assert not set("<>&\u2028\u2029") & set(text)


def test_json_in_a_script_can_be_written_even_with_a_lone_surrogate():
    assert str(json_for_script(["\ud800"])).encode("utf-8") == b'["?"]'


def test_a_policy_without_the_script_does_not_name_it():
    assert content_policy(["a"]) != content_policy(["b"])


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("def", "def"),
        ("\n", "⏎"),
        ("\t", "⇥"),
        ("  x ", "␣␣x␣"),
        ("", "∅"),
        ("\u202e", "⟨U+202E⟩"),
        ("\x00", "⟨U+0000⟩"),
        ("\ud800", "⟨U+D800⟩"),
        ("\u0301", "◌\u0301"),
        ("naïve", "naïve"),
        ("日本", "日本"),
    ],
)
def test_tokens_are_visible(token, shown):
    assert visible(token) == shown


def test_long_tokens_are_cut():
    assert visible("x" * 10_000) == "x" * 39 + "…"
    assert len(visible("\u200b" * 100)) == 40


def test_pictures_are_written_as_png_and_svg(tmp_path):
    folder = make(tmp_path, heads=2, seeds=2)
    write_report(folder)
    pictures = sorted(path.name for path in (folder / "plots").iterdir())
    stems = {name.rsplit(".", 1)[0] for name in pictures}
    assert {"tradeoff-step_ms", "equal", "curves-seconds", "curves-steps", "calibration"} <= stems
    assert pictures == sorted(f"{stem}.{kind}" for stem in stems for kind in ("png", "svg"))
    for stem in stems:
        png = (folder / "plots" / f"{stem}.png").read_bytes()
        assert png.startswith(b"\x89PNG")
        root = ET.parse(folder / "plots" / f"{stem}.svg").getroot()
        assert root.tag.endswith("svg")
        assert list(root.iter("{http://www.w3.org/2000/svg}path"))


def test_markdown_has_a_row_for_each_head(folder):
    text = (folder / "summary.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(HEADS) + 1
    assert rows[-1].startswith("|  | unigram baseline |")
    assert len({row.count(" | ") for row in rows}) == 1
    assert text.startswith(verdict(read_results(folder)).sentence)


def test_costs_and_what_does_not_vary_have_no_interval_in_markdown(folder):
    text = (folder / "summary.md").read_text(encoding="utf-8")
    names, _, *rows = [line.split(" | ") for line in text.splitlines() if line.startswith("|")]
    for cells in rows[: len(HEADS)]:
        shown = dict(zip(names, cells, strict=True))
        assert "(" in shown["ε-smoothed perplexity"]
        for name in ("time per step", "peak memory", "steps", "learning rate", "coverage"):
            assert "(" not in shown[name]


def _rows(out):
    return list(csv.DictReader((out / "summary.csv").read_text(encoding="utf-8").splitlines()))


def test_csv_has_the_means_and_both_ends(folder):
    rows = _rows(folder)
    for row, summary in zip(rows, read_results(folder).summaries, strict=True):
        found = summary.estimates["eps_perplexity"]
        assert row["head"] == summary.title
        ends = [row[f"eps_perplexity{part}"] for part in ("", "_low", "_high")]
        assert [float(end) for end in ends] == [found.mean, found.low, found.high]


def test_a_name_that_begins_like_a_formula_is_text_in_the_csv(tmp_path):
    out = make(tmp_path, heads=1, seeds=1)
    asked = json.loads((out / "compare.json").read_text())
    asked["heads"][0] |= {"label": "=1+1", "family": "mine:Head"}
    (out / "compare.json").write_text(json.dumps(asked))
    write_report(out, pictures=False)
    (row,) = _rows(out)
    assert row["head"] == "'=1+1"


@pytest.mark.parametrize("kind", KINDS)
def test_every_comparison_has_a_page(report_of, kind):
    out = report_of(kind)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert verdict(read_results(out)).headline in page
    json.loads(Elements(page).data["everything"])
    for status in {"nan", "out of memory"} & set((KINDS[kind].get("statuses") or {}).values()):
        assert status in page


def test_charts_are_valid_vega_lite(tmp_path):
    results = read_results(make_costs(make(tmp_path)))
    looks = look.looks(results.comparison.heads)
    shown = figures.all_figures(results)
    assert len(shown) == 8
    for figure, in_page in zip(shown, [True, False] * 4, strict=True):
        assert len({view.key for view in figure.views}) == len(figure.views)
        for view in figure.views:
            chart = view.chart(looks, in_page=in_page)
            assert alt.LayerChart.from_dict(chart, validate=True).layer
            assert view.alt_text


def test_a_missing_package_is_told_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "altair" else object())
    with pytest.raises(LabError, match=r'needs altair, not installed; pip install "lastlayer\['):
        write_report(tmp_path)


def test_a_folder_that_is_none_is_told(tmp_path):
    with pytest.raises(LabError, match=r"compare\.json"):
        write_report(tmp_path)


def entry(family: str, title: str = "") -> HeadEntry:
    return HeadEntry(family, family, family, family, {}, title or family)


def test_a_family_keeps_its_colour_and_variants_differ():
    families = list(registered())
    alone = {name: look.looks([entry(name)])[0] for name in families}
    assert families
    for several in (families, families[::-1], families[3:]):
        assert all(
            alone[each.name].colour == each.colour for each in look.looks(map(entry, several))
        )
    for task in ("lm", "multilabel"):
        suited = [name for name, (_, recipe) in registered().items() if recipe.task == task]
        assert len({alone[name].colour for name in suited}) == len(suited)
    variants = look.looks([entry("hierarchical", str(i)) for i in range(4)])
    assert len({each.colour for each in variants}) == 1
    assert len({each.dash for each in variants}) == len({each.shape for each in variants}) == 4
    assert look.looks([entry("mine:Head")])[0].colour not in {
        each.colour for each in alone.values()
    }


def test_every_colour_and_shape_has_its_counterpart():
    assert len(look.SHAPES) == len(look.SHAPE_PATHS)
    assert len(look.LIGHT_COLOURS) == len(look.DARK_COLOURS)
    assert len(dict(look.exchanges())) == len(look.exchanges())
    for light, dark in zip(look.LIGHT_COLOURS, look.DARK_COLOURS, strict=True):
        assert _contrast(light, look.LIGHT_INK.paper) > 2
        assert _contrast(dark, look.DARK_INK.paper) > 3


@pytest.mark.parametrize("ink", [look.LIGHT_INK, look.DARK_INK])
def test_text_can_be_read_on_paper(ink):
    assert _contrast(ink.text, ink.paper) > 7
    assert _contrast(ink.muted, ink.paper) > 4.5


def _contrast(one, other):
    """WCAG 2's ratio."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_ticks_are_few_and_inside(seed):
    draw = np.random.default_rng(seed)
    for _ in range(50):
        low = float(10 ** draw.uniform(-6, 6))
        high = low * float(10 ** draw.uniform(0.02, 8))
        ticks = log_ticks(low, high)
        assert ticks == sorted(set(ticks))
        assert len(ticks) <= 6
        assert all(low <= tick <= high for tick in ticks)
        assert ticks or high / low < 1.5


def test_every_family_that_is_not_plain_has_its_paper():
    assert registered().keys() <= FAMILIES.keys()
    assert FAMILIES.keys() - references().keys() == {"full", "topk", "bce"}
    for papers in references().values():
        assert all(re.search(r"\d{4}", paper["text"]) for paper in papers)


def test_columns_about_sparse_heads_are_there_with_sparse_heads_alone(tmp_path):
    dense, sparse = (
        read_results(make(tmp_path / str(heads), heads=heads, seeds=1)) for heads in (2, 8)
    )
    about = {"support", "coverage", "eps_perplexity"}
    assert not about & {column.key for column in tables.columns(dense)}
    assert about <= {column.key for column in tables.columns(sparse)}
    assert about <= {column.key for column in tables.columns(dense, telling=False)}


def test_quality_and_time_per_step_are_in_a_terminal_of_80_columns(folder):
    results = read_results(folder)
    assert [c.key for c in tables.columns(results)][:2] == [results.metric.key, "step_ms"]
    shown = [column.header for column in show.results_table(results, width=80).columns]
    assert "time per step" in shown


def test_the_best_of_a_column_is_marked_once_at_most(tmp_path):
    results = read_results(make(tmp_path, seeds=2))
    for column in tables.columns(results):
        cells = [tables.cell(column, summary, results) for summary in results.summaries]
        best = [cell.sort for cell in cells if cell.best]
        assert len(best) <= 1
        choose = min if column.metric.lower_is_better else max
        assert best in ([], [choose(cell.sort for cell in cells if cell.sort is not None)])


def test_costs_against_classes_are_measured(folder, elements):
    (figure,) = [
        each for each in figures.all_figures(read_results(folder)) if each.key == "classes"
    ]
    assert [view.key for view in figure.views] == ["time", "memory"]
    chart = figure.views[0].chart(look.looks([entry("full", "Full softmax")]))
    rows = chart["layer"][1]["data"]["values"]
    assert len([row for row in rows if row["head"] == "Full softmax"]) == 4
    assert len(rows) == 4 * len(HEADS) - (len(HEADS) - 1)
    assert rows[0]["text"] == "2.50 ms"
    low, high = chart["layer"][1]["encoding"]["x"]["scale"]["domain"]
    assert low < SIZES[0] < SIZES[-1] < high
    held = json.loads(elements.data["everything"])["costs"]
    assert (held["rows"], held["own"]) == (1024, CLASSES)
    assert sum(cost["reason"] == NASTY for cost in held["found"]) == len(HEADS) - 1


def test_sizes_with_the_same_reason_are_told_together(tmp_path):
    out = make_costs(make(tmp_path, heads=2, seeds=1), reason="no time")
    costs = json.loads((out / "costs.json").read_text())
    costs["costs"][-2] = {**costs["costs"][-1], "classes": CLASSES}
    (out / "costs.json").write_text(json.dumps(costs))
    ((_, reasons),) = figures.left_out(read_results(out))
    assert reasons == ["10,000 and 40,000 classes: no time"]


def test_the_place_of_the_data_is_on_the_axis_without_a_time_there(tmp_path):
    out = make_costs(make(tmp_path, heads=1, seeds=1))
    costs = json.loads((out / "costs.json").read_text())
    costs["costs"] = costs["costs"][:1]
    (out / "costs.json").write_text(json.dumps(costs))
    time = figures.against_classes(read_results(out))[0]
    x = time.chart(look.looks([entry("full", "Full softmax")]))["layer"][1]["encoding"]["x"]
    low, high = x["scale"]["domain"]
    assert low < SIZES[0] < CLASSES < high
    assert x["axis"]["values"] == [SIZES[0], CLASSES]


def test_a_folder_without_costs_has_no_such_figure(report_of):
    out = report_of("one seed")
    assert "classes" not in [each.key for each in figures.all_figures(read_results(out))]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert json.loads(Elements(page).data["everything"])["costs"] is None
