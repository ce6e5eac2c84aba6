import io

import pytest
from lastlayer.bench.fused import tables
from lastlayer.bench.fused.cases import CPU_SHAPES, CUDA_SHAPES, LARGE, SMALL, SPARSE
from lastlayer.bench.fused.plot import times_and_memory
from lastlayer.bench.record import append
from lastlayer.bench.table import gigabytes
from rich.console import Console


def page_of(render, tmp_path, records) -> str:
    for record in records:
        append(tmp_path / "r.jsonl", record)
    return render.render(tmp_path)


def goal(page: str, *parts: str) -> tuple[str, str]:
    """What was measured for a goal, and the verdict."""
    (line,) = [line for line in page.splitlines() if all(part in line for part in parts)]
    measured, verdict = line.strip("| ").split(" | ")[-2:]
    return measured, verdict


@pytest.fixture
def large(make_fused):
    """The records of one case: torch.compile, ours, ours in little memory, a peer that failed."""
    low = {
        "method": "cross_entropy, low memory",
        "ratio_to_baseline": 1.3,
        "peak_bytes": 300_000_000,
    }
    wide = {"method": "cross_entropy, float32 sum", "weight_error": 2e-6}
    return [
        make_fused(source="torch", method="compiled", median_ms=39.5, ratio_to_baseline=1.0),
        make_fused(),
        make_fused(**low),
        make_fused(**wide),
        make_fused(source="liger-kernel", method="fused linear CE", median_ms=None,
                   ratio_to_baseline=None, verified=False, status="failed: RuntimeError: a | b"),
    ]  # fmt: skip


def test_the_page_has_a_table_a_case(render, tmp_path, large):
    page = page_of(render, tmp_path, large)
    assert "## Fused losses: NVIDIA H200\n" in page
    assert "GEMM 745 TFLOP/s." in page
    assert "### Large width, 8192×4096×128256 bfloat16, flat scores\n" in page
    row = "| lastlayer cross_entropy | 39.8 | 649 | 87% | 1.01 | 1.06 | 3e-07 | 2e-03 | 2e-03 |"
    assert row in page
    assert "| liger-kernel fused linear CE | failed: RuntimeError: a \\| b |" in page
    assert "![Time and memory](pictures/fused.png)" in page


def test_goals_of_large_widths(render, tmp_path, large):
    page = page_of(render, tmp_path, large)
    where = "| 8192×4096×128256 |"
    assert goal(page, where, "| cross_entropy: at most 1.03 times") == ("1.01×", "met")
    assert goal(page, where, "| cross_entropy: at most 1.1 GB") == ("1.06 GB", "met")
    assert goal(page, where, "low memory: at most 1.25 times") == ("1.30×", "**missed**")
    assert goal(page, where, "low memory: at most 0.3 GB") == ("0.30 GB", "met")
    assert goal(page, where, "| cross_entropy: gradient of the weight within 0.004") == (
        "2.3e-03", "met")  # fmt: skip
    assert goal(page, where, "| cross_entropy: loss within 1e-05") == ("3.0e-07", "met")
    assert goal(page, where, "float32 sum: gradient of the weight within 1e-05") == (
        "2.0e-06", "met")  # fmt: skip
    other = "| 8192×2048×256000 |"
    assert goal(page, other, "| cross_entropy: at most 1.03 times") == ("·", "not measured")


def test_goals_of_small_widths(render, tmp_path, make_fused):
    case = {"section": SMALL, "shape": CUDA_SHAPES[SMALL][0]}
    records = [
        make_fused(**case, peak_bytes=500_000_000),
        make_fused(**case, source="cut-cross-entropy", method="linear CE", ratio_to_ours=1.49,
                   verified=False),
        make_fused(**case, source="torch", method="compiled, 2048-row chunks", ratio_to_ours=1.5),
    ]  # fmt: skip
    page = page_of(render, tmp_path, records)
    where = "| 16384×128×1000000 |"
    assert goal(page, where, "1.5 times faster than Cut Cross-Entropy") == ("1.49×", "**missed**")
    assert goal(page, where, "1.5 times faster than torch.compile on chunks") == ("1.50×", "met")
    assert goal(page, where, "less than 0.5 GB") == ("0.50 GB", "**missed**")


