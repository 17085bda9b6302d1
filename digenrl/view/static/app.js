// Keeps the page up to date: its changing part every two seconds, its charts from the API.
"use strict";

const BASE = document.body.dataset.base;  // address of the run
const EVERY_MS = 2000, SOON_MS = 200, SELDOM_MS = 15000;
const COLOURS = [1, 2, 3, 4, 5, 6, 7, 8].map((number) => getComputedStyle(document.documentElement).getPropertyValue(`--series-${number}`).trim());
const SHARES = /accuracy|worst_digit/;  // between 0 and 1, and flat lines beside rewards of another size
const ASKED = "asked ...";
const LINES = { reward_mean: "training reward", gold_accuracy: "gold: held-out network", gold_svm_accuracy: "gold: held-out SVM", gold_worst_digit: "gold: worst digit", proxy_accuracy: "training classifier", approx_kl: "from the sampling policy", kl: "from the base model", grad_norm: "norm" };
function plainly(y) {
  if (y === null || y === undefined) return "-";
  return y && Math.abs(y) < 1e-4 ? "below 0.0001" : Number(y.toPrecision(3)).toString();
}
const CHARTS = {
  progress: (run) => [
    ...pick(run.version, run.metrics, ["reward_mean"]).map((line) => ({ ...line, name: "training reward" })),
    ...evaluated(run, (name) => name === "reward" || name.startsWith("gold ")).map((line) => ({ ...line, name: line.name === "reward" ? "at fixed seeds" : line.name })),
  ],
  reward: (run) => pick(run.version, run.metrics, ["reward_mean"]),
  kl: (run) => pick(run.version, run.metrics, ["approx_kl", "kl"]),
  gradient: (run) => pick(run.version, run.metrics, ["grad_norm"]),
  figures: (run) => evaluated(run, (name) => !/_(nn|div)$/.test(name) && !SHARES.test(name)),
  shares: (run) => evaluated(run, (name) => SHARES.test(name)),
};
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((zeros) => [1, 2, 5].map((first) => first * 10 ** zeros));  // between ticks of steps
const drawn = new Map();

function pick(x, columns, names) {
  return names.filter((name) => name in columns).map((name) => ({ name, x, y: columns[name] }));
}

function evaluated(run, wanted) {
  return pick(run.evaluated, run.figures, Object.keys(run.figures).filter(wanted));
}

async function refreshPart() {
  const part = document.querySelector("#part[data-live]");
  if (!part || document.hidden) return;
  const address = new URL(location.href);
  address.searchParams.set("part", "");
  const answer = await fetch(address);
  if (answer.ok) replace(part, await answer.text());
  if (answer.status === 401) location.reload();  // the session has ended: the server shows how to sign in
}

// What is as it was stays: a button that somebody is about to press, what is focused, how far tables are scrolled.
function replace(part, text) {
  Idiomorph.morph(part, text, { morphStyle: "innerHTML", ignoreActiveValue: true, callbacks: {
    beforeAttributeUpdated: (name, node) => !(name === "class" && node.tagName === "IMG") && !(name === "open" && node.tagName === "DETAILS"),
  } });
}

// One x axis for all lines: uPlot wants columns of equal length, null where a line has no value.
function columns(lines) {
  const x = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const at = new Map(x.map((value, index) => [value, index]));
  const ys = lines.map((line) => {
    const y = new Array(x.length).fill(null);
    line.x.forEach((value, index) => { y[at.get(value)] = line.y[index]; });
    return y;
  });
  return { names: lines.map((line) => line.name), data: [x, ...ys] };
}

function draw(figure, run) {
  const { names, data } = columns(CHARTS[figure.dataset.chart](run));
  figure.hidden = data[0].length === 0;
  if (figure.hidden) return;
  const known = drawn.get(figure);
  const width = figure.clientWidth - 20;
  if (known && known.names === names.join()) {
    known.plot.setData(data);
    newest(known.plot);
    if (known.plot.width !== width) known.plot.setSize({ width, height: 220 });
    return;
  }
  if (known) known.plot.destroy();
  const ink = getComputedStyle(document.body).color;
  const line = getComputedStyle(document.documentElement).getPropertyValue("--line");
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const plot = new uPlot({
    width, height: 220,
    scales: { x: { time: false } },
    axes: [{ ...axis, incrs: WHOLE, label: "version", labelSize: 18, labelFont: "12px system-ui, sans-serif" }, { ...axis, size: 64, values: (_, ticks) => ticks.map((tick) => Number(tick.toPrecision(6)).toString()) }],
    hooks: { setCursor: [newest] },
    series: [{ label: "version" }, ...names.map((label, index) => ({
      label: LINES[label] ?? label.replaceAll("_", " "), value: (_, y) => plainly(y), stroke: COLOURS[index % COLOURS.length], width: 2, spanGaps: true,
      points: { show: data[0].length < 60, size: 5 },
    }))],
  }, data, figure);
  newest(plot);
  drawn.set(figure, { plot, names: names.join() });
}

// While nobody points at a chart, its legend has the newest values.
function newest(plot) {
  if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: plot.data[0].length - 1 });
}

let curves = null;

