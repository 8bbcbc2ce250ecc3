"use strict";
const byId = (id) => document.getElementById(id);
const [drop, file, query, prompt, k, token, again, status, results] =
  ["drop", "file", "query", "prompt", "k", "token", "again", "status", "results"].map(byId);
const SMALL_PIXELS = 64; // pictures as small as that are shown with their pixels, not smoothed
let image = null;
let asked = 0;

function say(text, isWrong) {
  status.textContent = text;
  status.classList.toggle("wrong", Boolean(isWrong));
}

function element(name, className, text) {
  const made = document.createElement(name);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function sharpen(picture) {
  picture.classList.toggle("small", Math.max(picture.naturalWidth, picture.naturalHeight) <= SMALL_PIXELS);
}

function card(hit, rank) {
  const item = element("li", "");
  const picture = element("div", "picture", hit.thumbnail ? undefined : "no picture");
  if (hit.thumbnail) {
    const shown = element("img", "");
    shown.addEventListener("load", () => sharpen(shown));
    shown.src = hit.thumbnail;
    shown.alt = hit.class_name || hit.name;
    picture.append(shown);
  }
  const words = element("div", "words");
  words.append(element("span", "class", hit.class_name || hit.name));
  words.append(element("span", "score", `${rank}. score ${hit.score.toFixed(3)}`));
  if (hit.class_name) {
    const name = element("span", "name", hit.name.split("/").pop());
    name.title = hit.name;
    words.append(name);
  }
  item.append(picture, words);
  return item;
}

async function search() {
  if (!image) return;
  const number = ++asked;
  const form = new FormData();
  form.append("image", image);
  form.append("k", k.value);
  form.append("thumbnails", "true");
  say("Searching…");
  const begun = performance.now();
  try {
    const headers = token.value ? { Authorization: `Bearer ${token.value}` } : {};
    const response = await fetch("/v1/search", { method: "POST", body: form, headers });
    const answer = await response.json();
    if (number !== asked) return;
    if (response.status === 401) {
      byId("token-field").hidden = again.hidden = false;
      token.focus();
    }
    if (!response.ok) {
      results.replaceChildren();
      return say(answer.error, true);
    }
    const hits = answer.results[0];
    results.replaceChildren(...hits.map((hit, place) => card(hit, place + 1)));
    say(`${hits.length} found in ${Math.round(performance.now() - begun)} ms, nearest first`);
  } catch (error) {
    if (number === asked) say("The service does not answer.", true);
  }
}

function take(chosen) {
  if (!chosen) return;
  image = chosen;
  if (query.src) URL.revokeObjectURL(query.src);
  query.src = URL.createObjectURL(chosen);
  query.alt = "your image";
  query.hidden = false;
  prompt.replaceChildren(chosen.name || "pasted image", element("br", ""), element("strong", "", "Choose another"));
  search();
}

query.addEventListener("load", () => sharpen(query));
query.addEventListener("error", () => { query.hidden = true; });
file.addEventListener("change", () => take(file.files[0]));
k.addEventListener("change", search);
byId("form").addEventListener("submit", (event) => { event.preventDefault(); search(); });
for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
}
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.classList.remove("over"); });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  take(event.dataTransfer.files[0]);
});
document.addEventListener("paste", (event) => take(event.clipboardData.files[0]));

fetch("/v1/health").then((response) => response.json()).then((health) => {
  if (health.error) return say(health.error, true);
  const items = health.num_items === null ? "no index: nothing to search" : `${health.num_items.toLocaleString("en")} images`;
  byId("served").textContent = [health.title, items].filter(Boolean).join(" · ");
}).catch(() => say("The service does not answer.", true));
