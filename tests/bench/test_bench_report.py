import io

import pytest
from lastlayer.bench import table
from lastlayer.bench.maps import tables
from lastlayer.bench.maps.plot import bandwidth_against_width
from lastlayer.bench.progress import reporting
from rich.console import Console

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def printed(renderable) -> str:
    text = io.StringIO()
    Console(file=text, width=116).print(renderable)
    return text.getvalue()


def line_with(text: str, part: str) -> str:
    (line,) = [line for line in text.splitlines() if part in line]
    return line


@pytest.fixture
def case(make_record):
    peer = {"source": "adasplash", "method": "triton_sparsemax"}
    return [
        make_record(source="liger-kernel", median_ms=None, tb_per_s=None, fraction_of_copy=None,
                    ratio_to_softmax=None, row_sum_error=None, verified=False,
                    status="failed: RuntimeError: too wide"),
        make_record(source="torch", method="softmax", computes="softmax", median_ms=0.137),
        make_record(),
        make_record(**peer, median_ms=12.94, ratio_to_ours=98.8, row_sum_error=0.04,
                    verified=False, status="inexact: row sums off by 4.0e-02"),
    ]  # fmt: skip


def test_a_row_has_time_bandwidth_ratios_and_status(case):
    text = printed(tables.comparison(case, "maps"))
    assert "65536×1024 float32 forward" in text
    ours = line_with(text, "lastlayer sparsemax").split()
    assert ours == ["lastlayer", "sparsemax", "0.131", "4.10", "96%", "0.96", "·", "2e-07", "ok"]
    peer = line_with(text, "adasplash triton_sparsemax").split()
    assert peer[2:8] == ["12.9", "4.10", "96%", "0.96", "98.80", "4e-02"]
    assert "failed: RuntimeError" in text


def test_softmax_comes_first_then_ours_whatever_failed(case):
    text = printed(tables.comparison(case, "maps"))
    places = [text.index(name) for name in ("torch softmax", "lastlayer", "liger-kernel")]
    assert places == sorted(places)


def test_no_line_is_wider_than_the_console(case):
    for made in (tables.comparison(case, "maps"), tables.by_scale(case), tables.by_width(case)):
        assert max(map(len, printed(made).splitlines())) <= 116


def test_scales_are_rows(make_record):
    records = [make_record(section="scales", scale=s, median_ms=s) for s in (0.01, 100.0)]
    text = printed(tables.by_scale(records))
    assert line_with(text, "scale 0.01").split()[-2:] == ["0.010", "2e-07"]
    assert line_with(text, "scale 100").split()[-2:] == ["100", "2e-07"]


def test_widths_are_rows_and_methods_columns(make_record):
    records = [
        make_record(section="widths", shape=(4, 128), tb_per_s=1.25),
        make_record(section="widths", shape=(2, 256), tb_per_s=2.5),
        make_record(section="widths", shape=(2, 256), tb_per_s=0.0001, source="entmax"),
    ]
    text = printed(tables.by_width(records))
    assert line_with(text, " 128 ").split() == ["128", "1.25", "·"]
    assert line_with(text, " 256 ").split() == ["256", "2.50", "0.00"]


def test_a_processor_is_shown_in_gigabytes(make_record):
    text = printed(tables.comparison([make_record(tb_per_s=0.0123, copy_tb_per_s=0.02)], "maps"))
    assert "GB/s" in text
    assert "12.30" in line_with(text, "lastlayer sparsemax").split()


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "·"), (0.0804, "0.080"), (1.2345, "1.23"), (12.345, "12.3"), (278.6, "279")],
)
def test_milliseconds_have_three_digits(value, shown):
    assert table.milliseconds(value) == shown


def test_the_plot_has_a_panel_a_device(make_record, tmp_path):
    widths = [
        make_record(section="widths", shape=(2**27 // n, n), device=device, source=source)
        for device in ("NVIDIA H200", "Some CPU")
        for source in ("lastlayer", "entmax", "torch")
        for n in (128, 1024, 8192)
    ]
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    bandwidth_against_width(widths[:9], one)
    bandwidth_against_width(widths, two)
    heights = []
    for path in (one, two):
        data = path.read_bytes()
        assert data.startswith(PNG_SIGNATURE)
        heights.append(int.from_bytes(data[20:24], "big"))
    assert heights[1] == 2 * heights[0]


def test_a_plot_of_nothing_is_refused(make_record, tmp_path):
    with pytest.raises(ValueError, match="expected timings of the section 'widths'"):
        bandwidth_against_width([make_record(section="shapes")], tmp_path / "p.png")


def test_a_terminal_gets_a_bar_and_no_lines(make_record):
    text = io.StringIO()
    out = Console(file=text, force_terminal=True, width=100)
    with reporting(out, 2, quick=False) as reporter:
        reporter.started("65536×1024")
        reporter.measured(make_record())
        reporter.finished()
        assert reporter.bar is not None
        assert reporter.bar.tasks[0].completed == 1
    assert "lastlayer sparsemax" not in text.getvalue()


def test_a_quick_run_without_a_terminal_is_silent(make_record):
    text = io.StringIO()
    with reporting(Console(file=text), 1, quick=True) as reporter:
        reporter.started("65536×1024")
        reporter.measured(make_record())
        reporter.finished()
    assert text.getvalue() == ""
