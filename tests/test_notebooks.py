"""The notebooks of the documentation: what is committed was made from their sources, and still comes out."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
SPEC = importlib.util.spec_from_file_location("notebooks", DOCS / "notebooks.py")
assert SPEC is not None
assert SPEC.loader is not None
notebooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notebooks)


def committed(name):
    return json.loads((DOCS / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))


def outputs(book):
    return [output for cell in book["cells"] for output in cell.get("outputs", [])]


def said(book):
    return "".join(output.get("text", "") for output in outputs(book))


def test_there_is_one_for_each_application():
    assert set(notebooks.names()) >= {"cleaning", "distillation", "pde"}


@pytest.mark.parametrize("name", notebooks.names())
class TestCommitted:
    def test_the_cells_are_those_of_the_source(self, name):
        source = notebooks.cells((DOCS / "notebooks" / f"{name}.py").read_text(encoding="utf-8"))
        assert [(cell["cell_type"], cell["source"]) for cell in committed(name)["cells"]] == source

    def test_every_cell_was_run_in_order_without_a_complaint(self, name):
        book = committed(name)
        ran = [cell["execution_count"] for cell in book["cells"] if cell["cell_type"] == "code"]
        assert ran == list(range(1, len(ran) + 1))
        assert {output["output_type"] for output in outputs(book)} <= {"stream", "display_data", "execute_result"}
        assert not any(output.get("name") == "stderr" for output in outputs(book))

    def test_it_is_small_and_names_no_machine(self, name):
        text = json.dumps(committed(name))
        assert len(text) < 400_000
        prose = re.sub(r'"image/png": "[^"]*"', "", text)
        assert not re.search(r"/(?:work|tmp|home|root|usr|opt)/|<\w+ object at 0x", prose)

    def test_it_shows_a_bar_of_text_a_table_and_a_picture(self, name):
        kinds = {kind for output in outputs(committed(name)) for kind in output.get("data", {})}
        assert {"image/png"} <= kinds
        assert "█ 100 %" in said(committed(name))

    def test_the_page_of_the_site_has_all_of_it(self, name):
        book, pictures = committed(name), []
        page = notebooks.page(book, lambda content: pictures.append(content) or f"{len(pictures)}.png")
        assert page.count("```python") == sum(cell["cell_type"] == "code" for cell in book["cells"])
        assert all(content.startswith(b"\x89PNG") for content in pictures)
        assert page.count("![") == len(pictures) == page.count(".png)")
        assert page.startswith("# Notebook: ")

    @pytest.mark.slow
    def test_it_runs_and_says_the_same(self, name):
        pytest.importorskip("nbclient")
        pytest.importorskip("ipykernel")
        numbers = [
            [
                float(n)
                for n in re.findall(r"\d+\.\d+(?:e-?\d+)?", re.sub(r"^.*█.*$", "", said(book), flags=re.MULTILINE))
            ]
            for book in (notebooks.executed(name), committed(name))
        ]
        assert len(numbers[0]) >= 3
        assert numbers[0] == pytest.approx(numbers[1], rel=0.25, abs=0.03)


def test_of_a_bar_the_last_state_is_kept():
    text = {"output_type": "stream", "text": "\rrun ░ 0 %  \rrun █ 100 %   \nafter\n"}
    assert notebooks.tidy(text)["text"] == "run █ 100 %\nafter\n"


def test_empty_lines_do_not_end_a_block_of_html():
    assert notebooks.one_line("<div>\n\n  <p>a</p>\n \n</div>\n") == "<div>\n  <p>a</p>\n</div>"
