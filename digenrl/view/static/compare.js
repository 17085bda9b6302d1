// Curves of several runs, each in the colour of its run; and the form of compared versions.
"use strict";
{
  const sides = [...document.querySelectorAll(".sides li")], token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const form = document.getElementById("sides");

  function lines(runs, curve) {
    return runs.map((run) => (curve === "evaluation"
      ? { x: run.evaluated, y: run.figures.reward ?? [] } : { x: run.version, y: run.metrics[curve] ?? [] }));
  }

  function plot(figure, runs) {
    const each = lines(runs, figure.dataset.curve), x = [...new Set(each.flatMap((line) => line.x))].sort((a, b) => a - b);
    figure.hidden = !x.length;
    if (figure.hidden) return;
    const ys = each.map((line) => { const at = new Map(line.x.map((value, index) => [value, line.y[index]])); return x.map((value) => at.get(value) ?? null); });
    const axis = { stroke: token("--quiet"), grid: { stroke: token("--line"), width: 1 }, ticks: { show: false } };
    newest(new uPlot({
      width: figure.clientWidth - 32, height: 240, scales: { x: { time: false } }, axes: [{ ...axis, incrs: WHOLE, label: "version", labelSize: 18, labelFont: "12px system-ui, sans-serif" }, { ...axis, size: 60 }],
      hooks: { setCursor: [newest] },
      series: [{ label: "version" }, ...runs.map((run, index) => ({
        label: run.run, stroke: token(`--series-${runs[index].colour}`), width: 2, spanGaps: true, points: { show: x.length < 60, size: 6 },
        value: (_, value) => (value === null || value === undefined ? "-" : value.toPrecision(3)),
      }))],
    }, [x, ...ys], figure));
  }

  async function curves() {
    const runs = [];
    for (const { dataset } of sides) {
      if (runs.some((run) => run.run === dataset.run)) continue;
      const loaded = await loadCurves(dataset.base);
      if (loaded !== null) runs.push({ ...loaded, run: dataset.run, colour: dataset.colour });
    }
    document.querySelectorAll("[data-curve]").forEach((figure) => plot(figure, runs));
  }

  function show() {
    const given = new URLSearchParams(location.search);
    for (const name of ["side", "after"]) given.delete(name);
    for (const value of new FormData(form).getAll("side")) if (value) given.append("side", value);
    location.search = given;
  }
  form.addEventListener("change", show);
  form.addEventListener("click", ({ target }) => { if (target.matches("[data-remove]")) { target.closest("li").remove(); show(); } });
  curves();
}
