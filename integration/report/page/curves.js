"use strict";
// Curves of one or several runs: the metrics that people watch first, all others on demand.

const STAGES = ["rl", "dpo", "sft", "reward_model"];  // the newest first, as the verdicts above them
const WATCHED = {
  rl: ["reward_mean", "eval_accuracy", "eval_accuracy_sampled", "loss", "entropy", "approx_kl", "reference_kl", "reward_margin", "num_ties", "clip_fraction", "grad_norm",
    "zero_std_fraction", "response_length_mean", "truncated_fraction", "staleness_mean", "lr", "tokens_per_s", "step_s"],
  dpo: ["loss", "eval_loss", "eval_pair_accuracy", "eval_pair_margin", "eval_accuracy", "reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected",
    "grad_norm", "lr", "step_s"],
  sft: ["loss", "eval_loss", "eval_perplexity", "eval_accuracy", "eval_accuracy_sampled", "grad_norm", "lr", "step_s"],
  reward_model: ["loss", "eval_loss", "score_accuracy", "eval_accuracy", "score_margin", "eval_margin", "grad_norm", "lr"],
};
const COLORS = ["#0b62c4", "#d9480f", "#1b8a4a", "#8b3fc7", "#b8860b", "#0d8f8f", "#c2255c", "#5d6771"];
const COLORS_DARK = ["#6bb0ff", "#ff9063", "#5fd08c", "#c69bff", "#e6c15a", "#54d1d1", "#ff85ad", "#aab4be"];

function drawCurves(report, state, change) {
  const page = make("div", {});
  const verdicts = report.runs.flatMap((run) => run.verdicts.map((text) => (report.runs.length > 1 ? `${run.name}: ` : "") + text));
  if (verdicts.length) page.append(make("h2", {}, "Does it learn?"), make("ul", { class: "verdicts" }, ...verdicts.map((text) => make("li", {}, show(text)))));
  const stages = STAGES.filter((stage) => report.runs.some((run) => run.stages[stage]));
  if (!stages.length) page.append(make("p", { class: "note" }, "There are no lines of metrics yet."));
  for (const stage of stages) {
    const keys = [...new Set(report.runs.flatMap((run) => Object.keys(run.stages[stage] || {})))].filter((key) => key !== "step");
    const watched = WATCHED[stage].filter((key) => keys.includes(key));
    const others = keys.filter((key) => !watched.includes(key)).sort();
    const plots = make("div", { class: "plots" });
    page.append(make("h2", {}, stage.toUpperCase().replace("_", " ") + ", by step"), plots);
    for (const key of watched) addPlot(plots, report, stage, key);
    if (!others.length) continue;
    const more = make("select", { "aria-label": `Further metrics of ${stage}` }, make("option", { value: "" }, `${others.length} further metrics`), ...others.map((key) => make("option", { value: key }, key)));
    more.addEventListener("change", () => { if (more.value) { addPlot(plots, report, stage, more.value); change({ [`more_${stage}`]: [...new Set([...(state[`more_${stage}`] || "").split(","), more.value])].filter(Boolean).join(",") }, true); more.value = ""; } });
    page.append(make("p", {}, more));
    for (const key of (state[`more_${stage}`] || "").split(",")) if (others.includes(key)) addPlot(plots, report, stage, key);
  }
  return page;
}

function tick(value) {
  return value !== 0 && Math.abs(value) < 0.01 ? value.toExponential(1).replace(".0e", "e") : number(value);
}

// The value under the pointer; without a pointer, the newest one.
function valueAt(plot, value, k, index) {
  return number(index === null || index === undefined ? plot.data[k].findLast((found) => found !== null && found !== undefined) : value);
}

function addPlot(plots, report, stage, key) {
  const runs = report.runs.map((run, k) => ({ run, k })).filter(({ run }) => run.stages[stage] && (run.stages[stage][key] || []).some((value) => value !== null));
  if (!runs.length) return;
  const box = make("div", { class: "plot", "data-metric": key }, make("h3", {}, key));
  plots.append(box);
  const tables = runs.map(({ run }) => [run.stages[stage].step, run.stages[stage][key]]);
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--dim").trim();
  const colors = document.documentElement.dataset.theme === "dark" ? COLORS_DARK : COLORS;
  const grid = { stroke: getComputedStyle(document.documentElement).getPropertyValue("--line").trim(), width: 1 };
  const axis = { stroke: ink, grid, ticks: grid, size: 58, values: (_, ticks) => ticks.map(tick) };
  const steps = { ...axis, size: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000], values: (_, ticks) => ticks.map(number) };
  const series = runs.map(({ run, k }) => ({ label: report.runs.length > 1 ? show(run.name) : "value", stroke: colors[k % colors.length], width: 1.6, spanGaps: true, points: { show: run.stages[stage].step.length < 60, size: 5 }, value: valueAt }));
  const options = { width: Math.max(240, box.clientWidth - 16), height: 210, scales: { x: { time: false } }, axes: [steps, axis], series: [{ label: "step", value: valueAt }, ...series], cursor: { drag: { x: true, y: false } } };
  requestAnimationFrame(() => {
    options.width = Math.max(220, box.clientWidth - 14);
    const plot = new uPlot(options, uPlot.join(tables), box);
    addEventListener("resize", () => plot.setSize({ width: Math.max(220, box.clientWidth - 14), height: 210 }));
  });
}
