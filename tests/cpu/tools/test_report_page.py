"""The report's page as a person uses it, in Chromium at two widths: sort, search, filter; nothing is loaded, nothing overflows."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

from chromium import Page, chromium  # noqa: E402
from reporting.benchmark_runs import Benchmarks  # noqa: E402
from reporting.page import page  # noqa: E402
from reporting.study import Study  # noqa: E402

BROWSER = chromium()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium): the report's page is not tried in a browser")
WIDTHS = (390, 1280)
SHIPPED = sorted((ROOT / "docs" / "report").glob("*/index.html"))
#: op, shape, dtype, direction, ours, best peer
CALLS = [
    ("attention", "B4H32M128S128D64 causal", "bfloat16", "forward", 10.0, 20.0),
    ("attention", "B4H32M1280S1280D64 causal", "bfloat16", "backward", 1234.0, 617.0),
    ("attention", "B4H32M4096S4096D128 causal", "bfloat16", "backward", 9.0, 9.0),
    ("softmax", "4096x1024", "float32", "forward", 128.0, None),
    ("softmax", "8192x1024", "bfloat16", "forward", 90.0, 81.0),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A page of five calls, without pictures."""
    figures = []
    for op, shape, dtype, direction, ours, peer in CALLS:
        call = {"op": op, "shape": shape, "dtype": dtype, "direction": direction}
        figures += [{**call, "who": who, "microseconds": time} for who, time in (("dtkernels", ours), ("sdpa", peer)) if time]
    study = Study({"gpu": "GPU X"}, [], 4e12, Benchmarks([{"command": "tools/bench.py", "figures": figures}]))
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(page(study, [], {}, {}, "python tools/report.py"))
    return path


@pytest.fixture(params=WIDTHS)
def opened(made, request):
    with Page(BROWSER, made, request.param) as found:
        yield found
        assert found.requests == [made.resolve().as_uri()], "nothing but the page itself is asked for"
        assert found.errors == []


def cells(opened: Page, column: int) -> list[str]:
    """What stands in a column of the rows that are shown, from above."""
    return opened.value(f"[...document.querySelectorAll('#calls tbody tr')].filter(r => r.getBoundingClientRect().height).map(r => r.cells[{column}].textContent)")


def sorting(opened: Page) -> list[str]:
    return opened.value("[...document.querySelectorAll('#calls th')].map(h => h.getAttribute('aria-sort'))")


def shown(opened: Page) -> str:
    return opened.value("document.getElementById('shown').textContent")


def test_a_click_on_a_header_sorts(opened):
    header = "#calls th:nth-child(5) button"
    opened.click(header)
    assert cells(opened, 4) == ["9.0", "10.0", "90.0", "128.0", "1,234"] and sorting(opened)[4] == "ascending"
    opened.click(header)
    assert cells(opened, 4) == ["1,234", "128.0", "90.0", "10.0", "9.0"] and sorting(opened)[4] == "descending"
    for expected in (["0.50", "0.90", "1.00", "2.00"], ["2.00", "1.00", "0.90", "0.50"]):
        opened.click("#calls th:nth-child(8) button")
        assert [t.split()[1] for t in cells(opened, 7)[:4]] == expected and cells(opened, 7)[4] == "\N{EM DASH}", "what has no peer comes last either way"
    assert sorting(opened).count("none") == 9


def test_the_keyboard_sorts_and_sizes_sort_as_numbers(opened):
    opened.value("document.querySelector('#calls th:nth-child(4) button').focus()")
    opened.press("Enter", 13, "\r")
    assert cells(opened, 3) == ["4096 x 1024", "8192 x 1024", "batch 4, heads 32, 128 x 128, 64 columns, causal", "batch 4, heads 32, 1280 x 1280, 64 columns, causal",
                                "batch 4, heads 32, 4096 x 4096, 128 columns, causal"]  # fmt: skip
    assert sorting(opened)[3] == "ascending"


def test_words_filter(opened):
    assert shown(opened) == "5 of 5 rows; 4 with a measured peer: geometric mean of the ratio 0.97, 1 faster, 1 same, 2 slower"
    opened.click("#words")
    opened.write("attention backward causal 128")
    assert cells(opened, 3) == ["batch 4, heads 32, 4096 x 4096, 128 columns, causal"], "128 is not 1280"
    assert shown(opened) == "1 of 5 rows; 1 with a measured peer: geometric mean of the ratio 1.00, 0 faster, 1 same, 0 slower"
    opened.click("#filters button")
    assert len(cells(opened, 0)) == 5
    for words, count in (("4096x1024", 1), ("1024 x 8192", 1), ("SLOWER", 2), ("fp32", 1), ("128 softmax", 0), ("<b>", 0)):
        opened.value(f"document.getElementById('words').value = {words!r}; document.getElementById('filters').dispatchEvent(new Event('input'))")
        assert len(cells(opened, 0)) == count, words


def test_choices_filter(opened):
    def choose(**wanted: str) -> list[str]:
        for name, value in wanted.items():
            opened.value(f"document.querySelector('select[name={name}]').value = {value!r}; document.getElementById('filters').dispatchEvent(new Event('input'))")
        return cells(opened, 4)

    assert choose(op="softmax") == ["90.0", "128.0"] and choose(dtype="fp32") == ["128.0"]
    assert shown(opened) == "1 of 5 rows; none with a measured peer"
    assert choose(op="", dtype="", direction="backward") == ["1,234", "9.0"] and choose(result="slower") == ["1,234"]
    assert choose(direction="", result="any") == ["10.0", "1,234", "9.0", "90.0"] and choose(result="none") == ["128.0"]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_on_its_colour_can_be_read(made, width, theme):
    """The contrast of WCAG AA, 4.5, of each text with what lies behind it; the ratio is said by a sign and a word too."""
    with Page(BROWSER, made, width) as opened:
        opened.theme(theme)
        lowest = opened.value("""(() => {
          const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                                 return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
          return Math.min(...[...document.querySelectorAll('td, th, p, .key, summary, label')].map((e) => {
            const [a, b] = [light(getComputedStyle(e).color), light(behind(e))]; return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); })); })()""")
        assert lowest >= 4.5
        assert cells(opened, 7)[0] == "\N{BLACK UP-POINTING TRIANGLE} 2.00 faster"


def test_without_javascript_it_is_a_plain_table(made):
    with Page(BROWSER, made, 1280, script=False) as opened:
        assert len(cells(opened, 0)) == 5 and shown(opened).startswith("5 rows; 4 with a measured peer: geometric mean of the ratio 0.97")
        assert opened.value("document.getElementById('filters').getBoundingClientRect().height") == 0
        assert opened.value("document.querySelector('#calls button')") is None


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.parent.name)
def test_the_shipped_page_fits_and_loads_nothing(path, width):
    with Page(BROWSER, path, width) as opened:
        wide, room = opened.value("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= room <= width, "no scrolling sideways"
        inside = opened.value("[document.getElementById('calls').scrollWidth, document.getElementById('calls').clientWidth]")
        assert inside[0] <= inside[1], "every column of the first table is seen"
        rows = len(cells(opened, 0))
        assert rows > 100 and shown(opened).startswith(f"{rows} of {rows} rows; ")
        opened.click("#calls th:nth-child(8) button")
        ratios = [float(t.split()[1]) for t in cells(opened, 7) if t != "\N{EM DASH}"]
        assert ratios == sorted(ratios) and ratios
        assert opened.requests == [path.resolve().as_uri()] and opened.errors == []
