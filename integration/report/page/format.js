"use strict";
// Making elements and writing numbers. Text of models reaches the page by textContent alone, never as HTML.

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [kind, listener] of Object.entries(value)) element.addEventListener(kind, listener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined) element.append(child);
  return element;
}

// Control characters and directions of text are shown by name, so that an answer can neither hide nor rearrange anything.
function show(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (c) => "<U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + ">");
}

function number(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return show(value);
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
}

function write(value) {
  return value === null || value === undefined ? "-" : typeof value === "string" ? show(value) : show(JSON.stringify(value, null, 1));
}

async function unpack(name) {
  const text = document.getElementById(name).textContent;
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}
