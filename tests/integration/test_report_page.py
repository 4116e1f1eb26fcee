"""The page of a report in a real browser without a window: what it shows, what its filters leave, and that no text of a model is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import needs
import pytest
from test_report import create_record

from integration.report.page import read_report, render
from rollouts.data.records import Estimate, TrajectoryRecord
from rollouts.data.trajectories import write_records
from rollouts.steps import StepData
from tools.docs.chromium import Page, open_chromium

pytestmark = [pytest.mark.slow, needs.CHROMIUM]

ATTACK = "\u202egnp\x1b[31m</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def write_run(path: Path, *, response: str = "answer") -> Path:
    """Write a run with two steps of two groups; the second group of each has equal rewards, and the last step an episode."""
    for step in (1, 2):
        records: list[TrajectoryRecord] = []
        for k in range(4):
            reward, advantage, rewards = ((0.0, -1.0, (0.0, 1.0)), (1.0, 1.0, (0.0, 1.0)), (0.0, 0.0, (0.0, 0.0)), (0.0, 0.0, (0.0, 0.0)))[
                k
            ]
            index, group = 4 * step + k, 2 * step + k // 2
            records.append(create_record(index, group, reward, advantage, rewards, response=f"{response} {index}"))
        if step == 2:
            played = StepData(
                system_step_index=0, observation_data="a room <b>", action_taken="go", raw_policy_output="go", base_reward=0.5
            )
            records.append(TrajectoryRecord(sample=create_record(12, 6, 0.5, None, ()).sample, steps=(played,)))
        write_records(path / "rl" / "trajectories" / f"step_{step:04d}.jsonl", records)
    (path / "metrics.jsonl").write_text("".join(f'{{"step": {k}, "stage": "rl", "reward_mean": {k / 10}}}\n' for k in range(1, 13)))
    (path / "summary.json").write_text('{"warnings": ["all rewards were equal <b>"]}')
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with open_chromium() as opened:
        yield opened


Look = Callable[..., tuple[str, str]]


@pytest.fixture
def look(browser: Page) -> Look:
    """Open a page in Chromium, and wait until it is drawn."""

    def open_page(page: Path, state: str, *, width: int = 1200, phone: bool = False, dark: bool = False) -> tuple[str, str]:
        """Return what is shown, as HTML, and the console. state: the part of the address behind #."""
        browser.resize(width, 900, phone=phone, dark=dark)
        browser.open(f"file://{page}#{state}", until="document.getElementById('main').dataset.drawn")
        shown = re.sub(r"<script.*?</script>", "", browser.ask("document.documentElement.outerHTML"), flags=re.DOTALL)
        return shown, "\n".join(browser.console)

    return open_page


def rows_of(document: str) -> list[str]:
    return re.findall(r'data-row="([\d-]+)"', document)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("report") / "mine", response=ATTACK)
    path = run / "report.html"
    path.write_text(render(read_report([run], max_tokens=0)))
    return path


def test_curves_are_drawn_without_an_error(page: Path, look: Look):
    document, console = look(page, "tab=curves")
    assert console == "" and 'data-drawn="curves"' in document
    assert re.findall(r'data-metric="(\w+)"', document) == ["reward_mean"] and "<canvas" in document
    assert "RL: still learning" in document and "warning: all rewards were equal &lt;b&gt;" in document


def test_the_reason_of_a_group_is_on_top_of_it(page: Path, look: Look):
    document, console = look(page, "tab=rollouts&step=1&group=3")
    assert console == "" and len(rows_of(document)) == 2
    assert "No gradient: all 2 rewards of the group are 0" in document and "The other 1 of the group, side by side" in document


