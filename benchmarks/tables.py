"""Write the tables of measurements in docs/ and benchmarks/ from the committed JSON: python -m benchmarks.tables"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks import applications, cleaner, influence, reproduction, rivals
from benchmarks import cleaning as cleaning_presets
from benchmarks.zoo import runs as zoo_runs
from benchmarks.zoo import table as zoo_table

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


def pde(result: dict) -> str:
    lines = [
        "| method | outer steps | seconds | ms an outer step | true objective, grid | true objective | by the network"
        " | inner loss | at fresh points |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in result["runs"]:
        found = run["metrics"]
        seeds = f", seed {run['seed']}" if any(other["seed"] for other in result["runs"]) else ""
        lines.append(
            f"| {run['label']}{seeds} | {run['steps']} | {run['preparation_seconds'] + run['seconds']:.0f}"
            f" | {run['milliseconds_a_step']:.0f} | {found['true_objective_grid']:.4f} | {found['true_objective']:.4f}"
            f" | {found['objective_net']:.4f} | {found['inner_loss']:.0e} | {found['fresh_loss']:.0e} |"
        )
    return "\n".join(lines)


def distillation(result: dict) -> str:
    lines = [
        "| run | seed | seconds | outer steps | linear, from scratch | in the loop | MLP, from scratch"
        " | as many real images: linear, MLP |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in result["runs"]:
        lines.append(
            f"| {run['label']} | {run['seed']} | {run['seconds']:.0f} | {run['steps']} | {run['test_accuracy']:.4f}"
            f" | {run['loop_test_accuracy']:.4f} | {run['other_test_accuracy']:.4f}"
            f" | {run['random_test_accuracy']:.4f}, {run['other_random_test_accuracy']:.4f} |"
        )
    for row in result["all_images"]:
        lines.append(f"| all 60,000 images, l2 = {row['l2']:g} |  |  |  | {row['test_accuracy']:.4f} |  |  |  |")
    return "\n".join(lines)


def faults(result: dict) -> str:
    phases = ("starting", "running", "writing", "ending")
    lines = [
        f"| harm | trials | as they should | moments: {', '.join(phases)} | run done, exit code 0 | longest seconds: {', '.join(phases)} |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in result["summary"].items():
        some = [trial for trial in result["trials"] if trial["trial"] == name]
        done = sum(all(end["code"] == 0 for end in trial.get("ranks", [trial])) for trial in some)
        lines.append(
            f"| {name} | {row['trials']} | {row['good']} | {', '.join(str(row['phases'].get(p, 0)) for p in phases)} | {done}"
            f" | {', '.join(format(row['longest_seconds'][p], '.1f') if p in row['longest_seconds'] else '-' for p in phases)} |"
        )
    return "\n".join(lines)


def ways(result: dict) -> str:
    head = "| way | ms of an outer step | ratio to gathers | in the median block | operations | replayed |"
    lines = [head, "| --- " * 6 + "|"]
    for name, row in result["ways"].items():
        replayed = row.get("compile", {}).get("taken", "-").replace("eager", "-")
        lines.append(
            f"| {name} | {row['milliseconds']:.1f} | {row['ratio']:.2f} | {row['median_ratio']:.2f}"
            f" | {row['launches']:.0f} | {replayed} |"
        )
    return "\n".join(lines)


def parts(result: dict) -> str:
    lines = [
        "| part | times | MB | million multiplications | ms | share of the bandwidth of a copy |",
        "| --- " * 6 + "|",
    ]
    for name, row in result["parts"].items():
        share = 1e3 * row["bytes"] / row["milliseconds"] / result["copy_bytes_per_second"]
        lines.append(
            f"| {name} | {row['times']} | {row['bytes'] / 1e6:.2f} | {row['operations'] / 1e6:.2f}"
            f" | {row['milliseconds']:.3f} | {share:.2f} |"
        )
    return "\n".join(lines)


def captured_steps(result: dict) -> str:
    lines = ["| method | mean ms | replayed, mean ms | median ms | longest replayed, ms |", "| --- " * 5 + "|"]
    for name, row in result["methods"].items():
        if "graph" in row:
            graph = row["graph"]
            cells = [graph[key] for key in ("milliseconds", "replayed_milliseconds", "median_milliseconds")]
            numbers = " | ".join(f"{cell:.2f}" for cell in cells)
            lines.append(f"| {name} | {numbers} | {graph['longest_replayed_milliseconds']:.0f} |")
    return "\n".join(lines)


def presets_on_gpu(result: dict) -> str:
    """The default presets of tasks from beginning to end."""
    quality = {
        "cleaning": ("f1", "F1"),
        "distillation": ("test_accuracy", "accuracy"),
        "pde": ("true_objective_grid", "true objective, grid"),
    }
    lines = ["| task | outer steps | seconds | reached | earlier | at the end |", "| --- " * 6 + "|"]
    for name, run in result["tasks"].items():
        key, label = quality[name]
        on_the_way = [
            (what.rsplit(" ", 1)[1], at)
            for what, at in run.get("reached", {}).items()
            if at is not None and at["step"] > 100
        ]
        earlier = ", ".join(f"{value} after {at['seconds']:.1f} s" for value, at in on_the_way)
        lines.append(
            f"| {name} | {run['steps']} | {run['seconds']:.2f} | {label} | {earlier} | {run['summary'][key]:.4f} |"
        )
    return "\n".join(lines)


def ways_on_gpu(result: dict) -> str:
    lines = ["| way | ms of an outer step | ratio to gathers | launches | synchronisations |", "| --- " * 5 + "|"]
    for name, row in result["ways"].items():
        cells = (
            f"{row['milliseconds']:.1f} | {row['ratio']:.2f} | {row['launches']:.0f} | {row['synchronisations']:.1f}"
        )
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def beside_plain(result: dict) -> str:
    """Outer steps beside plain training, with what is aimed at."""
    models = {"transformer": ("transformer", 1.15, 1.4), "resnet": ("ResNet-18", 1.2, None)}
    lines = [
        "| model | parameters | way | ms, mean | median | times plain, mean | median | aim | build-up, ms | MB | times plain"
        " | in the build-up | aim |",
        "| --- " * 13 + "|",
    ]
    for key, (name, time_aim, memory_aim) in models.items():
        found, plain = result[key], result[key]["plain"]
        for way in (way for way in ("plain", "nhgd", "nhgd-captured") if way in found):
            row, own, replayed = found[way], way != "plain", way == "nhgd-captured"
            cells = [f"{name} | {found['parameters'] / 1e6:.0f} M | {way} | {row['mean']:.0f}"]
            cells += ["" if replayed else f"{row['milliseconds']:.0f}"]  # replayed steps are timed as a whole
            cells += [f"{row['mean'] / plain['mean']:.2f}" if own else ""]
            cells += [f"{row['milliseconds'] / plain['milliseconds']:.2f}" if own and not replayed else ""]
            cells += [f"{time_aim}" if own else "", f"{row['first_milliseconds']:.0f}" if own else ""]
            cells += [f"{row['megabytes']:.0f}", f"{row['memory_times_plain']:.2f}" if own else ""]
            cells += [f"{row['first_memory_times_plain']:.2f}" if own else ""]
            cells += [f"{memory_aim}" if own and memory_aim else ""]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def few_digits(result: dict) -> str:
    """Hypergradients of a transformer of a million parameters against the converged one."""
    names = {
        "float32": "float32, two records of all places",
        "autocast": "the same under autocast",
        "bfloat16": "the same with bfloat16 parameters",
        "block": "the same in blocks of half the width",
        "ten records": "autocast, ten records of all places",
        "ten records, 8 places": "autocast, ten records of 8 places of each sample",
    }
    rows = result["precision"]["against_converged"]
    lines = ["| K-FAC learnt from | cosine with the converged hypergradient |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {label} | {rows[name]['cosine']:.3f} |" for name, label in names.items())])


def growth(result: dict) -> str:
    lines = ["| size | fitted from | to | slope of time | slope of memory |", "| --- | --- | --- | --- | --- |"]
    for axis, found in result["axes"].items():
        name = "parameters" if axis == "width" else axis.replace("_", " ")
        upper = [point[found["by"]] for point in found["points"]][len(found["points"]) // 2 :]
        sizes = f"{upper[0]:,} | {upper[-1]:,}"
        lines.append(f"| {name} | {sizes} | {found['slopes']['seconds']:.2f} | {found['slopes']['megabytes']:.2f} |")
    return "\n".join(lines)


def dense_update(result: dict) -> str:
    lines = [
        "| way | one step, ms | share of a copy's bandwidth | one step, captured | share | ten folded, ms | share |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| a copy | {result['copy']['milliseconds']:.2f} | 1.00 | | | | |",
    ]
    names = [("one_step", "one_step_share"), ("captured_step", "captured_step_share"), ("folded", "folded_share")]
    for name, label in (("torch", "torch alone"), ("kernel", "Triton")):
        of = result[name]
        cells = [f"{of[f'{time}_milliseconds']:.2f} | {of[f'{share}_of_copy']:.2f}" for time, share in names]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(page: str, name: str, table: str) -> str:
    pattern = rf"<!-- table: {name} -->\n(?:\n\|[^\n]*(?:\n\|[^\n]*)*\n)?"
    return re.sub(pattern, f"<!-- table: {name} -->\n\n{table}\n", page)


def read(name: str) -> dict:
    return json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Put tables into a page, each behind its mark."""
    text = page.read_text(encoding="utf-8")
    for mark, table in tables.items():
        text = filled(text, mark, table)
    page.write_text(text, encoding="utf-8")


