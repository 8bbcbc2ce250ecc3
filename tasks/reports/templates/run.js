// Pages of `dml look`. What is written into the page goes through textContent and setAttribute: a class's name is never HTML.
const items = look.items;
const places = items.queries; // of the queries that can be selected, by the place of their picture
const numberOf = (place) => items.numbers[place];
const nameOf = (place) => items.classes[items.labels[place]];
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const created = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) created.setAttribute(name, value);
  created.append(...children);
  return created;
}

// The cell of a picture in its sheet, as tasks/reports/album.py arranges them.
function picture(place, label) {
  const sheet = Math.floor(place / items.cells), cell = place % items.cells;
  const rows = Math.min(items.columns, Math.ceil((items.labels.length - sheet * items.cells) / items.columns));
  const percent = (at, count) => `${(100 * at) / Math.max(count - 1, 1)}%`;
  const made = element("span", { class: "pic", role: "img", "aria-label": label });
  if (items.paths) made.title = items.paths[place];
  made.style.backgroundImage = `url("${items.stem}-${String(sheet).padStart(3, "0")}.webp")`;
  made.style.backgroundSize = `${100 * items.columns}% ${100 * rows}%`;
  made.style.backgroundPosition = `${percent(cell % items.columns, items.columns)} ${percent(Math.floor(cell / items.columns), rows)}`;
  return made;
}

function shot(place, kind, similarity, link) {
  const says = { query: "query", right: "correct neighbour", wrong: "wrong neighbour" }[kind];
  const caption = element("figcaption");
  if (similarity !== undefined) {
    caption.append(element("b", { "aria-hidden": "true" }, kind === "right" ? "✓" : "✗"), ` ${(similarity / 1000).toFixed(2)} `);
  }
  caption.append(element("span", { class: "name" }, nameOf(place)), " ", element("span", { class: "quiet" }, `image ${numberOf(place)}`));
  const shown = picture(place, `${says}: ${nameOf(place)}, image ${numberOf(place)}`);
  return element("figure", { class: `shot ${kind}` }, link ? element("a", { href: link }, shown) : shown, caption);
}

const kindOf = (query, neighbour) => (items.labels[query] === items.labels[neighbour] ? "right" : "wrong");

// ---------------------------------------------------------------- a run: neighbours of any image, and the map

const MEMBERS = 60; // of a class that are shown at once
let selected = 0, label = null, numMembers = MEMBERS;
const byNumber = new Map(places.map((place, query) => [numberOf(place), query]));
const queryOf = new Map(places.map((place, query) => [place, query]));

function choose(query, keepsHash = false) {
  selected = query;
  const place = places[query];
  if (items.labels[place] !== label) {
    label = items.labels[place];
    numMembers = MEMBERS;
  }
  byId("class").value = nameOf(place);
  byId("number").value = numberOf(place);
  const rank = look.run.firstRanks[query];
  byId("status").textContent = rank === 0 ? "no image of its class in the gallery"
    : rank === 1 ? "correct at rank 1" : `first correct image at rank ${rank.toLocaleString("en")}`;
  const shown = [shot(place, "query")];
  for (let at = query * look.run.width; at < (query + 1) * look.run.width; at++) {
    const neighbour = look.run.neighbours[at];
    const link = queryOf.has(neighbour) ? `#image=${numberOf(neighbour)}` : undefined;
    shown.push(shot(neighbour, kindOf(place, neighbour), look.run.similarities[at], link));
  }
  byId("neighbours").replaceChildren(...shown);
  showMembers();
  markOnMap();
  if (!keepsHash) history.replaceState(null, "", `#image=${numberOf(place)}`);
}