def test_subgroups_have_headings_and_reasons_of_their_own(tmp_path: Path, look: Look):
    first = [create_record(k, 5, float(k == 0), (1.0, 0.0, -1.0)[k // 2], (1.0, 0.0, 0.0), subgroup="first") for k in (0, 2, 4)]
    second = [create_record(k, 5, 1.0, 0.0, (1.0, 1.0, 1.0), subgroup="<b>") for k in (1, 3, 5)]
    write_records(tmp_path / "rl" / "trajectories" / "step_0001.jsonl", [*first, *second])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "stage": "rl", "reward_mean": 0.5}\n')
    page = tmp_path / "report.html"
    page.write_text(render(read_report([tmp_path], max_tokens=0)))
    document, console = look(page, "tab=rollouts&group=5&pick=0-3")
    assert console == "" and len(rows_of(document)) == 6
    assert document.count("step 1, group 5, subgroup &lt;b&gt;: no gradient</div>") == 1
    assert "step 1, group 5, subgroup first</h2>" in document and "Group 5, subgroup first has a gradient" in document
    assert "The other 2 of the subgroup, side by side" in document and "No gradient" not in document


@pytest.mark.parametrize(
    ("state", "rows"),
    [
        ("step=1", 4),
        ("step=", 9),
        ("step=2", 5),
        ("step=&min=0.75", 2),
        ("step=&max=0.25", 6),
        ("step=&search=answer+", 1),  # the episode
        ("step=&search=nowhere", 0),
        ("step=&search=4", 1),  # "sample 4" is the only response with a 4: the others have 5 to 11
        ("step=&group=6", 1),
        ("step=1&status=truncated", 0),
        ("step=1&gradient=none", 2),
        ("step=1&gradient=some", 2),
    ],
)
def test_filters_filter(page: Path, state: str, rows: int, look: Look):
    document, console = look(page, f"tab=rollouts&{state}")
    assert console == "" and len(rows_of(document)) == rows, state
    assert ("No rollout passes these filters" in document) == (rows == 0)


def test_text_of_a_model_is_shown_and_never_run(page: Path, look: Look):
    document, console = look(page, "tab=rollouts&step=1&group=2")
    assert "owned" not in re.findall("<title>(.*?)</title>", document)[0] and console == ""
    assert "<img" not in document, "the text has made no element"
    assert "&lt;/script&gt;&lt;script&gt;" in document and "&lt;U+202E&gt;" in document and "&lt;U+001B&gt;" in document


def test_an_episode_is_shown_step_by_step(page: Path, look: Look):
    document, _ = look(page, "tab=rollouts&step=2&group=6")
    assert "step 1, reward 0.5" in document and "a room &lt;b&gt;" in document


def test_clipped_tokens_are_found_and_explained(page: Path, look: Look):
    document, console = look(page, "tab=rollouts&step=&order=clipped&color=reason")
    assert console == "" and "most clipped tokens" in document and "clipped or left out:" in document
    assert (
        "1 token clipped or left out" in document
        and "The update clipped or left out 1 of its 2 tokens: clip_high 1 (too frequent already)." in document
    )
    first = re.findall(r'aria-label="sample (\d+), reward', document)[0]
    assert int(first) % 2, "those with a clipped token are first"


def test_clipped_tokens_are_coloured_where_the_list_is_about_them(page: Path, look: Look, browser: Page):
    document, _ = look(page, "tab=rollouts&step=&order=clipped")
    assert "clip_high: too frequent already" in document and "Colour the clipped tokens" not in document, "the legend of the reasons"
    look(page, "tab=rollouts&step=2&group=4&color=version")
    browser.ask("document.getElementById('color-clipped').click()")
    browser.wait("document.querySelector('.legend').textContent.startsWith('clipped or left out')")


def test_a_step_without_clipped_tokens_says_which_steps_have_some(tmp_path: Path, look: Look, browser: Page):
    for step, index in ((1, 3), (2, 4), (3, 6)):
        records = [create_record(index, step, 1.0, 0.5, (0.0, 1.0))]  # an odd one has a clipped token
        write_records(tmp_path / "rl" / "trajectories" / f"step_{step:04d}.jsonl", records)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "stage": "rl", "reward_mean": 0.5}\n')
    page = tmp_path / "report.html"
    page.write_text(render(read_report([tmp_path], max_tokens=0)))
    document, console = look(page, "tab=rollouts&order=clipped")
    assert console == "" and "The update clipped no token of these rollouts, but some of 1 of step 1." in document
    browser.ask("[...document.querySelectorAll('.note button')].find((b) => b.textContent === 'Show all steps').click()")
    browser.wait("document.querySelectorAll('[data-row]').length === 3")
    assert "1 clipped" in browser.ask("document.querySelector('[data-row]').textContent")
    assert "clipped no token" not in browser.ask("document.getElementById('main').textContent")


def test_a_group_that_is_not_shown_is_accounted_for(page: Path, look: Look, browser: Page):
    document, _ = look(page, "tab=rollouts&step=1&group=3")
    assert "step 1, group 3: no gradient" in document
    document, _ = look(page, "tab=rollouts&step=1&group=77")
    assert "Group 77 is not among the recorded ones of step 1: 2, 3. A run with --trajectories.every 1 records all groups." in document
    document, _ = look(page, "tab=rollouts&step=2&group=3")
    assert "2 of step 1 do." in document
    browser.ask("[...document.querySelectorAll('.sheets button')].find((b) => b.textContent === 'Show all steps').click()")
    browser.wait("document.querySelectorAll('[data-row]').length === 2")


@pytest.mark.parametrize(("width", "height"), [(1200, 900), (390, 500)])
def test_the_explanation_of_a_token_stays_inside_the_window(page: Path, look: Look, browser: Page, width: int, height: int):
    look(page, "tab=rollouts&step=1&group=2&color=reason", width=width, phone=width < 400)
    browser.resize(width, height, phone=width < 400)
    browser.ask(
        "(() => { const span = document.querySelectorAll('.tokens span')[1]; span.scrollIntoView({ block: 'end', behavior: 'instant' }); "
        "span.click(); })()"
    )
    browser.wait("!document.getElementById('tip').hidden")
    top, bottom = browser.ask("(() => { const r = document.getElementById('tip').getBoundingClientRect(); return [r.top, r.bottom]; })()")
    assert top >= 0 and bottom <= height, (top, bottom)


def test_every_stage_has_its_curves(tmp_path: Path, look: Look):
    stages = ("sft", "dpo", "rl", "reward_model")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {k}, "stage": "{s}", "loss": {k}}}\n' for s in stages for k in (1, 2)))
    page = tmp_path / "report.html"
    page.write_text(render(read_report([tmp_path], max_tokens=0)))
    document, console = look(page, "tab=curves")
    assert console == "" and re.findall(r"<h2>([\w ]+), by step</h2>", document) == ["RL", "DPO", "SFT", "REWARD MODEL"]
    assert len(re.findall(r'data-metric="loss"', document)) == 4