// Return metrics of steps and figures of evaluations in columns, with the columns that are loaded; null if the server refuses.
async function loadCurves(base, loaded = { version: [], metrics: {} }) {
  const get = async (path) => { const answer = await fetch(`${base}/v1/${path}`); return answer.ok ? answer.json() : null; };
  let { version, metrics } = loaded;
  for (let next = version.at(-1) ?? 0; next !== null;) {
    const page = await get(`curves?limit=1000&after=${next}`);
    if (page === null) return null;
    const column = (name, known, found) => [...(known[name] ?? new Array(version.length).fill(null)), ...(found[name] ?? new Array(page.versions.length).fill(null))];
    metrics = Object.fromEntries(Object.keys({ ...metrics, ...page.metrics }).map((name) => [name, column(name, metrics, page.metrics)]));
    [version, next] = [[...version, ...page.versions], page.next];
  }
  const evaluations = [];
  for (let before = ""; before !== null;) {
    const page = await get(`evaluations?limit=200${before}`);
    if (page === null) return null;
    evaluations.unshift(...page.reverse());
    before = page.length < 200 ? null : `&before=${page[0].version}`;
  }
  const figures = evaluations.map(({ reward, figures: others, gold }) => ({ reward, ...others, ...Object.fromEntries(Object.entries(gold).map(([name, value]) => [`gold ${name}`, value])) }));
  const names = [...new Set(figures.flatMap(Object.keys))].sort();
  return { version, metrics, evaluated: evaluations.map((each) => each.version), figures: Object.fromEntries(names.map((name) => [name, figures.map((each) => each[name] ?? null)])) };
}

async function refreshCharts() {
  const charts = document.querySelectorAll("[data-chart]");
  if (!charts.length || document.hidden) return;
  curves = await loadCurves(BASE, curves ?? undefined) ?? curves;
  if (curves !== null) charts.forEach((figure) => draw(figure, curves));
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-post]");
  if (!button || !confirm(button.dataset.ask)) return;
  const label = button.textContent;
  button.disabled = true;
  button.textContent = ASKED;
  const groups = document.getElementById(button.dataset.groups)?.valueAsNumber;
  const body = groups === undefined ? button.dataset.body ?? "{}" : JSON.stringify({ mode: "fixed", groups });
  for (const address of button.dataset.post.trim().split(/\s+/)) {
    const answer = await fetch(BASE + address, {
      method: "POST", headers: { "content-type": "application/json" }, body,
    });
    if (!answer.ok) alert((await answer.json()).detail);
  }
  await refreshPart();
  if (button.textContent === ASKED) button.textContent = label;  // it stands outside of what is asked for anew
  button.disabled = false;
});

// Pictures of few pixels are shown as they are, and not blurred; large ones are made smaller smoothly.
function sharpen(image) {
  if (image.naturalWidth && image.naturalWidth < 64) image.classList.add("small");
}

document.addEventListener("load", (event) => { if (event.target.tagName === "IMG") sharpen(event.target); }, true);
document.querySelectorAll("img").forEach(sharpen);

document.addEventListener("input", (event) => {
  if (event.target.id === "reveal") document.body.style.setProperty("--reveal", `${event.target.value}%`);
});

// A select that opens another page does so by the mouse at once, by keys with Enter or when the focus leaves it.
let byKey = false, changed = null;
function submitChanged(event) {
  if (changed !== event.target) return;
  event.preventDefault();
  [byKey, changed] = [false, null];
  event.target.dispatchEvent(new Event("change", { bubbles: true }));
}
addEventListener("pointerdown", () => { byKey = false; }, true);
addEventListener("keydown", (event) => { byKey = event.key !== "Enter"; if (!byKey) submitChanged(event); }, true);
addEventListener("focusout", submitChanged, true);
addEventListener("change", (event) => {
  if (!byKey || !event.target.matches("[data-submits], #sides select")) return;
  event.stopPropagation();
  changed = event.target;
}, true);

// A select that is a form of its own; videos play while the pointer or the focus is on them.
document.addEventListener("change", (event) => { if (event.target.matches("[data-submits]")) event.target.form.submit(); });
for (const name of ["pointerenter", "focusin", "pointerleave", "focusout"]) {
  document.addEventListener(name, (event) => {
    if (!event.target.matches?.("video[data-hover]")) return;
    if (name === "pointerenter" || name === "focusin") event.target.play().catch(() => {}); else event.target.pause();
  }, true);
}

async function tick() {
  try { await Promise.all([refreshPart(), refreshCharts()]); } catch { /* the process restarts: asked again */ }
}

// What happens is told by the feed; the page is asked for anew then, and seldom else. What workers do
// is in no feed, and without one everything is asked for every two seconds.
let feed = null, ticked = 0, waiting = null;

// The first event is shown at once, and those of the next two seconds together.
function tickSoon() {
  const wait = Math.max(SOON_MS, ticked + EVERY_MS - Date.now());
  waiting ??= setTimeout(() => { waiting = null; ticked = Date.now(); tick(); }, wait);
}

function listen() {
  if (!document.body.dataset.feed) return;  // the page of all runs has no feed
  feed = new EventSource(document.body.dataset.feed);
  for (const name of ["commit", "dead_letter", "settled", "phase", "request", "alarm", "evaluation", "run"]) feed.addEventListener(name, tickSoon);
}

// A page that is left stays in the browser's memory for the way back, with its connection: six of them are all that a browser
// opens to one server, and nothing else would be answered.
addEventListener("pagehide", () => feed?.close());
addEventListener("pageshow", (event) => { if (event.persisted) { listen(); tickSoon(); } });
listen();
tick();
setInterval(() => {
  const told = feed?.readyState === EventSource.OPEN && document.body.dataset.page !== "workers";
  if (!told || Date.now() - ticked > SELDOM_MS) { ticked = Date.now(); tick(); }
}, EVERY_MS);
