"""The loop of a reward model, cancelled at scheduling points, goes on in its directory: as experiment E18 does, at fewer points."""

from __future__ import annotations

from pathlib import Path

from benchmarks.reliability.interruptions import PLACES, cancel_and_go_on


def test_a_run_that_is_cancelled_at_any_point_goes_on_in_its_directory(tmp_path: Path):
    (place,) = [place for place in PLACES if place.loop == "reward_model"]
    points = 0
    for point in range(1, 40, 5):
        found = cancel_and_go_on(place, tmp_path / "now", point, steps=6)
        points += found.pop("points")
        assert not any(found.values()), f"cancelled at point {point}: {found}"
    assert points > 4