def test_settings_and_phones_are_shown(page: Path, look: Look, browser: Page):
    document, console = look(page, "tab=settings", width=390, phone=True)
    assert console == "" and 'data-drawn="settings"' in document
    for tab in ("curves", "rollouts", "settings"):
        look(page, f"tab={tab}", width=390, phone=True, dark=True)
        assert browser.ask("document.documentElement.scrollWidth") <= 390, f"{tab} is wider than a phone"
        assert browser.ask("document.documentElement.dataset.theme") == "dark"


def test_keys_move_between_rollouts_and_explain_tokens(page: Path, look: Look, browser: Page):
    look(page, "tab=rollouts&step=1")
    first = browser.ask("document.querySelector('[aria-current=true]').dataset.row")
    browser.press("j")
    browser.wait(f"document.querySelector('[aria-current=true]').dataset.row !== {first!r}")
    browser.ask("document.querySelector('.tokens').focus()")
    browser.press("ArrowRight")
    browser.wait("!document.getElementById('tip').hidden")
    assert browser.ask("document.getElementById('tip').textContent").startswith("token 1:"), "the prompt has a box of its own"
    browser.press("ArrowRight")
    assert browser.ask("document.getElementById('tip').textContent").startswith("token 2:") and browser.console == []


def test_a_page_that_is_never_drawn_is_told_with_its_errors(tmp_path: Path, browser: Page):
    broken = tmp_path / "broken.html"
    broken.write_text("<main id=main></main><script>nonsense()</script>")
    with pytest.raises(TimeoutError, match=r"is not true after 0\.5 s; console: .*nonsense is not defined"):
        browser.open(f"file://{broken}", until="document.getElementById('main').dataset.drawn", timeout_s=0.5)


def test_many_rollouts_of_a_thousand_tokens_stay_usable(tmp_path: Path, look: Look):
    """The page of 2,000 rollouts holds what fits, and says so."""
    long: dict[str, Any] = {"tokens": (5,) * 1000, "loss_mask": (0.0,) + (1.0,) * 999, "rollout_log_probs": (-0.5,) * 1000}
    long |= {"weight_versions": (1,) * 1000, "response": "x" * 1000}
    for step in range(1, 5):
        records = [replace(create_record(k, k // 8, float(k % 2), None, (), **long), estimate=_estimate(k)) for k in range(500)]
        write_records(tmp_path / "big" / "rl" / "trajectories" / f"step_{step:04d}.jsonl", records)
    (tmp_path / "big" / "metrics.jsonl").write_text('{"step": 1, "stage": "rl", "reward_mean": 0.5}\n')
    report = read_report([tmp_path / "big"], max_tokens=200_000)
    assert report.chosen[0].num_shown == 192 and report.chosen[0].num_total == 2_000
    page = tmp_path / "big.html"
    page.write_text(render(report))
    assert page.stat().st_size < 3e6
    document, console = look(page, "tab=rollouts")
    assert console == "" and "192 of the 2,000 recorded rollouts" in document and len(rows_of(document)) == 48


def _estimate(k: int) -> Estimate:
    return Estimate(reward=float(k % 2), advantages=(0.0,) + (k % 2 - 0.5,) * 999, group_rewards=(0.0, 1.0) * 4)
