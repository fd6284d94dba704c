// The first table: click or press a header to sort, filter by words and by choice. Without JavaScript it is a plain table.
"use strict";
(() => {
  const table = document.querySelector("#calls table"), body = table.tBodies[0], rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells], filters = document.getElementById("filters"), shown = document.getElementById("shown");
  const words = document.getElementById("words"), choices = [...filters.querySelectorAll("select")];
  const OP = 0, DIRECTION = 1, DTYPE = 2, SIZE = 3, WHO = 6, RATIO = 7;
  const text = (row, column) => row.cells[column].textContent;
  const number = (row, column) => parseFloat(text(row, column).replace(/[^0-9.]/g, ""));
  const verdict = (row) => (text(row, RATIO).match(/[a-z]+/) || ["none"])[0];
  const collator = new Intl.Collator("en", { numeric: true });

  // A number is looked for whole, and in the sizes alone: 128 does not find 1280, nor a time.
  const index = new Map(rows.map((row) => [row, {
    text: [OP, DIRECTION, DTYPE, SIZE, WHO, RATIO].map((c) => text(row, c)).join(" ").toLowerCase(),
    numbers: new Set(text(row, SIZE).match(/\d+/g)), op: text(row, OP), direction: text(row, DIRECTION), dtype: text(row, DTYPE), result: verdict(row),
  }]));

  function matches(row, wanted) {
    const found = index.get(row);
    return choices.every((c) => !c.value || (c.name === "result" && c.value === "any" ? found.result !== "none" : found[c.name] === c.value))
      && wanted.every((w) => (/^\d+$/.test(w) ? found.numbers.has(w) : found.text.includes(w)));
  }

  function filter() {
    const wanted = words.value.toLowerCase().replace(/(\d)\s*[x\u00d7*]\s*(?=\d)/g, "$1 ").split(/[\s,]+/).filter(Boolean);
    const ratios = [], counts = { faster: 0, same: 0, slower: 0 };
    let visible = 0;
    for (const row of rows) {
      row.hidden = !matches(row, wanted);
      if (row.hidden) continue;
      visible += 1;
      if (index.get(row).result !== "none") {
        ratios.push(number(row, RATIO));
        counts[index.get(row).result] += 1;
      }
    }
    const mean = Math.exp(ratios.reduce((sum, r) => sum + Math.log(r), 0) / ratios.length);
    shown.textContent = `${visible} of ${rows.length} rows` + (ratios.length
      ? `; ${ratios.length} with a measured peer: geometric mean of the ratio ${mean.toFixed(2)}, ${counts.faster} faster, ${counts.same} same, ${counts.slower} slower`
      : "; none with a measured peer");
  }

  function sort(column) {
    const up = heads[column].getAttribute("aria-sort") !== "ascending", numeric = heads[column].dataset.type === "number", sign = up ? 1 : -1;
    heads.forEach((h, i) => h.setAttribute("aria-sort", i !== column ? "none" : up ? "ascending" : "descending"));
    const keyed = rows.map((row) => [row, numeric ? number(row, column) : text(row, column)]);
    const missing = (value) => (numeric ? Number.isNaN(value) : value === "\u2014");
    keyed.sort(([, a], [, b]) => missing(a) - missing(b) || (missing(a) ? 0 : sign * (numeric ? a - b : collator.compare(a, b))));
    rows.splice(0, rows.length, ...keyed.map(([row]) => row));
    body.append(...rows);
  }

  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(column));
    head.append(button);
    head.setAttribute("aria-sort", "none");
  });
  for (const choice of choices.filter((c) => c.name !== "result")) {
    for (const value of new Set(rows.map((row) => index.get(row)[choice.name]))) choice.add(new Option(value));
  }
  filters.addEventListener("input", filter);
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.querySelector("button").addEventListener("click", () => { filters.reset(); filter(); });
  filters.hidden = false;
  filter();
})();
