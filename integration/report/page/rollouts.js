"use strict";
// The browser of rollouts: a list by step and group, filters, and the chosen sample or its whole group side by side.

const LIST_MOST = 300;

function listRows(report) {
  return report.chunks.flatMap((chunk, id) => chunk.rows.map((row, at) => ({ chunk: id, at, run: chunk.run, step: chunk.step, group: row[0], sample: row[1], reward: row[2], trained: row[3], status: row[4], preview: row[5], clipped: row[6], within: row[7], still: hasNone(chunk, row[7]) })));
}

// Whether the sentences of a group say that the update had no gradient from it.
function hasNone(chunk, within) {
  return (chunk.groups[within] || []).some((text) => text.startsWith("No gradient"));
}

// The colour of tokens: the chosen one, or what the order of the list is about.
function colorKey(state) {
  return state.color || (state.order === "clipped" ? "reason" : "advantage");
}

async function loadChunk(report, id) {
  report.loaded = report.loaded || new Map();
  if (!report.loaded.has(id)) report.loaded.set(id, unpack(`chunk-${id}`));
  return report.loaded.get(id);
}

function textOf(record) {
  const steps = (record.steps || []).flatMap((step) => [step.output, write(step.observation), write(step.action)]);
  const messages = (record.messages || []).map((message) => message.content);
  const prompt = typeof record.prompt === "string" ? record.prompt : record.prompt.map((message) => message.content).join("\n");
  return [prompt, record.response, ...messages, ...steps].join("\n").toLowerCase();
}

async function filterRows(report, rows, state) {
  const low = state.min === undefined || state.min === "" ? null : Number(state.min);
  const high = state.max === undefined || state.max === "" ? null : Number(state.max);
  let found = rows.filter((row) => (state.run === undefined || String(row.run) === state.run) && (state.step === undefined || String(row.step) === state.step)
    && (!state.status || row.status === state.status) && (!state.gradient || row.still === (state.gradient === "none")) && (state.group === undefined || state.group === "" || String(row.group) === state.group)
    && (low === null || (row.reward !== null && row.reward >= low)) && (high === null || (row.reward !== null && row.reward <= high)));
  if (state.search) {
    const wanted = state.search.toLowerCase(), kept = [];
    for (const row of found) if (textOf((await loadChunk(report, row.chunk))[row.at]).includes(wanted)) kept.push(row);
    found = kept;
  }
  return found;
}

