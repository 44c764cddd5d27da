"""The picture of a run."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from contract.errors import DataError
from telemetry.metrics import JsonlSink, Metrics
from telemetry.report import draw_svg, main, read_series

_SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def metrics_file(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    with Metrics([JsonlSink(path, attempt=1)]) as metrics:
        for step, loss in enumerate([4.0, float("nan"), 2.0, 1.0], start=1):
            metrics.log(step, {"loss": loss, "name": "x"})
    return path


def test_the_curve_goes_through_the_points_to_scale(metrics_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "loss.svg"
    assert main([str(metrics_file), str(output), "--title", "loss <1>"]) == 0
    svg = ElementTree.parse(output).getroot()
    assert "loss <1>" in [text.text for text in svg.iter(f"{_SVG}text")]
    curves = [path for path in svg.iter(f"{_SVG}path") if path.get("fill") == "none"]
    raw = [tuple(map(float, point.split())) for point in re.findall(r"[\d.]+ [\d.]+", curves[0].attrib["d"])]
    (x1, y1), (x3, y3), (x4, y4) = raw
    assert (x3 - x1) / (x4 - x1) == pytest.approx(2 / 3, abs=1e-3)
    assert (y3 - y1) / (y4 - y1) == pytest.approx(2 / 3, abs=1e-3)
    assert x1 < x3 < x4 and y1 < y3 < y4, "a smaller loss stands lower"


def test_a_single_point_and_a_flat_series_can_be_drawn() -> None:
    for points in ([(1, 2.0)], [(1, 2.0), (2, 2.0), (3, 2.0)]):
        assert "NaN" not in draw_svg(points, title="x")
        ElementTree.fromstring(draw_svg(points, title="x"))


def test_an_unknown_metric_is_an_error_that_names_the_known_ones(metrics_file: Path) -> None:
    with pytest.raises(DataError, match=r"'los'.*loss"):
        read_series(metrics_file, "los")


def test_the_command_ends_with_a_message_for_a_missing_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main([str(tmp_path / "nowhere.jsonl"), str(tmp_path / "out.svg")])
    assert error.value.code == 2 and "nowhere.jsonl" in capsys.readouterr().err
