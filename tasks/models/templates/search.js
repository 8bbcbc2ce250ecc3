"use strict";
const dialog = document.querySelector("dialog");
const [left, right] = dialog.querySelectorAll("figure");
let shown = null;

function fill(figure, image, caption) {
  const picture = figure.querySelector("img");
  picture.src = image ? image.src : "data:,";
  picture.alt = image ? image.alt : "no picture kept";
  picture.className = image ? image.className : "";
  figure.querySelector("figcaption").textContent = caption;
}

function show(button) {
  shown = button;
  const section = button.closest("section");
  fill(left, section.querySelector(".query img"), "Searched with\n" + section.querySelector("h2").textContent);
  const parts = [...button.querySelectorAll(".score, .class")].map((part) => part.innerText.replace(/\s+/g, " "));
  fill(right, button.querySelector("img"), [...parts, button.querySelector(".name").dataset.name].join("\n"));
  if (!dialog.open) dialog.showModal();
}

function move(by) {
  const all = [...shown.closest("ol").querySelectorAll("button")];
  show(all[(all.indexOf(shown) + by + all.length) % all.length]);
}

document.querySelectorAll("ol button").forEach((button) => button.addEventListener("click", () => show(button)));
document.getElementById("previous").addEventListener("click", () => move(-1));
document.getElementById("next").addEventListener("click", () => move(1));
document.getElementById("close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
dialog.addEventListener("close", () => shown.focus());
dialog.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) { event.preventDefault(); move(by); }
});
