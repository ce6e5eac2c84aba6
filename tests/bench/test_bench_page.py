from lastlayer.bench.maps.cases import CPU_SHAPES, CUDA_SHAPES, SCALES
from lastlayer.bench.record import append


def lines_with(page: str, *parts: str) -> list[str]:
    return [line for line in page.splitlines() if all(part in line for part in parts)]


def page_of(render, tmp_path, records) -> str:
    for record in records:
        append(tmp_path / "r.jsonl", record)
    return render.render(tmp_path)


def test_without_records_the_page_says_so(render, tmp_path):
    assert "No measurements have been recorded yet." in render.render(tmp_path)


def test_the_page_names_device_versions_and_date(render, tmp_path, make_record):
    page = page_of(
        render, tmp_path, [make_record(), make_record(source="adasplash", source_version="0.2.2")]
    )
    assert "## Maps: NVIDIA H200\n" in page
    assert (
        "Measured 2026-11-15 with Python 3.12.3, torch 2.11.0, Triton 3.6.0, lastlayer 0.1.0, "
        "adasplash 0.2.2. Copy bandwidth 4.26 TB/s." in page
    )
    assert "| lastlayer sparsemax | 0.131 96% (0.96) |" in page


def test_hits_misses_and_gaps_are_told_apart(render, tmp_path, make_record):
    records = [
        make_record(fraction_of_copy=0.8),
        make_record(shape=CUDA_SHAPES[1], fraction_of_copy=0.79),
        make_record(
            shape=CUDA_SHAPES[2],
            median_ms=None,
            fraction_of_copy=None,
            verified=False,
            status="wrong: entries off by 1.0e-01",
        ),
    ]
    page = page_of(render, tmp_path, records)
    goal = "sparsemax forward: at least 80% of copy bandwidth"
    found = [line.split(" | ")[1:] for line in lines_with(page, goal)]
    assert found == [
        ["65536×1024 float32", "80.0%", "met |"],
        ["16384×8192 float32", "79.0%", "**missed** |"],
        ["8192×32768 float32", "wrong: entries off by 1.0e-01", "**missed** |"],
        ["4096×131072 float32", "·", "not measured |"],
    ]
    # 4 shapes × 2 dtypes for two maps forward, and with backward, and two goals of all scales ...
    assert "1 of 58 met." in page


def test_equal_times_are_not_faster(render, tmp_path, make_record):
    page = page_of(
        render, tmp_path, [make_record(direction="forward+backward", ratio_to_softmax=1.0)]
    )
    (line,) = lines_with(page, "| sparsemax forward + backward: faster", "65536×1024 float32")
    assert line.endswith("| 1.00× | **missed** |")


def test_the_worst_scale_counts(render, tmp_path, make_record):
    ours = [
        make_record(section="scales", scale=s, row_sum_error=1e-7 if s < 100 else 9e-7)
        for s in SCALES
    ]
    peer = {"section": "scales", "source": "adasplash", "method": "triton_sparsemax"}
    theirs = [
        make_record(**peer, scale=s, ratio_to_ours=4.0 if s != 1 else 0.8, verified=False)
        for s in SCALES
    ]
    page = page_of(render, tmp_path, [*ours, *theirs])
    (sums,) = lines_with(page, "| sparsemax, scales", "rows sum to 1 within 1e-06", "65536×1024")
    assert sums.endswith("| 9e-07 | met |")
    (speed,) = lines_with(page, "never slower than AdaSplash", "65536×1024 float32")
    assert speed.endswith("| 1.25× | **missed** |")
    assert len(lines_with(page, "| 65536×1024 float32 |", "*inexact*")) == len(SCALES)


def test_a_scale_that_is_missing_is_not_a_hit(render, tmp_path, make_record):
    page = page_of(render, tmp_path, [make_record(section="scales", scale=1.0)])
    (line,) = lines_with(page, "| sparsemax, scales", "rows sum to 1", "65536×1024 float32")
    assert line.endswith("not measured |")


def test_the_goals_of_a_cpu(render, tmp_path, make_record):
    cpu = {"device": "Some CPU", "device_type": "cpu", "threads": 2, "shape": CPU_SHAPES[0]}
    peer = {"source": "entmax", "method": "entmax15"}
    page = page_of(
        render,
        tmp_path,
        [
            make_record(**cpu, ratio_to_softmax=1.5),
            make_record(**cpu, **peer, ratio_to_ours=9.9),
            make_record(**cpu, direction="forward+backward", ratio_to_softmax=2.5),
        ],
    )
    assert "## Maps: Some CPU, 2 threads\n" in page
    assert "1 of 24 met." in page
    (forward,) = lines_with(page, "| sparsemax forward: within 1.5 times", "4096×64")
    assert forward.endswith("| 1.50× | met |")
    (faster,) = lines_with(page, "entmax 1.5 forward: at least 10 times", "4096×64")
    assert faster.endswith("| 9.90× | **missed** |")
    (both,) = lines_with(page, "| sparsemax forward + backward: within 2", "4096×64")
    assert both.endswith("| 2.50× | **missed** |")


def test_only_the_newest_full_run_counts(render, tmp_path, make_record):
    page = page_of(
        render,
        tmp_path,
        [
            make_record(run="new", date="2026-11-16T00:00:00+00:00", median_ms=0.222),
            make_record(median_ms=0.111),
            make_record(run="q", date="2026-11-17T00:00:00+00:00", median_ms=0.333, quick=True),
        ],
    )
    assert "| lastlayer sparsemax | 0.222 " in page
    assert "0.111" not in page
    assert "0.333" not in page


def test_the_picture_is_shown_and_drawn_where_there_are_widths(
    render, tmp_path, make_record, monkeypatch
):
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    for name, value in {
        "ROOT": tmp_path,
        "RESULTS": results,
        "PAGE": docs / "performance.md",
        "PICTURES": docs / "pictures",
    }.items():
        monkeypatch.setattr(render, name, value)
    append(results / "r.jsonl", make_record(section="widths"))
    render.main()
    page = (docs / "performance.md").read_text(encoding="utf-8")
    assert page == render.render(results)
    assert "](pictures/bandwidth.png)" in page
    assert (docs / "pictures" / "bandwidth.png").read_bytes().startswith(b"\x89PNG")


def test_the_committed_page_is_what_the_committed_records_give(render):
    assert render.PAGE.read_text(encoding="utf-8") == render.render(render.RESULTS), (
        "docs/performance.md is out of date: python benchmarks/render.py"
    )