async function drawRollouts(report, state, change) {
  const page = make("div", {}), rows = listRows(report);
  for (const note of report.notes) page.append(make("p", { class: "note" }, show(note)));
  if (!rows.length) return page;
  const runs = [...new Set(rows.map((row) => row.run))];
  const run = state.run === undefined ? String(runs[runs.length - 1]) : state.run;
  const steps = [...new Set(rows.filter((row) => String(row.run) === run).map((row) => row.step))];
  const step = state.step === undefined || (state.step !== "" && !steps.includes(Number(state.step))) ? String(steps[steps.length - 1]) : state.step;
  const now = { ...state, run, step: step === "" ? undefined : step };
  const choose = (label, key, values, value) => {
    const select = make("select", { on: { change: () => change({ [key]: select.value, pick: undefined }) } }, ...values.map(([v, text]) => make("option", { value: v, selected: v === value }, text)));
    return make("label", {}, label, select);
  };
  const input = (label, key, type) => make("label", {}, label, make("input", { type, step: "any", value: state[key] || "", id: `filter-${key}`, on: { change: (event) => change({ [key]: event.target.value || undefined, pick: undefined }) } }));
  const statuses = [...new Set(rows.map((row) => row.status))];
  const filters = make("div", { class: "filters", role: "search" },
    runs.length > 1 ? choose("run", "run", runs.map((k) => [String(k), show(report.runs[k].name)]), run) : null,
    choose("step", "step", [["", "all"], ...steps.map((s) => [String(s), String(s)])], step),
    input("group", "group", "number"), input("reward from", "min", "number"), input("to", "max", "number"),
    choose("status", "status", [["", "any"], ...statuses.map((s) => [s, s])], state.status || ""),
    choose("gradient", "gradient", [["", "any"], ["some", "some"], ["none", "none"]], state.gradient || ""),
    choose("order", "order", [["", "by group"], ["down", "highest reward"], ["up", "lowest reward"], ...(rows.some((row) => row.clipped) ? [["clipped", "most clipped tokens"]] : [])], state.order || ""),
    input("text (press Enter)", "search", "search"),
    choose("colour of tokens", "color", report.columns.map(({ key, label }) => [key, label]), colorKey(state)));
  const found = await filterRows(report, rows, now);
  if (state.order === "clipped") found.sort((a, b) => (b.clipped ?? -1) - (a.clipped ?? -1));
  else if (state.order) found.sort((a, b) => (state.order === "down" ? -1 : 1) * ((a.reward ?? -Infinity) - (b.reward ?? -Infinity)));
  const list = make("div", { class: "list", "aria-label": "Rollouts" }), sheets = make("div", { class: "sheets", "aria-live": "polite" });
  page.append(filters, make("p", { class: "note", id: "count" }, `${found.length} of ${rows.length} recorded rollouts`), make("div", { class: "browser" }, list, sheets));
  if (state.order === "clipped" && found.length && !found.some((row) => row.clipped)) page.lastChild.before(...await explainUnclipped(report, rows, now, change));
  if (found.length) list.append(make("div", { class: "head", "aria-hidden": "true" }, ...["sample", "reward", "answer"].map((name) => make("span", {}, name))));
  const nameOf = (row) => `${row.chunk}-${row.at}`;
  let shown = 0, lastGroup = null;
  const more = make("button", { type: "button", class: "row", on: { click: () => extend() } }, "Show more");
  const extend = () => {
    more.remove();
    for (const row of found.slice(shown, shown + LIST_MOST)) {
      const group = `step ${row.step}, ${row.within}${row.still ? ": no gradient" : ""}`;
      if (!state.order && group !== lastGroup) list.append(make("div", { class: "group" }, show(group)));
      lastGroup = group;
      list.append(make("button", { type: "button", class: "row", "data-row": nameOf(row), "aria-label": `sample ${row.sample}, reward ${number(row.reward)}`, on: { click: () => change({ pick: nameOf(row) }, true, () => pick(row)) } },
        make("span", {}, `#${row.sample}`), make("span", { class: "reward" }, number(row.reward)), make("span", { class: "preview" }, (state.order === "clipped" && row.clipped ? `${row.clipped} clipped: ` : "") + show(row.preview || `(${row.status})`))));
    }
    shown += LIST_MOST;
    if (shown < found.length) { more.textContent = `Show more (${found.length - shown} left)`; list.append(more); }
  };
  const pick = async (row) => {
    for (const button of list.querySelectorAll("button.row")) button.setAttribute("aria-current", String(button.dataset.row === nameOf(row)));
    const records = await loadChunk(report, row.chunk);
    sheets.replaceChildren(...drawGroup(report, row, records, colorKey(state), change));
  };
  extend();
  page.move = (by) => {
    const at = found.findIndex((row) => nameOf(row) === page.picked), next = found[Math.min(found.length - 1, Math.max(0, at + by))];
    if (!next) return;
    page.picked = nameOf(next);
    while (shown < found.length && !list.querySelector(`[data-row="${page.picked}"]`)) extend();
    change({ pick: page.picked }, true, () => pick(next));
    list.querySelector(`[data-row="${page.picked}"]`).scrollIntoView({ block: "nearest" });
  };
  const first = found.find((row) => nameOf(row) === state.pick) || found[0];
  if (first) { page.picked = nameOf(first); await pick(first); } else sheets.append(...await explainNothing(report, rows, now, change));
  return page;
}

// Nothing passes the filters: say whether another step has it, or whether the group was not recorded.
async function explainNothing(report, rows, state, change) {
  const elsewhere = state.step === undefined ? [] : await filterRows(report, rows, { ...state, step: undefined });
  const found = [make("p", {}, "No rollout passes these filters.")];
  if (elsewhere.length) {
    const steps = [...new Set(elsewhere.map((row) => row.step))];
    found.push(make("p", {}, `${elsewhere.length} of ${steps.length === 1 ? `step ${steps[0]}` : `${steps.length} other steps`} do. `, make("button", { type: "button", on: { click: () => change({ step: "", pick: undefined }) } }, "Show all steps")));
  } else if (state.group && !rows.some((row) => String(row.run) === state.run && String(row.group) === state.group)) {
    const there = [...new Set(rows.filter((row) => String(row.run) === state.run && (state.step === undefined || String(row.step) === state.step)).map((row) => row.group))];
    const names = there.slice(0, 8).join(", ") + (there.length > 8 ? ", ..." : "");
    found.push(make("p", {}, show(`Group ${state.group} is not among the recorded ones${state.step === undefined ? "" : ` of step ${state.step}`}: ${names}. A run with --trajectories.every 1 records all groups.`)));
  }
  return found;
}

// No token of the listed rollouts was clipped: say so, and whether tokens of other steps were.
async function explainUnclipped(report, rows, state, change) {
  const elsewhere = state.step === undefined ? [] : (await filterRows(report, rows, { ...state, step: undefined })).filter((row) => row.clipped);
  if (!elsewhere.length) return [make("p", { class: "note" }, "The update clipped no token of these rollouts.")];
  const steps = [...new Set(elsewhere.map((row) => row.step))];
  return [make("p", { class: "note" }, `The update clipped no token of these rollouts, but some of ${elsewhere.length} of ${steps.length === 1 ? `step ${steps[0]}` : `${steps.length} other steps`}. `, make("button", { type: "button", on: { click: () => change({ step: "", pick: undefined }) } }, "Show all steps"))];
}