def test_goals_of_sparse_losses(render, tmp_path, make_fused):
    case = {"section": SPARSE, "shape": CUDA_SHAPES[SPARSE][0], "method": "sparsemax"}
    case["computes"] = "sparsemax"
    kinds = {"trained-like": (1.0, 1e-3), "flat": (1.2, 2e-2), "very flat": (1.31, 1e-3)}
    records = [
        make_fused(**case, scores=kind, ratio_to_baseline=ratio, weight_error=error,
                   support_mean=6.5, support_max=31)
        for kind, (ratio, error) in kinds.items()
    ]  # fmt: skip
    page = page_of(render, tmp_path, records)
    assert goal(page, "| sparsemax: no slower than cross_entropy", "trained-like") == (
        "1.00×",
        "met",
    )
    assert goal(page, "| sparsemax: at most 1.3 times", ", flat") == ("1.20×", "met")
    assert goal(page, "| sparsemax: at most 1.3 times", "very flat") == ("1.31×", "**missed**")
    # The worst kind counts.
    assert goal(page, "| sparsemax: gradient of the weight within") == ("2.0e-02", "**missed**")
    assert "Mean support of a row: sparsemax 6.5 (at most 31)." in page
    titles = [line for line in page.splitlines() if line.startswith("### Sparse")]
    assert [title.split(", ")[-1] for title in titles] == [
        "trained-like scores", "flat scores", "very flat scores"]  # fmt: skip


def test_goals_of_a_cpu(render, tmp_path, make_fused):
    cpu = {"device": "Some CPU", "device_type": "cpu", "threads": 2, "shape": CPU_SHAPES[LARGE][0]}
    cpu |= {"dtype": "float32", "baseline": "torch eager"}
    eager = {"source": "torch", "method": "eager", "peak_bytes": 400_000_000}
    records = [
        make_fused(**cpu, **eager),
        make_fused(**cpu, ratio_to_baseline=1.0, peak_bytes=41_000_000),
    ]
    page = page_of(render, tmp_path, records)
    assert "## Fused losses: Some CPU, 2 threads\n" in page
    assert goal(page, "no slower than linear + cross_entropy") == ("1.00×", "met")
    assert goal(page, "at most 10% of the memory") == ("10.2%", "**missed**")


def test_memory_that_was_not_measured_is_not_a_hit(render, tmp_path, make_fused):
    cpu = {"device": "Some CPU", "device_type": "cpu", "threads": 2, "shape": CPU_SHAPES[LARGE][0]}
    eager = {"source": "torch", "method": "eager"}
    records = [make_fused(**cpu, **eager, peak_bytes=None), make_fused(**cpu)]
    page = page_of(render, tmp_path, records)
    assert goal(page, "at most 10% of the memory") == ("·", "not measured")


def test_one_case_can_be_measured_again(render, tmp_path, make_fused):
    later = {"run": "run 2", "date": "2026-11-16T00:00:00+00:00"}
    records = [
        make_fused(median_ms=11.1),
        make_fused(shape=CUDA_SHAPES[LARGE][1], median_ms=22.2),
        make_fused(**later, median_ms=33.3),
    ]
    page = page_of(render, tmp_path, records)
    assert "| 11.1 |" not in page
    assert "| 22.2 |" in page
    assert "| 33.3 |" in page


def test_quick_runs_are_not_on_the_page(render, tmp_path, make_fused):
    page = page_of(render, tmp_path, [make_fused(quick=True)])
    assert "No measurements have been recorded yet." in page


def test_the_terminals_table_fits(large):
    text = io.StringIO()
    Console(file=text, width=116).print(tables.comparison(large))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 116
    words = " ".join(text.getvalue().split())
    assert "large width 8192×4096×128256 bfloat16, flat scores" in words
    (ours,) = [line.split() for line in lines if "lastlayer cross_entropy " in line]
    assert ours[2:] == ["39.8", "649", "87%", "1.01", "1.06", "3e-07", "2e-03", "2e-03", "ok"]
    (first,) = [index for index, line in enumerate(lines) if "torch compiled" in line]
    assert "lastlayer cross_entropy" in lines[first + 1]


@pytest.mark.parametrize(
    ("peak", "shown"), [(None, "·"), (1_104_000_000, "1.10"), (99_600_000, "0.100"), (0, "0.000")]
)
def test_memory_is_shown_in_billions_of_bytes(peak, shown):
    assert gigabytes(peak) == shown


def test_the_picture_has_two_panels_a_case(tmp_path, large, make_fused):
    path = tmp_path / "fused.png"
    times_and_memory(large, path)
    one = path.read_bytes()
    assert one.startswith(b"\x89PNG")
    times_and_memory([*large, make_fused(section=SMALL, peak_bytes=None)], path)
    height = [int.from_bytes(data[20:24], "big") for data in (one, path.read_bytes())]
    assert height[1] > height[0]


def test_a_picture_of_nothing_is_refused(tmp_path, make_fused):
    with pytest.raises(ValueError, match="expected timings of fused losses, got none"):
        times_and_memory([make_fused(median_ms=None)], tmp_path / "p.png")
