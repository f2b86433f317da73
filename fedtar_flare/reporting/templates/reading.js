"use strict";
const { page, cases } = JSON.parse(document.getElementById("data").textContent);
const NAMES = ["preference", "error_a", "error_b", "acceptable"];
const byId = (id) => document.getElementById(id);
const form = byId("questions");
let reader = "", given = {}, at = 0, question = 0, keeps = true;

const place = () => `fedtar reading ${page} ${reader}`;
const done = (number) => NAMES.every((name) => name in (given[number] || {}));

function keep() {
  try { localStorage.setItem(place(), JSON.stringify(given)); } catch { keeps = false; }
}

function recall() {
  try { return JSON.parse(localStorage.getItem(place())) || {}; } catch { return {}; }
}

function show() {
  const one = cases[at], own = given[at + 1] || {}, answered = cases.filter((_, i) => done(i + 1)).length;
  byId("where").textContent = `Case ${at + 1} of ${cases.length}` + (one.visit ? `, visit ${one.visit}` : "");
  byId("a").textContent = one.a || "(no text)";
  byId("b").textContent = one.b || "(no text)";
  for (const link of document.querySelectorAll("#images a")) {
    link.hidden = !one[link.id];
    if (one[link.id]) link.href = link.firstChild.src = one[link.id];
  }
  NAMES.forEach((name, i) => {
    form.elements[name].forEach((input) => { input.checked = input.value === own[name]; });
    byId(`of-${name}`).classList.toggle("now", i === question);
  });
  byId("progress").textContent = `${answered} of ${cases.length} answered by ${reader}. ` + (keeps
    ? "Answers are kept in this browser until you save them to a file."
    : "This browser keeps no answers: save them to a file before you close the page.");
  byId("bar").value = answered;
}

function go(number) {
  at = Math.max(0, Math.min(cases.length - 1, number));
  question = Math.max(0, NAMES.findIndex((name) => !(name in (given[at + 1] || {}))));
  show();
}

function answer(name, value) {
  given[at + 1] = { ...given[at + 1], [name]: value };
  question = Math.min(NAMES.length - 1, NAMES.indexOf(name) + 1);
  keep();
  show();
}

function save() {
  const answers = cases.map((_, i) => i + 1).filter(done).map((number) => {
    const { preference, error_a, error_b, acceptable } = given[number];
    return { case: number, preference, error_a: error_a === "yes", error_b: error_b === "yes", acceptable };
  });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({ page, reader, answers }, null, 1)]));
  link.download = `answers-${reader.replace(/[^\w-]/g, "_")}.json`;
  link.click();
}

byId("begin").addEventListener("submit", (event) => {
  event.preventDefault();
  reader = byId("reader").value.trim();
  given = recall();
  byId("begin").hidden = true;
  byId("reading").hidden = false;
  const open = cases.findIndex((_, i) => !done(i + 1));
  go(open < 0 ? 0 : open);
  document.activeElement.blur();
});
form.addEventListener("change", (event) => answer(event.target.name, event.target.value));
byId("back").addEventListener("click", () => go(at - 1));
byId("next").addEventListener("click", () => go(at + 1));
byId("save").addEventListener("click", save);
document.addEventListener("keydown", (event) => {
  if (!reader || event.ctrlKey || event.altKey || event.metaKey) return;
  const chosen = form.elements[NAMES[question]][Number(event.key) - 1];
  const moves = { ArrowRight: () => go(at + 1), ArrowLeft: () => go(at - 1), s: save };
  if (event.key === "Enter" && event.target.tagName !== "BUTTON") moves.Enter = moves.ArrowRight;
  for (const [key, by] of [["ArrowDown", 1], ["ArrowUp", -1]])
    moves[key] = () => { question = (question + by + NAMES.length) % NAMES.length; show(); };
  if (chosen) answer(NAMES[question], chosen.value);
  else if (moves[event.key]) moves[event.key]();
  else return;
  event.preventDefault();
});
