"""The notebooks of the documentation: run them with `python docs/notebooks.py [NAME ...]`; a hook of MkDocs shows them.

docs/notebooks/NAME.py is the source, in the percent format that editors know: `# %%` begins a cell of code, `# %% [markdown]`
one of text. NAME.ipynb is made from it and executed, and is committed with its outputs. The site shows it as the page
notebooks/NAME.md, made by `on_files` below.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"
Notebook = dict[str, Any]


def names() -> list[str]:
    """Of all notebooks."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def cells(source: str) -> list[tuple[str, str]]:
    """The kind ("markdown" or "code") and the text of each cell of a source."""
    found = []
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        mark, _, text = part.partition("\n")
        kind = "markdown" if "[markdown]" in mark else "code"
        if kind == "markdown":
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        found.append((kind, text.strip("\n")))
    return found


def executed(name: str) -> Notebook:
    """The notebook of a source, run in a new kernel in an empty folder."""
    import tempfile

    import nbformat.v4 as form
    from nbclient import NotebookClient

    book = form.new_notebook(metadata={"language_info": {"name": "python"}})
    for i, (kind, text) in enumerate(cells((FOLDER / f"{name}.py").read_text(encoding="utf-8"))):
        new = form.new_code_cell if kind == "code" else form.new_markdown_cell
        book.cells.append(new(text, id=f"{name}-{i}"))
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(book, timeout=400, kernel_name="python3", resources=resources, record_timing=False).execute()
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [tidy(output) for output in joined(cell.outputs)]
    book.metadata = {"language_info": {"name": "python"}}
    return json.loads(json.dumps(book))


def joined(outputs: list[Any]) -> list[Any]:
    """Pieces of one stream that follow each other as one output."""
    found: list[Any] = []
    for output in outputs:
        last = found[-1] if found else None
        if (
            last is not None
            and output["output_type"] == last["output_type"] == "stream"
            and output["name"] == last["name"]
        ):
            last["text"] += output["text"]
        else:
            found.append(output)
    return found


def tidy(output: Any) -> Any:
    """An output as a reader sees it: of a progress bar the last state, and of what is drawn no second form as text."""
    if output["output_type"] == "stream":
        lines = [line.split("\r")[-1].rstrip() for line in output["text"].rstrip("\n").split("\n")]
        output["text"] = "\n".join(lines) + "\n"
    elif {"image/png", "text/html"} & set(output.get("data", {})):
        output["data"].pop("text/plain", None)
    return output


def page(book: Notebook, picture: Any) -> str:
    """A notebook as Markdown.

    Args:
        book: with its outputs.
        picture: a function that keeps the bytes of a PNG and returns the link to it.
    """
    parts = []
    for cell in book["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
            continue
        parts.append(f"```python\n{cell['source']}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if output["output_type"] == "stream":
                parts.append(f"```text\n{output['text'].rstrip()}\n```")
            elif "image/png" in data:
                parts.append(f"![Output of the cell above]({picture(base64.b64decode(data['image/png']))})")
            elif "text/html" in data:
                parts.append(f'<div class="notebook-output">{one_line(data["text/html"])}</div>')
            else:
                parts.append(f"```text\n{data['text/plain'].rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def one_line(html: str) -> str:
    """HTML without empty lines, where Markdown would begin again."""
    return re.sub(r"\n\s*\n+", "\n", html.strip())


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the notebooks and their pictures to the site."""
    from mkdocs.structure.files import File

    for name in names():
        book = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
        pictures: list[bytes] = []

        def picture(content: bytes, name: str = name, pictures: list[bytes] = pictures) -> str:
            pictures.append(content)
            link = f"{name}-{len(pictures)}.png"
            files.append(File.generated(config, f"notebooks/{link}", content=content))
            return link

        files.append(File.generated(config, f"notebooks/{name}.md", content=page(book, picture)))
    return files


def main() -> None:
    """Execute the notebooks that are named, or all."""
    for name in sys.argv[1:] or names():
        text = json.dumps(executed(name), indent=1, ensure_ascii=False) + "\n"
        (FOLDER / f"{name}.ipynb").write_text(text, encoding="utf-8")
        print(f"docs/notebooks/{name}.ipynb, {len(text) // 1024} KiB")


if __name__ == "__main__":
    main()