function drawGroup(report, row, records, key, change) {
  const chunk = report.chunks[row.chunk];
  const members = records.filter((record) => record.group === row.within);
  const most = largest(records.map((record) => record.tokens), key);
  const chosen = records[row.at];
  const top = make("div", { class: "sheet" }, make("h2", {}, show(`step ${row.step}, ${row.within}`)), ...(chunk.groups[row.within] || []).map((text) => make("p", { class: "explain" }, show(text))), drawPrompt(chosen), legend(key, report.columns, most));
  if (key !== "reason" && members.some((record) => countTouched(record)) && report.columns.some((column) => column.key === "reason")) {
    top.append(make("button", { type: "button", id: "color-clipped", on: { click: () => change({ color: "reason" }) } }, "Colour the clipped tokens"));
  }
  const others = members.filter((record) => record !== chosen);
  const parts = [top, drawRecord(report, chosen, key, most, true)];
  if (others.length) parts.push(make("h2", {}, `The other ${others.length} of the ${row.within === `group ${row.group}` ? "group" : "subgroup"}, side by side`), make("div", { class: "side" }, ...others.map((record) => drawRecord(report, record, key, most, false))));
  return parts;
}

function drawPrompt(record) {
  if (typeof record.prompt === "string") return record.prompt ? make("div", {}, make("div", { class: "role" }, "prompt"), make("pre", {}, show(record.prompt))) : make("div", {});
  return make("div", {}, ...record.prompt.map(drawMessage));
}

function drawMessage(message) {
  return make("div", { class: "message" }, make("div", { class: "role" }, show(message.role)), make("pre", {}, show(message.content)), message.more ? make("pre", { class: "dim" }, write(message.more)) : null);
}

function drawRecord(report, record, key, most, whole) {
  const facts = [`sample ${record.sample}`, `reward ${number(record.reward)}`, record.status];
  if (record.trained_reward !== undefined) facts.push(`trained with reward ${number(record.trained_reward)}`);
  if (!record.trainable) facts.push("not trainable");
  const clipped = countTouched(record);
  if (clipped) facts.push(`${clipped} ${clipped === 1 ? "token" : "tokens"} clipped or left out`);
  const sheet = make("article", { class: "sheet" }, make("h3", {}, facts.map(show).join(", ")));
  if (whole && record.metadata && record.metadata.ground_truth !== undefined) sheet.append(make("p", { class: "note" }, "wanted: ", make("code", {}, write(record.metadata.ground_truth))));
  if (record.steps && record.steps.length) record.steps.forEach((step, k) => sheet.append(drawStep(record, step, k, key, most)));
  else if (record.tokens.pieces.length) sheet.append(drawTokens(record.tokens, key, most, firstTrained(record.tokens)));
  else sheet.append(make("pre", {}, show(record.response)));
  if (!whole) return sheet;
  const fold = (title, ...inside) => make("details", {}, make("summary", {}, title), ...inside);
  if (record.tokens.pieces.length) sheet.append(fold("all tokens, prompt included", drawTokens(record.tokens, key, most)));
  if (record.messages) sheet.append(fold("conversation", ...record.messages.map(drawMessage)));
  if (record.details) sheet.append(fold("parts of the reward", make("pre", {}, write(record.details))));
  if (record.metadata) sheet.append(fold("metadata", make("pre", {}, write(record.metadata))));
  return sheet;
}

// The number of tokens that the update clipped or left out.
function countTouched(record) {
  return (record.tokens.reason || []).filter((reason) => reason && !["kept", "no_advantage"].includes(reason)).length;
}

function firstTrained(tokens) {
  const at = (tokens.mask || []).findIndex((mask) => mask > 0);
  return Math.max(0, at);
}

function drawStep(record, step, k, key, most) {
  const numbers = [["reward", step.reward], ["return", step.return_to_go], ["advantage", step.advantage]].filter(([, value]) => value !== null).map(([name, value]) => `${name} ${number(value)}`);
  const box = make("section", {}, make("h3", {}, [`step ${k + 1}`, ...numbers, step.done ? "the episode ends" : null].filter(Boolean).join(", ")));
  box.append(make("div", { class: "role" }, "observation"), make("pre", { class: "dim" }, write(step.observation)), make("div", { class: "role" }, "action"));
  const tokens = step.tokens || record.tokens;
  box.append(tokens.pieces.length ? drawTokens(tokens, key, most, step.span ? step.span[0] : 0, step.span ? step.span[1] : tokens.pieces.length) : make("pre", {}, write(step.output || step.action)));
  if (step.info && Object.keys(step.info).length) box.append(make("details", {}, make("summary", {}, "more of this step"), make("pre", {}, write(step.info))));
  return box;
}