def zoo() -> str:
    """The table alone, without the sentence below it."""
    return zoo_table.table(zoo_runs.read(ROOT / "benchmarks/results/zoo-cpu.jsonl")).split("\n\n")[0]


def pages() -> dict[str, dict[str, str]]:
    """The tables of each page by their marks; scaling.py makes the others of benchmarks/parallel.md."""
    cleaning = read("cleaning-inverses-h200.json")
    runs = read("applications-cpu.json")["runs"]
    presets, cleanlab = read("cleaning-mnist-cpu.json"), read("cleaner-cpu.json")
    return {
        "docs/choosing.md": {"errors": errors(cleaning), "cost": cost(cleaning)},
        "docs/cleaning.md": {
            "presets": "\n".join(cleaning_presets.table(presets["runs"])),
            "cleanlab": "\n".join(cleaner.table(cleanlab)),
            "cleanlab-small": "\n".join(cleaner.small_table(cleanlab)),
            "cleaner-steps": "\n".join(cleaner.steps_table(cleanlab)),
        },
        "docs/methods.md": {"zoo": zoo()},
        "docs/performance.md": {
            "ways": ways(read("floor-cpu.json")),
            "parts": parts(read("floor-cpu.json")),
            "captured": captured_steps(read("captured-h200.json")),
            "presets-h200": presets_on_gpu(read("captured-presets-h200.json")),
            "ways-h200": ways_on_gpu(read("floor-h200.json")),
            "dense-update": dense_update(read("dense-update-h200.json")),
            "growth": growth(read("growth-cpu.json")),
            "beside-plain": beside_plain(read("transformer-h200.json")),
            "few-digits": few_digits(read("precision-cpu.json")),
        },
        "docs/rivals.md": {"rivals": rivals.table(read("rivals-cpu.json"))},
        "docs/pde.md": {"pde": pde(read("pde-h200.json")), "pde-quick": pde(read("pde-quick-cpu.json"))},
        "benchmarks/parallel.md": {"faults": faults(read("faults-cpu.json"))},
        "docs/distillation.md": {"distillation": distillation(read("distillation-cpu.json"))},
        "docs/fewshot.md": {"fewshot": applications.table(runs, "fewshot")},
        "docs/reproduction.md": reproduction.pages(),
        "docs/influence.md": influence.tables(read("influence-cpu.json")),
        "docs/imbalance.md": {"imbalance": applications.table(runs, "imbalance")},
    }


def main() -> None:
    for name, tables in pages().items():
        fill(ROOT / name, tables)


if __name__ == "__main__":
    main()
