"""The page of a comparison in headless Chromium."""

from __future__ import annotations

import pytest

import nhgd
from nhgd.report import report
from tests import browser as browsers

pytestmark = [pytest.mark.slow, pytest.mark.skipif(browsers.missing() is not None, reason=str(browsers.missing()))]
METHODS = {"aid-cg": "aid-cg", "</script><script>alert('\"&<b>')</script>": "soba", "ttsa": "ttsa"}


@pytest.fixture(scope="module")
def table():
    return nhgd.bench("quadratic", methods=METHODS, seeds=2, budget="60g", settings={"outer_lr": [0.03, 0.1]})


@pytest.fixture(scope="module")
def page(table, tmp_path_factory):
    place = tmp_path_factory.mktemp("page")
    (place / "bench.json").write_text(table.to_json())
    return report(place)


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browsers.browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


def test_it_renders_without_a_complaint_or_a_request(window, page):
    window.open(page)
    assert window.run("return document.querySelectorAll('svg.chart path.line').length") >= 2 * len(METHODS)
    box = window.run(
        "const b = document.querySelector('svg.chart').getBoundingClientRect(); return [b.width, b.height]"
    )
    assert min(box) > 200
    assert window.complaints() == []
    assert window.requests() == []


@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_of_a_sweep_renders_on_any_screen(window, tmp_path, width):
    pytest.importorskip("optuna")
    nhgd.sweep("quadratic", "soba", trials=8, budget="60g", out=tmp_path)
    window.open(report(tmp_path), width=width)
    assert (
        len(
            window.run(
                "return [...document.querySelectorAll('table')[0].tBodies[0].rows].map(row => row.cells[0].textContent)"
            )
        )
        == 8
    )
    assert window.run("return [...document.images].every(image => image.naturalWidth > 400)")
    shown = "return [...document.querySelectorAll('.picture img')].map(image => image.getBoundingClientRect().width)"
    assert window.run(shown)
    assert min(window.run(shown)) >= 400  # what is written in it can be read, by scrolling if need be
    assert window.run("return document.documentElement.scrollWidth") <= width
    assert window.complaints() == []
    assert window.requests() == []


def test_its_table_sorts_both_ways(window, page, table):
    window.open(page)
    name = table.about["headline"].replace("_", " ")
    script = """
        const table = document.querySelector('table'), heads = [...table.querySelectorAll('thead button')];
        heads.find(head => head.textContent === arguments[0]).click();
        return [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
    """
    means = {row["method"]: row["mean"] for row in table.summary if row["metric"] == table.about["headline"]}
    rising = sorted(means, key=means.__getitem__)
    assert window.run(script, name) == rising
    assert window.run(script, name) == rising[::-1]
    assert window.run("return document.querySelectorAll('[aria-sort=descending]').length") == 1
    assert window.run(script, "method") == sorted(METHODS, key=str.lower)


def test_a_method_is_switched_off_and_on_by_mouse_and_keyboard(window, page):
    window.open(page)
    shown = """
        return [...document.querySelectorAll('svg.chart [data-line="1"]')].filter(g => g.getClientRects().length).length
    """
    before = window.run(shown)
    assert before >= 2
    window.click('.switch[data-of="1"]')
    assert window.run(shown) == 0
    assert window.run("return document.querySelector('.switch[data-of=\"0\"]').ariaPressed") == "true"
    window.run("document.querySelector('.switch[data-of=\"1\"]').focus()")
    window.press(" ")
    assert window.run(shown) == before


def test_another_metric_can_be_chosen(window, page):
    window.open(page)
    found = window.run("""
        const select = document.querySelector('select.metric');
        select.value = select.options[1].value;
        select.dispatchEvent(new Event('change'));
        return [select.value, [...document.querySelectorAll('.panels')].filter(p => p.getClientRects().length).map(p => p.dataset.metric)];
    """)
    assert found[1] == [found[0]]


def test_light_and_dark(window, page):
    """As the system says, until the button says otherwise."""
    ground = "return getComputedStyle(document.body).backgroundColor"
    window.open(page)
    light = window.run(ground)
    window.open(page, dark=True)
    dark = window.run(ground)
    assert light != dark
    window.click(".theme")
    assert window.run(ground) == light
    window.click(".theme")
    assert window.run(ground) == dark
    assert window.complaints() == []


@pytest.mark.parametrize("width", [320, 390, 768, 1400])
def test_no_width_scrolls_sideways(window, page, width):
    window.open(page, width=width)
    assert window.run("return document.documentElement.scrollWidth") <= width
    # Not only hidden: nothing but the inside of a scrolling table reaches beyond the right edge.
    beyond = window.run("""
        return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .hidden, .skip, details:not([open])')
          && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80));
    """)
    assert beyond == []


def test_every_control_can_be_reached_and_has_a_name(window, page):
    window.open(page)
    nameless = window.run("""
        return [...document.querySelectorAll('button, select, summary, a')].filter(e => !e.hidden
          && !(e.textContent.trim() || e.labels?.length)).length;
    """)
    assert nameless == 0
    assert window.run("return document.querySelectorAll('[tabindex]:not([tabindex=\"0\"])').length") == 0
    assert window.run("return document.documentElement.lang") == "en"