function showMembers() {
  const members = places.map((_, query) => query).filter((query) => items.labels[places[query]] === label);
  const first = Math.max(0, Math.min(members.indexOf(selected) - MEMBERS / 2, members.length - numMembers));
  const shown = members.slice(first, first + numMembers).map((query) => {
    const button = element("button", { type: "button", "aria-pressed": query === selected }, picture(places[query], `image ${numberOf(places[query])}`));
    button.addEventListener("click", () => {
      choose(query);
      byId("members").querySelector('[aria-pressed="true"]').focus({ preventScroll: true });
    });
    return button;
  });
  if (members.length > numMembers) {
    const rest = element("button", { type: "button", class: "rest" }, `show ${Math.min(4 * numMembers, members.length)} of ${members.length}`);
    rest.addEventListener("click", () => { numMembers *= 4; showMembers(); });
    shown.push(rest);
  }
  const strip = byId("members"), before = strip.scrollLeft;
  strip.replaceChildren(...shown);
  strip.scrollLeft = before;
  const pressed = strip.querySelector('[aria-pressed="true"]');
  if (pressed && (pressed.offsetLeft < strip.scrollLeft + strip.offsetLeft || pressed.offsetLeft + 70 > strip.scrollLeft + strip.offsetLeft + strip.clientWidth)) {
    strip.scrollLeft = pressed.offsetLeft - strip.offsetLeft - 100;
  }
}

// By number where that was changed, else by class: the name itself, or the first that has the text in it.
function submit(event) {
  event.preventDefault();
  const text = byId("class").value.trim().toLowerCase(), number = Number(byId("number").value);
  if (byId("number").value !== "" && number !== numberOf(places[selected])) {
    if (byNumber.has(number)) choose(byNumber.get(number));
    else byId("status").textContent = `image ${number} cannot be selected; numbers are ${numberOf(places[0])} to ${numberOf(places.at(-1))}`;
    return;
  }
  const names = items.classes.map((name) => name.toLowerCase());
  const has = new Set(places.map((place) => items.labels[place]));
  const fits = (test) => names.findIndex((name, index) => has.has(index) && test(name));
  let matching = fits((name) => name === text);
  if (matching < 0) matching = fits((name) => name.includes(text));
  if (matching < 0) byId("status").textContent = `no class name contains “${text}”`;
  else if (matching !== label) choose(places.findIndex((place) => items.labels[place] === matching));
}

function fromHash() {
  const number = /^#image=(\d+)$/.exec(location.hash);
  if (!number || !byNumber.has(Number(number[1]))) return false;
  choose(byNumber.get(Number(number[1])), true);
  byId("any").scrollIntoView({ block: "start" });
  return true;
}

function markOnMap() {
  const map = byId("drawn");
  if (!map || !map.data) return;
  const sizes = map.data.map((trace) => trace.customdata.map((query) => (query === selected ? 22 : items.labels[places[query]] === label ? 14 : 8)));
  Plotly.restyle(map, { "marker.size": sizes, "marker.line.width": sizes.map((of) => of.map((size) => (size === 22 ? 3 : 0))) });
}

const KINDS = [["correct at rank 1", "circle", (rank) => rank === 1], ["wrong at rank 1", "x", (rank) => rank > 1],
  ["no image of its class in the gallery", "circle-open", (rank) => rank === 0]];
const LAYOUT = {
  dragmode: "pan", hovermode: "closest", margin: { l: 6, r: 6, t: 6, b: 6 }, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
  xaxis: { visible: false }, yaxis: { visible: false, scaleanchor: "x" }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
};
const hueOf = (label) => Math.floor(((label * 0.61803398875) % 1) * 360); // consecutive classes get distant hues
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"); // Plotly interprets some HTML

function tracesOf({ x, y, queries }, ink) {
  const ofKind = ([name, symbol, fits]) => {
    const points = [...queries.keys()].filter((point) => fits(look.run.firstRanks[queries[point]]));
    const shown = points.map((point) => places[queries[point]]);
    return {
      type: "scatter", mode: "markers", name, hovertemplate: "%{text}<extra></extra>",
      x: points.map((point) => x[point]), y: points.map((point) => y[point]), customdata: points.map((point) => queries[point]),
      text: shown.map((place) => `${escaped(nameOf(place))}, image ${numberOf(place)}`),
      marker: { symbol, size: 8, color: shown.map((place) => `hsl(${hueOf(items.labels[place])},65%,48%)`), line: { color: ink, width: 0 } },
    };
  };
  return KINDS.map(ofKind).filter((trace) => trace.x.length);
}

