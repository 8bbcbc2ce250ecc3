"use strict";
const root = document.documentElement;
try { if (localStorage.theme) root.dataset.theme = localStorage.theme; } catch { /* some browsers keep nothing for files */ }
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.theme = root.dataset.theme; } catch { /* as above */ }
});

// A column's button sorts rows in descending, then in ascending order, then as in the table; rows without a value stay last.
const table = document.querySelector("table.results");
const by = document.getElementById("by");
const figure = (row, key) => parseFloat(row.dataset[by.value].split(" ")[key]);
const compare = {
  label: (one, other) => one.dataset.label.localeCompare(other.dataset.label, "en"),
  figure: (key, sign) => (one, other) => {
    const [a, b] = [figure(one, key), figure(other, key)];
    if (isNaN(a) || isNaN(b)) return isNaN(a) - isNaN(b);
    return sign * (a - b);
  },
};
let sorted = { key: null, order: "none" };

function sortRows(key, order) {
  const rows = [...table.tBodies].sort((one, other) => one.dataset.order - other.dataset.order);
  const sign = order === "descending" ? -1 : 1;
  if (order !== "none") {
    rows.sort(key === "label" ? (one, other) => sign * compare.label(one, other) : compare.figure(Number(key), sign));
  }
  rows.forEach((row) => table.append(row));
  table.querySelectorAll("th[aria-sort]").forEach((head) => {
    const here = head.querySelector("button").dataset.key === key;
    head.setAttribute("aria-sort", here ? order : "none");
    if (here && order !== "none") {
      document.getElementById("sorted").textContent = `sorted by ${head.querySelector("button").textContent.trim()}, ${order}`;
    }
  });
  if (order === "none") document.getElementById("sorted").textContent = "in the table's order";
  sorted = { key, order };
}

if (table) {
  table.querySelectorAll("thead button").forEach((button) => button.addEventListener("click", () => {
    const steps = button.dataset.key === "label" ? ["ascending", "descending", "none"] : ["descending", "ascending", "none"];
    const now = sorted.key === button.dataset.key ? steps.indexOf(sorted.order) : -1;
    sortRows(button.dataset.key, steps[(now + 1) % 3]);
  }));
  by.addEventListener("change", () => { if (sorted.order !== "none") sortRows(sorted.key, sorted.order); });
  if (location.hash.startsWith("#sort=")) sortRows(...location.hash.slice(6).split(","));
}
