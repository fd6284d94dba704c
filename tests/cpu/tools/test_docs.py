"""Every code block of README and docs is run, and says what comes out."""

import re

import pytest
from documented import PAGES, ROOT, Mismatch, Reader, anchors, blocks

from dtkernels.lang.schedule import PRIMITIVES


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_blocks_say_what_is(page, tmp_path):
    assert Reader(tmp_path).read(page) == len(blocks(page))
    assert blocks(page) or page.stem in ("glossary", "configuration", "limits")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        to = page.parent / target if target else page
        assert to.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(to), f"{page.name}: {target}#{anchor}"


def test_the_reference_has_every_primitive():
    text = (ROOT / "docs" / "schedules.md").read_text()
    assert [p for p in PRIMITIVES if f"### `{p}`" not in text] == []


def test_a_block_that_is_wrong_is_found(tmp_path):
    page = tmp_path / "page.md"
    for wrong in ("```python\nprint(1)\n```\n```text\n2\n```\n", "```dt\nf[x] = 1;\n```\n", "```sh\nmake nothing\n```\n", "```python\nprint(1)\n```\n", "```\nx\n```\n",
                  "```dt\nFunc f; In A; Var x; f[x] = A[x];\n```\n```error\nnone\n```\n"):  # fmt: skip
        page.write_text(wrong)
        with pytest.raises(Mismatch):
            Reader(tmp_path).read(page)