function drawMap() {
  const map = byId("drawn");
  const ink = () => getComputedStyle(document.body).color;
  const layout = { ...LAYOUT, font: { color: ink(), family: "system-ui, sans-serif" } };
  const options = { responsive: true, displaylogo: false, scrollZoom: true, modeBarButtonsToRemove: ["lasso2d", "select2d", "toImage"] };
  Plotly.newPlot(map, tracesOf(look.run.map, ink()), layout, options);
  map.on("plotly_click", (event) => choose(event.points[0].customdata));
  const recolour = () => Plotly.update(map, { "marker.line.color": ink() }, { "font.color": ink() });
  byId("theme").addEventListener("click", recolour);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  markOnMap();
}

// The map's library has megabytes: it is loaded when the map is about to be scrolled into view.
function drawMapOnceNear() {
  const map = byId("drawn");
  if (!map) return;
  const near = new IntersectionObserver((changes) => {
    if (!changes.some((change) => change.isIntersecting)) return;
    near.disconnect();
    const library = element("script", { src: map.dataset.library });
    library.addEventListener("load", drawMap);
    document.head.append(library);
  }, { rootMargin: "50%" });
  near.observe(map);
}

function startRun() {
  const there = new Set(places.map((place) => items.labels[place]));
  byId("classes").append(...items.classes.flatMap((name, index) => (there.has(index) ? [element("option", { value: name })] : [])));
  byId("choose").addEventListener("submit", submit);
  byId("class").addEventListener("change", () => { byId("number").value = ""; byId("choose").requestSubmit(); });
  byId("number").addEventListener("change", () => byId("choose").requestSubmit());
  byId("previous").addEventListener("click", () => choose((selected + places.length - 1) % places.length));
  byId("next").addEventListener("click", () => choose((selected + 1) % places.length));
  addEventListener("hashchange", fromHash);
  drawMapOnceNear();
  if (!fromHash()) choose(0, true);
}

// ---------------------------------------------------------------- a comparison: queries correct in one run and wrong in another

const CARDS = 24;
let numCards = CARDS;

function compareTwo() {
  const [one, other] = [look.runs[byId("one").value], look.runs[byId("other").value]];
  const queries = places.map((_, query) => query).filter((query) => one.firstRanks[query] === 1 && other.firstRanks[query] > 1);
  queries.sort((left, right) => other.firstRanks[right] - other.firstRanks[left]);
  byId("status").textContent = one === other ? "choose two different runs" : `${queries.length.toLocaleString("en")} queries`;
  byId("cards").replaceChildren(...queries.slice(0, numCards).map((query) => {
    const place = places[query];
    const nearest = (run) => {
      const made = shot(run.neighbours[query], kindOf(place, run.neighbours[query]), run.similarities[query], `${run.page}#image=${numberOf(place)}`);
      made.querySelector("figcaption").prepend(element("b", { class: "quiet" }, run.name));
      return made;
    };
    return element("article", { class: "card" }, element("div", { class: "three" }, shot(place, "query"), ...[one, other].map(nearest)),
      element("p", {}, `${other.name}: first correct at rank ${other.firstRanks[query].toLocaleString("en")}`));
  }));
  byId("more").hidden = queries.length <= numCards;
}

function startComparison() {
  for (const id of ["one", "other"]) byId(id).append(...look.runs.map((run, index) => element("option", { value: index }, run.name)));
  byId("one").value = 0;
  byId("other").value = 1;
  const restart = () => { numCards = CARDS; compareTwo(); };
  byId("one").addEventListener("change", restart);
  byId("other").addEventListener("change", restart);
  byId("swap").addEventListener("click", () => { [byId("one").value, byId("other").value] = [byId("other").value, byId("one").value]; restart(); });
  byId("more").addEventListener("click", () => { numCards += CARDS; compareTwo(); });
  compareTwo();
}

if (look.run) startRun();
if (look.runs && byId("two")) startComparison();
