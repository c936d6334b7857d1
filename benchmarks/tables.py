"""Write the tables of docs/choosing.md from the JSON beside them: python -m benchmarks.tables"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def errors(result: dict) -> str:
    first, second = result["errors"]
    lines = [
        "| inverse | Hessian products | cosine | relative error | cosine, near the truth | relative error, near the truth |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for a, b in zip(first["rows"], second["rows"], strict=True):
        cells = [f"{row['cosine']:.3f} | {row['relative_error']:.2g}" for row in (a, b)]
        lines.append(f"| {a['inverse']} | {a['hvps']} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def cost(result: dict) -> str:
    lines = ["| method | ms an outer step | ratio to the floor |", "| --- | --- | --- |"]
    lines += [f"| {row['method']} | {row['milliseconds']:.1f} | {row['ratio']:.2f} |" for row in result["cost"]]
    return "\n".join(lines)


def filled(page: str, name: str, table: str) -> str:
    pattern = rf"<!-- table: {name} -->\n(?:\n\|[^\n]*(?:\n\|[^\n]*)*\n)?"
    return re.sub(pattern, f"<!-- table: {name} -->\n\n{table}\n", page)


def main() -> None:
    result = json.loads((ROOT / "benchmarks/results/cleaning-inverses-h200.json").read_text(encoding="utf-8"))
    page = ROOT / "docs/choosing.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(filled(filled(text, "errors", errors(result)), "cost", cost(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
