"use strict";
// The frame of the page: tabs, keys, theme. What is shown is in the address (#tab=rollouts&step=3), so that it can be kept and shared.

(async () => {
  const report = await unpack("index");
  const tabs = [["curves", "Curves"], ["rollouts", "Rollouts"], ["settings", "Settings"]];
  const main = document.getElementById("main");
  const read = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const names = report.runs.map((run) => run.name);
  document.title = names.map(show).join(", ") + " - rollouts report";
  document.getElementById("title").textContent = names.map(show).join(", ");
  document.getElementById("warnings").replaceChildren(...report.runs.flatMap((run) => run.warnings.map((text) => make("p", {}, (names.length > 1 ? show(run.name) + ": " : "") + "warning: " + show(text)))));

  let current = null, drawing = 0;
  function change(values, quiet, then) {
    const state = { ...read(), ...values };
    for (const key of Object.keys(state)) if (state[key] === undefined || (state[key] === "" && key !== "step")) delete state[key];
    history.replaceState(null, "", "#" + new URLSearchParams(state));
    if (!quiet) draw(); else if (then) then();
  }
  async function draw() {
    const mine = ++drawing, state = read(), tab = tabs.some(([name]) => name === state.tab) ? state.tab : "curves";
    for (const button of document.querySelectorAll("[role=tab]")) { button.setAttribute("aria-selected", String(button.dataset.tab === tab)); button.tabIndex = button.dataset.tab === tab ? 0 : -1; }
    const focus = document.activeElement && document.activeElement.id;
    const made = tab === "curves" ? drawCurves(report, state, change) : tab === "rollouts" ? await drawRollouts(report, state, change) : drawSettings(report);
    if (mine !== drawing) return;
    current = made;
    main.replaceChildren(made);
    main.dataset.drawn = tab;
    if (focus && document.getElementById(focus)) document.getElementById(focus).focus();
  }
  document.getElementById("tabs").append(...tabs.map(([name, label]) => make("button", { type: "button", role: "tab", "data-tab": name, on: { click: () => change({ tab: name }) } }, label)));
  document.getElementById("tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const all = [...document.querySelectorAll("[role=tab]")], next = all[(all.indexOf(document.activeElement) + step + all.length) % all.length];
    next.focus();
    next.click();
  });

  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paint = (name) => { root.dataset.theme = name; };
  paint(read().theme || (dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => { paint(root.dataset.theme === "dark" ? "light" : "dark"); change({ theme: root.dataset.theme }); });

  const keys = document.getElementById("keys");
  const help = [["1 2 3", "the tabs"], ["j, k", "next and previous rollout"], ["/", "search text"], ["arrow keys", "in tokens: go on and explain"], ["Esc", "close"], ["?", "this list"]];
  keys.append(make("h2", {}, "Keys"), make("table", {}, ...help.map(([key, text]) => make("tr", {}, make("th", {}, make("kbd", {}, key)), make("td", {}, text)))), make("button", { type: "button", on: { click: () => keys.close() } }, "Close"));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (["1", "2", "3"].includes(event.key)) change({ tab: tabs[Number(event.key) - 1][0] });
    else if (event.key === "?") keys.showModal();
    else if (event.key === "/" && document.getElementById("filter-search")) { event.preventDefault(); document.getElementById("filter-search").focus(); }
    else if ((event.key === "j" || event.key === "k") && current && current.move) current.move(event.key === "j" ? 1 : -1);
  });
  addEventListener("hashchange", draw);
  installTip(report);
  await draw();
  if (report.live) follow(report);
})().catch((error) => { document.getElementById("main").textContent = "This report cannot be shown: " + error + ". A browser from 2023 or later is needed."; throw error; });

// A served report asks every few seconds whether its runs went on, and loads itself again where it stands.
async function follow() {
  let seen = null;
  for (;;) {
    try {
      const state = await (await fetch("state")).text();
      if (seen !== null && state !== seen) { location.reload(); return; }
      seen = state;
    } catch { document.title = "(server ended) " + document.title.replace(/^\(server ended\) /, ""); }
    await new Promise((resolve) => setTimeout(resolve, 3000));
  }
}

function drawSettings(report) {
  const page = make("div", {});
  report.runs.forEach((run) => {
    const changed = run.settings.filter((setting) => setting.changed);
    const row = (setting) => make("tr", { class: setting.changed ? "changed" : "" }, make("td", {}, show(setting.name)), make("td", {}, write(setting.value)), make("td", {}, setting.changed ? write(setting.default) : ""));
    const head = make("tr", {}, make("th", {}, "setting"), make("th", {}, "value"), make("th", {}, "default of the task and model"));
    page.append(make("h2", {}, show(run.name)), make("p", { class: "note" }, show(run.path)));
    if (changed.length) page.append(make("h3", {}, `${changed.length} settings differ from the defaults`), make("table", {}, head, ...changed.map(row)));
    else page.append(make("p", { class: "note" }, run.settings.length ? "All settings have their defaults, or the defaults of this file are not known." : "The run has no config.json."));
    page.append(make("details", {}, make("summary", {}, "all settings"), make("table", {}, head.cloneNode(true), ...run.settings.map(row))), make("details", {}, make("summary", {}, "facts of the run"), make("pre", {}, write(run.facts))));
  });
  return page;
}
