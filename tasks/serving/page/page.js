"use strict";
const byId = (id) => document.getElementById(id);
const [drop, file, picture, prompt, k, token, again, status, results] =
  ["drop", "file", "query", "prompt", "k", "token", "again", "status", "results"].map(byId);
const SMALL_PIXELS = 64; // pictures as small as that are shown with their pixels, not smoothed
const SAME = { cosine: 0.99999, euclidean: -0.001 }; // from this score on, two pictures are the same to the network
const queries = []; // of this page, each a file or a hit, numbered as in the browser's history
let query = null;
let metric = "cosine";
let number = 0; // of the latest request: answers to earlier ones are dropped

function say(text, isWrong) {
  status.textContent = text;
  status.classList.toggle("wrong", Boolean(isWrong));
}

function element(name, className, ...content) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...content);
  return made;
}

function nameOf(path) {
  return path.split("/").pop();
}

// The parts of a name with places to break between them, so that it is not cut within a word.
function breakable(name) {
  return name.split(/(?<=[_\- ])/).flatMap((part) => [part, element("wbr", "")]);
}

function nearness(score) {
  return metric === "cosine" ? `cosine ${score.toFixed(3)}` : `distance ${Number((-score).toPrecision(3))}`;
}

function sharpen(shown) {
  shown.classList.toggle("small", Math.max(shown.naturalWidth, shown.naturalHeight) <= SMALL_PIXELS);
}

function card(hit, rank, index) {
  const frame = element("span", "picture", ...(hit.thumbnail ? [] : ["no picture"]));
  if (hit.thumbnail) {
    const shown = element("img", "");
    shown.addEventListener("load", () => sharpen(shown));
    shown.src = hit.thumbnail;
    shown.alt = "";
    frame.append(shown);
  }
  const name = element("span", hit.class_name ? "name" : "class", ...breakable(nameOf(hit.name)));
  const button = element("button", "hit", frame);
  button.type = "button";
  button.title = hit.name;
  if (hit.class_name) button.append(element("span", "class", ...breakable(hit.class_name)));
  button.append(name, element("span", "score", `${rank}. ${nearness(hit.score)}`));
  if (query.file && hit.score >= SAME[metric]) button.append(element("span", "same", "same picture"));
  button.append(element("span", "action", "Search with this"));
  button.addEventListener("click", () => ask({ hit, index }));
  return element("li", "", button);
}

async function requested() {
  const headers = token.value ? { Authorization: `Bearer ${token.value}` } : {};
  if (query.hit) {
    return fetch(`/v1/neighbours?position=${query.hit.position}&index=${query.index}&k=${k.value}&thumbnails=true`, { headers });
  }
  const form = new FormData();
  form.append("image", query.file);
  form.append("k", k.value);
  form.append("thumbnails", "true");
  return fetch("/v1/search", { method: "POST", body: form, headers });
}

async function search() {
  if (!query) return;
  const own = ++number;
  const hadFocus = results.contains(document.activeElement);
  say("Searching…");
  const begun = performance.now();
  try {
    if (query.file) await query.file.slice(0, 1).arrayBuffer();
  } catch {
    if (own !== number) return;
    results.replaceChildren();
    return say(`${query.file.name} cannot be read; choose an image file.`, true);
  }
  try {
    const response = await requested();
    const answer = await response.json();
    if (own !== number) return;
    if (response.status === 401) {
      byId("token-field").hidden = again.hidden = false;
      token.focus();
    }
    if (!response.ok) {
      results.replaceChildren();
      return say(answer.error, true);
    }
    const hits = answer.results[0];
    results.replaceChildren(...hits.map((hit, place) => card(hit, place + 1, answer.index)));
    if (hadFocus) results.querySelector("button")?.focus();
    say(`${hits.length} found in ${Math.round(performance.now() - begun)} ms, nearest first`);
  } catch {
    if (own === number) say("The service does not answer.", true);
  }
}

// Show a query and search with it.
function show(next) {
  query = next;
  if (picture.src.startsWith("blob:")) URL.revokeObjectURL(picture.src);
  const source = next.file ? URL.createObjectURL(next.file) : next.hit.thumbnail;
  picture.hidden = !source;
  picture.src = source || "data:,";
  const name = next.file ? next.file.name || "pasted image" : nameOf(next.hit.name);
  picture.alt = `searched with: ${name}`;
  prompt.replaceChildren(...breakable(name), element("br", ""), element("strong", "", "Choose another"));
  search();
}

// Search with a file or a hit; the browser's Back returns to the query before.
function ask(next) {
  const place = Math.min((history.state ?? -1) + 1, queries.length); // a reload loses the queries, not the browser's history
  queries.splice(place, queries.length, next);
  history[place ? "pushState" : "replaceState"](place, "");
  show(next);
}

function take(files, none) {
  if (files.length === 1) return ask({ file: files[0] });
  say(files.length ? `${files.length} files: search with one image at a time.` : none, true);
}

picture.addEventListener("load", () => sharpen(picture));
picture.addEventListener("error", () => { picture.hidden = true; });
file.addEventListener("change", () => {
  const files = [...file.files];
  file.value = ""; // so that the same file can be chosen again
  if (files.length) take(files);
});
k.addEventListener("change", search);
byId("form").addEventListener("submit", (event) => { event.preventDefault(); search(); });
for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
}
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.classList.remove("over"); });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  take(event.dataTransfer.files, "No file was dropped; drop an image file.");
});
document.addEventListener("paste", (event) => {
  if (event.target !== token) take(event.clipboardData.files, "The clipboard has no image.");
});
window.addEventListener("popstate", (event) => { if (queries[event.state]) show(queries[event.state]); });
history.replaceState(null, "");

fetch("/v1/health").then((response) => response.json()).then((health) => {
  if (health.error) return say(health.error, true);
  metric = health.metric;
  const items = health.num_items === null ? "no index: nothing to search" : `${health.num_items.toLocaleString("en")} images`;
  byId("served").textContent = [health.title, items].filter(Boolean).join(" · ");
}).catch(() => say("The service does not answer.", true));
