"""What the pages in docs/ say, against the methods, the warnings and the code they speak of."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import nhgd
from nhgd.algorithm import names, resolve
from nhgd.paper import INNER_STEPS, OPEN, TABLE
from nhgd.task import Quadratic

ROOT = Path(__file__).parents[1]
PAGE, TROUBLE = ROOT / "docs" / "methods.md", ROOT / "docs" / "troubleshooting.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks/parallel.md",
]
COUNTED = ("inner_gradients", "outer_gradients", "hvps", "cross")
SYMBOLS = ("eta", "alpha", "M", "beta", "phi", "K", "B", "mu", "c_in", "c_out")


def text() -> str:
    return PAGE.read_text()


def rows(title: str) -> dict[str, list[str]]:
    """The cells of the table under a title, by the name of the method."""
    table = text().split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {name.strip("`"): [cell.strip() for cell in cells] for name, *cells in lines}


METHODS, GUARANTEES = rows("The methods"), rows("Guarantees")
COSTS, MEMORY = rows("Gradients and products of an outer step"), rows("Memory and batches")


def settings_table(task: str) -> list[str]:
    """The paper's settings on one task, as the page shows them."""
    used = [s for s in SYMBOLS if any(getattr(row, s) for row in TABLE[task].values())]
    lines = ["| method | " + " | ".join(used) + " | inner steps |", "| --- " * (len(used) + 2) + "|"]
    for method, row in TABLE[task].items():
        shown = [f"{getattr(row, s):g}" if getattr(row, s) else "" for s in used]
        if method == "nhgd-paper" and not row.beta and "beta" in used:
            shown[used.index("beta")] = "0, impossible"
        steps = "" if method in ("ttsa", "soba") else str(INNER_STEPS[task])
        lines.append(f"| `{method}` | " + " | ".join(shown) + f" | {steps} |")
    return lines


def test_no_method_is_missing_and_none_is_invented():
    aid = text().split("goes with every inverse")[1].split("\n\n")[0]
    listed = set(METHODS) | set(re.findall(r"`(aid-\w+)`", aid))
    assert listed == set(names())


def test_every_row_is_complete():
    assert METHODS.keys() == GUARANTEES.keys() == COSTS.keys() == MEMORY.keys()
    for name in METHODS:
        for table, width in ((METHODS, 2), (GUARANTEES, 1), (COSTS, 4), (MEMORY, 2)):
            assert len(table[name]) == width, name
            assert all(table[name]), name


def test_every_reference_is_given_and_used():
    table, references = text().split("## References")
    cited = {int(n) for n in re.findall(r"\[(\d+)\]", table)}
    given = {int(n) for n in re.findall(r"^(\d+)\. ", references, flags=re.MULTILINE)}
    assert cited == given


def value(term: str, symbols: dict[str, float]) -> tuple[float, float] | None:
    """The least and the most that a term allows, or None where it is words."""
    term = term.split(" = ")[0]
    bounds = []
    for word in ("0 * ", "1 * "):  # "up to x" and "at most x" are anything from nothing to x
        one = re.sub(r"(?:up to|at most) (\w+|\(.*?\))", word + r"(\1)", term)
        one = re.sub(r"(\d) (\(|[A-Z])", r"\1 * \2", one)
        one = re.sub(r"(\)|T|K) (\(|sqrt)", r"\1 * \2", one)
        if not re.fullmatch(r"(?:sqrt|[TKMNQRnk\d+\-*() ])+", one):
            return None
        bounds.append(float(eval(one, {"sqrt": lambda x: x**0.5, **symbols})))
    return bounds[0], bounds[1]


@pytest.mark.parametrize("name", sorted(set(names()) - {n for n in names() if n.startswith("aid-")}))
def test_costs_are_what_the_counters_say(name):
    """Nine outer steps after the first, with four inner steps and three batches."""
    instance = Quadratic.preset("quick").with_settings({"batch": 20}).build(0, torch.device("cpu"))
    settings = instance.solver_settings() | {"inner_steps": 4, "inner_lr": 0.2, "outer_lr": 1e-3}
    solver = nhgd.Solver(instance.problem, instance.inner_data, instance.outer_data, method=name, **settings)
    method, before, checked = resolve(name), solver.step(), 0
    for k in range(1, 10):
        after = solver.step()
        batches = getattr(method, "batches", 1)
        symbols = {"T": 4, "K": getattr(method, "K", 0), "k": k, "n": min(getattr(method, "truncate", 0) or 0, 4)}
        symbols["M"] = batches if isinstance(batches, int) else 1
        symbols["N"] = 1  # of fewer than ten inner steps
        symbols["R"] = 2  # one further pass of a record, or two
        symbols["Q"] = after["products"] if name.startswith("ttsa") else 0
        if name == "vrbo" and (k + 1) % method.q == 0:
            continue  # the correction before a large batch is left out
        for counter, term in zip(COUNTED, COSTS[name], strict=True):
            allowed = value(term, symbols)
            if allowed is None:
                continue
            low, high = allowed
            assert low - 1 < after[counter] - before[counter] < high + 1, (counter, term)
            checked += 1
        before = after
    assert checked >= 24  # of 36: not a table of words


