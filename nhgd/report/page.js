"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // Light or dark: the reader's system decides, until the button does.
  const button = document.querySelector(".theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const kept = { get() { try { return localStorage.getItem("nhgd-theme"); } catch { return null; } },
                 set(value) { try { localStorage.setItem("nhgd-theme", value); } catch { /* a page without storage */ } } };
  const label = () => { button.textContent = dark() ? "Light" : "Dark"; };
  if (["light", "dark"].includes(kept.get())) root.dataset.theme = kept.get();
  label();
  button.title = "Change the colours of the page";
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; kept.set(root.dataset.theme); label(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);

  // Tables: a click on a heading sorts by it, a second one the other way round. What is missing comes last.
  for (const table of all("table.sortable")) {
    const heads = all("thead th", table);
    heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
      const way = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", way);
      const value = row => row.cells[column].dataset.value ?? "";
      const numeric = head.dataset.kind === "number";
      const body = table.tBodies[0];
      [...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = numeric ? x - y : x.localeCompare(y);
        return way === "ascending" ? order : -order;
      }).forEach(row => body.append(row));
    }));
  }

  // Lines: a switch for each method hides it in the charts of its section.
  for (const control of all(".switch")) control.addEventListener("click", () => {
    const shown = control.getAttribute("aria-pressed") !== "true";
    control.setAttribute("aria-pressed", String(shown));
    const section = control.closest("section");
    all(`[data-line="${control.dataset.of}"]`, section).forEach(line => line.classList.toggle("off", !shown));
  });

  // One metric at a time.
  for (const select of all("select.metric")) {
    const show = () => all(".panels[data-metric]", select.closest("section")).forEach(panel => { panel.hidden = panel.dataset.metric !== select.value; });
    select.addEventListener("change", show);
    select.closest("label").hidden = false;
    show();
  }

  for (const copy of all(".command button")) {
    if (!navigator.clipboard) continue;
    copy.hidden = false;
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(copy.parentElement.querySelector("pre").textContent);
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
  }

  // Paper shows everything, in dark ink.
  let theme;
  addEventListener("beforeprint", () => {
    theme = root.dataset.theme;
    root.dataset.theme = "light";
    all("details:not([open])").forEach(part => { part.open = true; part.dataset.opened = ""; });
  });
  addEventListener("afterprint", () => {
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    all("details[data-opened]").forEach(part => { part.open = false; delete part.dataset.opened; });
  });
})();
