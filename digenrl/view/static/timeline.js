// Draws what every device did in the newest batches. Only what is in sight is drawn.
"use strict";
{
  const LABEL = 64, ROW = 22, LABELS = 150, AXIS = 24, CLOCK = 20;
  const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];
  const canvas = document.getElementById("timeline"), hover = document.getElementById("hover");
  const follow = document.getElementById("follow"), batches = document.getElementById("batches");
  const style = getComputedStyle(document.documentElement);
  const VARIABLE = {
    generating: "generating", training: "training", scoring: "scoring", committing: "committing",
    waiting_for_rollout: "wait-rollout", waiting_for_trainer: "wait-trainer", waiting_for_reward: "wait-reward",
    waiting_for_weights: "weights", waiting_for_conditions: "conditions", tail: "tail", paused: "paused",
  };
  const words = new Map([...document.querySelectorAll(".legend li")].map((li) => [li.querySelector("i").className.slice(4), li.textContent.trim()]));
  let devices = [], marks = [], events = [], total = 0, from = 0, to = 1, asked = false, isRead = false;

  function take(timelines) {
    const rows = new Map();
    marks = [];
    events = [];
    let start = 0;
    for (const each of timelines) {
      marks.push({ at: start, batch: each.batch, clock: each.ended_at === null ? null : each.ended_at - each.seconds });
      for (const [at, what] of each.events) events.push({ at: start + at, what });
      for (const [device, changes] of Object.entries(each.devices)) {
        if (!rows.has(device)) rows.set(device, []);
        const spans = rows.get(device);
        changes.forEach(([at, use], index) => {
          const end = index + 1 < changes.length ? changes[index + 1][0] : each.seconds;
          if (use !== null && end > at) spans.push([start + at, start + end, use, each.batch]);
        });
      }
      start += each.seconds;
    }
    total = start;
    devices = [...rows].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  }

  function first(spans, at) {
    let low = 0, high = spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle][1] <= at) low = middle + 1; else high = middle;
    }
    return low;
  }

  function draw() {
    asked = false;
    const ratio = devicePixelRatio, width = canvas.clientWidth, height = AXIS + ROW * Math.max(1, devices.length) + CLOCK;
    canvas.style.height = `${height}px`;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d"), colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const colours = Object.fromEntries(Object.entries(VARIABLE).map(([use, name]) => [use, colour(name)]));
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const scale = (width - LABELS) / (to - from), x = (at) => LABELS + (at - from) * scale;
    devices.forEach(([device, spans], row) => {
      const top = AXIS + row * ROW;
      for (let index = first(spans, from); index < spans.length && spans[index][0] < to; index++) {
        const [begin, end, use] = spans[index];
        const left = Math.max(LABELS, x(begin)), right = Math.min(width, x(end));
        pen.fillStyle = colours[use];
        pen.fillRect(left, top + 2, Math.max(right - left, 0.5), ROW - 4);
      }
      pen.fillStyle = colour("ink");
      pen.fillText(device, 0, top + ROW / 2, LABELS - 8);
    });
    pen.strokeStyle = colour("line");
    pen.fillStyle = colour("quiet");
    let labelled = -LABEL;  // where the last label begins: no two lie over each other
    for (const mark of marks) {
      const at = x(mark.at);
      if (at < LABELS - 1 || at > width) continue;
      pen.beginPath(); pen.moveTo(at, 0); pen.lineTo(at, height - CLOCK); pen.stroke();
      if (at - labelled < LABEL || at + LABEL > width) continue;
      labelled = at;
      pen.fillText(`version ${mark.batch}`, at + 3, AXIS / 2);
    }
    const step = STEPS.find((each) => each * scale > 90) ?? STEPS[STEPS.length - 1];
    pen.beginPath(); pen.moveTo(LABELS, height - CLOCK); pen.lineTo(width, height - CLOCK); pen.stroke();
    if (devices.length) for (let at = Math.ceil(from / step) * step; at < to; at += step) {
      pen.fillRect(x(at), height - CLOCK, 1, 4);
      if (x(at) + 60 < width) pen.fillText(clock(at), x(at) + 3, height - CLOCK / 2 + 1);
    }
    for (const { at, what } of events) {
      if (at < from || at > to) continue;
      pen.fillStyle = colour(/^(alarm|failed)/.test(what) ? "alarm" : "quiet");
      pen.fillRect(x(at) - 0.5, AXIS - 8, 1.5, height - CLOCK - AXIS + 8);
      pen.beginPath(); pen.moveTo(x(at) - 5, AXIS - 10); pen.lineTo(x(at) + 5, AXIS - 10); pen.lineTo(x(at), AXIS); pen.fill();
    }
    if (!devices.length) pen.fillText(isRead ? "nothing is known yet: timelines begin with the second batch" : "reading ...", LABELS, AXIS + ROW / 2);
  }

  function clock(at) {
    const mark = marks.findLast((each) => each.at <= at);
    if (!mark || mark.clock === null || mark.clock === undefined) return `${at} s`;
    return new Date(1000 * (mark.clock + at - mark.at)).toTimeString().slice(0, 8);
  }

  function ask() { if (!asked) { asked = true; requestAnimationFrame(draw); } }

  function show(a, b) {
    const span = Math.min(Math.max(b - a, total / 1e4), total || 1);
    from = Math.max(0, Math.min(a, total - span));
    to = from + span;
    ask();
  }

  function stopFollowing() { follow.setAttribute("aria-pressed", "false"); }

  function zoom(by, at) { stopFollowing(); show(at - (at - from) * by, at + (to - at) * by); }

  function second(event) { return from + (event.offsetX - LABELS) / (canvas.clientWidth - LABELS) * (to - from); }

  canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, second(event)); }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons) {
      stopFollowing();
      const by = event.movementX / (canvas.clientWidth - LABELS) * (to - from);
      show(from - by, to - by);
      return;
    }
    const row = Math.floor((event.offsetY - AXIS) / ROW), at = second(event);
    const spans = devices[row]?.[1] ?? [], span = spans[first(spans, at)];
    const near = events.find((each) => Math.abs(each.at - at) < 6 * (to - from) / (canvas.clientWidth - LABELS));
    if (near) { hover.textContent = `${clock(near.at)} ${near.what}`; return; }
    hover.textContent = span && span[0] <= at
      ? `${devices[row][0]} ${words.get(span[2]) ?? span[2]} for ${(span[1] - span[0]).toFixed(3)} s in batch ${span[3]}, at ${clock(span[0])}` : "\u00a0";
  });
  canvas.addEventListener("keydown", (event) => {
    const step = (to - from) / 5, middle = (from + to) / 2;
    if (event.key === "ArrowLeft") { stopFollowing(); show(from - step, to - step); }
    else if (event.key === "ArrowRight") { stopFollowing(); show(from + step, to + step); }
    else if (event.key === "+") zoom(0.8, middle);
    else if (event.key === "-") zoom(1.25, middle);
    else return;
    event.preventDefault();
  });
  addEventListener("resize", ask);
  follow.addEventListener("click", () => {
    const pressed = follow.getAttribute("aria-pressed") !== "true";
    follow.setAttribute("aria-pressed", String(pressed));
    refresh();
  });
  batches.addEventListener("change", () => {
    history.replaceState(null, "", `${BASE}/timeline?batches=${batches.value}`);
    refresh();
  });

  async function refresh() {
    if (document.hidden) return;
    try {
      const answer = await fetch(`${BASE}/data/timeline?batches=${batches.value}`);
      if (!answer.ok) return;
      take(await answer.json());
      isRead = true;
    } catch { return; }
    if (follow.getAttribute("aria-pressed") === "true") show(0, total); else ask();
  }
  refresh();
  setInterval(() => { if (follow.getAttribute("aria-pressed") === "true") refresh(); }, 1000);
}