def test_exact_costs_are_exact():
    """Where nothing is random, a term has one value, so that the test above means equality."""
    exact = [name for name in COSTS if all(value(t, dict.fromkeys("TKMNQRnk", 3)) for t in COSTS[name])]
    fixed = [n for n in exact if all(len(set(value(t, dict.fromkeys("TKMNQRnk", 3)))) == 1 for t in COSTS[n])]
    assert {"soba", "itd", "truncated", "f2sa", "bome", "amigo", "stocbio", "mrbo", "vrbo", "fsla", "saba"} <= set(
        fixed
    )


@pytest.mark.parametrize("task", TABLE)
def test_the_settings_of_the_paper_are_those_of_the_table(task):
    shown = text().split(f"### {task}\n\n")[1].split("\n\n")[0]
    assert shown.splitlines() == settings_table(task)


def test_what_the_paper_leaves_open_is_said():
    said = " ".join(text().split())
    for name, sentence in OPEN.items():
        assert f"- **{name}.** {sentence}" in said


def rendered(node: ast.expr) -> str:
    """A string of the source, with ... for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(rendered(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return rendered(node.left) + rendered(node.right)
    return "..."


@cache
def strings() -> str:
    """Every string of the library but its docstrings, one a line."""
    found = []
    for file in sorted((ROOT / "nhgd").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        alone = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
        found += [rendered(n) for n in ast.walk(tree) if isinstance(n, kinds) and id(n) not in alone]
    return "\n".join(line.replace("\n", " ") for line in found)


@pytest.mark.parametrize("sentence", re.findall(r"^> (.+)$", TROUBLE.read_text(encoding="utf-8"), flags=re.MULTILINE))
def test_the_library_says_what_the_page_quotes(sentence):
    pattern = ".*?".join(re.escape(part) for part in sentence.split("..."))
    assert re.search(pattern, strings()), sentence


def test_every_warning_of_the_library_is_explained():
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "nhgd").rglob("*.py"))
    warnings = set(re.findall(r"^class (\w+Warning)\(", source, flags=re.MULTILINE))
    assert len(warnings) >= 9
    assert warnings <= set(re.findall(r"\w+Warning", TROUBLE.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """The places in a page that a link can name, as GitHub makes them of its titles."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", prose):
        if target.startswith("http"):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), (target, anchor)


def blocks(name: str, language: str = "python") -> list[str]:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def cosines(table: str) -> dict[str, float]:
    """The first column of numbers in a table of `check`, by inverse."""
    return {name: float(c) for name, c in re.findall(r"^(\w+) +(-?\d\.\d{4}) ", table, flags=re.MULTILINE)}


def test_the_example_of_choosing_runs_and_finds_what_the_page_shows():
    space: dict[str, object] = {}
    for block in blocks("choosing.md"):
        exec(compile(block, "choosing.md", "exec", dont_inherit=True), space)
    shown = cosines(blocks("choosing.md", "text")[0])
    assert shown.keys() == {"kfac", "refined", "cg", "identity"}
    assert cosines(str(space["report"])) == pytest.approx(shown, abs=0.01)
    assert {row["inverse"] for row in space["along"].rows} == {"kfac of the run", "kfac", "identity"}
    names = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| (?:all|where it was measured) \|$", (ROOT / "docs/choosing.md").read_text(), re.M
    )
    history = space["along"].solution.history
    assert len(names) == 5
    assert all(any(name in row for row in history) for name in names)


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
def test_the_examples_of_scale_run():
    space: dict[str, object] = {}
    for block in blocks("scale.md"):
        exec(compile(block, "scale.md", "exec", dont_inherit=True), space)
    assert space["solution"].stats["scaler"]["scale"] > 0
    assert space["found"].grad.shape == (64,)
    peaks = {row["inverse"]: row["peak_bytes"] for row in space["plan"].rows}
    assert peaks["identity"] < peaks["kfac"]


@pytest.mark.parametrize("name", ["cleaning.md", "distillation.md"])
def test_the_lines_for_your_own_data_run(name):
    torch.manual_seed(0)
    x, y = torch.randn(60, 2), torch.arange(60) % 2
    x[:, 0] += 3 * y
    arrays = {"X": x[:40].numpy(), "y": y[:40].numpy(), "X_trusted": x[40:].numpy(), "y_trusted": y[40:].numpy()}
    (block,) = blocks(name)
    exec(compile(block, name, "exec", dont_inherit=True), {"nhgd": nhgd, **arrays})
