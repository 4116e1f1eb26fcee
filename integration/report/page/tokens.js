"use strict";
// Tokens coloured by one of their numbers, each explained under the pointer, on focus and on touch.

const LOG_PROBS = ["log_prob", "trainer", "reference", "proximal", "segment", "updated"];
const MARKS = { no_advantage: "no colour: its advantage is 0", clip_low: "clip_low: too rare already", clip_high: "clip_high: too frequent already", masked: "left out" };
const RATIOS = ["ratio", "update_ratio"];

function colorOf(key, value, most) {
  if (value === null || value === undefined) return "";
  const paint = (name, part) => `rgba(var(--${name}), ${(0.08 + 0.6 * Math.min(1, Math.max(0, part))).toFixed(3)})`;
  if (key === "mask") return value > 0 ? paint("on", value) : "";
  if (LOG_PROBS.includes(key)) return paint("cool", -value / 6);
  if (key === "reason") return value === "no_advantage" ? "" : value === "kept" ? paint("on", 0.25) : /low/.test(value) ? paint("bad", 1) : /high/.test(value) ? paint("good", 1) : paint("cool", 1);
  if (RATIOS.includes(key)) return value === 1 ? "" : paint(value > 1 ? "good" : "bad", value > 0 ? Math.abs(Math.log(value)) / 0.2 : 1);
  if (key === "weight" || key === "importance") return value > 0 ? paint("on", value / (most || 1)) : paint("bad", 1);
  if (key === "version") return value < 0 ? "" : `hsl(${(value * 67) % 360} 60% 55% / .38)`;
  if (value === 0) return "";
  return paint(value > 0 ? "good" : "bad", Math.abs(value) / (most || 1));
}

function largest(tokenLists, key) {
  let most = 0;
  for (const tokens of tokenLists) (tokens[key] || []).forEach((value, i) => {
    if (typeof value === "number" && (!tokens.mask || tokens.mask[i] > 0)) most = Math.max(most, Math.abs(value));
  });
  return most || 1;
}

function drawTokens(tokens, key, most, from, to) {
  const box = make("div", { class: "tokens" });
  for (let i = from || 0; i < (to === undefined ? tokens.pieces.length : to); i++) {
    const trained = !tokens.mask || tokens.mask[i] > 0;
    const span = make("span", trained ? {} : { class: "given" });
    span.textContent = show(tokens.pieces[i]);
    span.token = { tokens, i, key };
    const color = (trained || key === "version") && tokens[key] ? colorOf(key, tokens[key][i], most) : "";
    if (color) span.style.background = color;
    box.append(span);
  }
  box.tabIndex = 0;
  box.setAttribute("aria-label", "Tokens; the arrow keys go from one to the next and explain it");
  return box;
}

function explainToken({ columns, reasons }, { tokens, i, key: chosen }) {
  const list = make("dl", {});
  for (const { key, label, help } of [...columns].sort((a, b) => (b.key === chosen) - (a.key === chosen))) {  // the number behind the colour is first
    if (!tokens[key] || tokens[key][i] === null) continue;
    const value = tokens[key][i];
    if (key === "reason") {
      const meaning = value.split(", ").map((name) => reasons[name] || "a mark of the loss").join("; ");
      list.append(make("dt", { title: help }, label), make("dd", {}, show(value), make("div", { class: "dim" }, meaning)));
      continue;
    }
    const more = LOG_PROBS.includes(key) ? ` (probability ${number(Math.exp(value))})` : "";
    list.append(make("dt", { title: help }, label), make("dd", {}, number(value) + more, make("div", { class: "dim" }, help)));
  }
  return [make("strong", {}, `token ${i}: ${JSON.stringify(show(tokens.pieces[i]))}, id ${tokens.ids[i]}`), list];
}

function legend(key, columns, most) {
  const box = make("div", { class: "legend" }, (columns.find((column) => column.key === key) || { label: key }).label + ":");
  const values = key === "mask" ? [1] : LOG_PROBS.includes(key) ? [0, -1, -3, -6] : key === "version" ? [] : key === "reason" ? ["kept", "no_advantage", "clip_low", "clip_high", "masked"] : RATIOS.includes(key) ? [0.8, 0.9, 1, 1.1, 1.2] : key === "weight" || key === "importance" ? [0, most / 2, most] : [-most, -most / 2, 0, most / 2, most];
  for (const value of values) {
    const mark = make("i", {}, MARKS[value] || number(value));
    mark.style.background = colorOf(key, value, most);
    box.append(mark);
  }
  box.append("grey: not trained on");
  return box;
}

function installTip(report) {
  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; };
  const open = (span) => {
    tip.replaceChildren(...explainToken(report, span.token));
    tip.hidden = false;
    tip.classList.remove("brief");
    tip.classList.toggle("brief", tip.offsetHeight > innerHeight / 2);  // of a long list only the first number keeps its explanation
    const box = span.getBoundingClientRect();
    const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(4, left) + scrollX}px`;
    const below = box.bottom + 6, above = box.top - 6 - tip.offsetHeight, lowest = innerHeight - tip.offsetHeight - 4;
    tip.style.top = `${Math.max(4, below <= lowest ? below : above >= 4 ? above : lowest) + scrollY}px`;
  };
  document.addEventListener("pointerover", (event) => (event.target.token ? open(event.target) : hide()));
  document.addEventListener("click", (event) => { if (event.target.token) open(event.target); });
  document.addEventListener("keydown", (event) => {
    const box = document.activeElement && document.activeElement.classList.contains("tokens") ? document.activeElement : null;
    if (event.key === "Escape") hide();
    if (!box || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const step = event.key === "ArrowRight" ? 1 : -1;
    const last = box.children.length - 1;
    box.at = Math.min(last, Math.max(0, (box.at === undefined ? (step > 0 ? -1 : last + 1) : box.at) + step));
    for (const span of box.children) span.style.outline = "";
    box.children[box.at].style.outline = "2px solid var(--accent)";
    open(box.children[box.at]);
  });
}
