// The gallery: its state is in the address, so that a link shows the same, the opened picture included.
"use strict";
{
  const FRAME_S = 1 / 16;  // videos of evaluations have 16 frames per second
  const DEFAULTS = { view: "after", size: "m" };
  const box = document.getElementById("lightbox"), layers = document.getElementById("lightbox-layers");
  const tiles = () => document.querySelector(".tiles");
  const items = () => [...document.querySelectorAll(".tiles > li")];
  const find = (id) => document.getElementById(id);
  let zoom = 1, x = 0, y = 0;

  function address(changes) {
    const url = new URL(location.href);
    for (const [name, value] of Object.entries(changes)) {
      if (value === "" || value === null || value === DEFAULTS[name]) url.searchParams.delete(name); else url.searchParams.set(name, value);
    }
    return url;
  }
  const keep = (changes) => history.replaceState(null, "", address(changes));
  const state = (name) => new URL(location.href).searchParams.get(name) ?? DEFAULTS[name] ?? null;

  // Looks of tiles and lightbox
  function setView(view) {
    tiles().dataset.view = box.dataset.view = view;
    document.querySelectorAll('[data-state="view"] input').forEach((each) => { each.checked = each.value === view; });
    keep({ view });
  }
  function setSize(size) { tiles().dataset.size = size; keep({ size }); }

  // Another version, order or prompt: the list is replaced, and what is focused stays
  async function choose() {
    const changes = { after: null, show: null, pick: null };
    for (const each of find("choose").elements) if (each.name) changes[each.name] = each.value === each.dataset.default ? null : each.value;
    history.pushState(null, "", address(changes));
    await load();
  }
  async function load() {
    const url = new URL(location.href);
    url.searchParams.set("part", "");
    const answer = await fetch(url);
    if (!answer.ok) { location.reload(); return; }
    replace(document.getElementById("part"), await answer.text());
    restore();
  }
  function restore() {
    if (!tiles()) return;
    const picked = new Set((state("pick") ?? "").split(","));
    document.querySelectorAll(".pick").forEach((each) => { each.checked = picked.has(each.value); });
    box.dataset.view = tiles().dataset.view;
    count();
    const shown = state("show");
    if (shown !== null) open(items().find((each) => each.dataset.number === shown)); else if (box.open) box.close();
  }

  // Chosen pictures
  function count() {
    const chosen = [...document.querySelectorAll(".pick:checked")].map((each) => each.value);
    find("chosen").hidden = !chosen.length;
    find("num-chosen").textContent = `${chosen.length} chosen`;
    keep({ pick: chosen.join(",") });
  }
  function chooseAll(wanted) {
    document.querySelectorAll(".pick").forEach((each) => { each.checked = wanted; });
    count();
  }

  async function download() {
    const chosen = items().filter((each) => each.querySelector(".pick").checked), { before, after } = tiles().dataset;
    const cell = (text) => `"${String(text ?? "").replaceAll('"', '""')}"`;
    const rows = [["file", "version", "prompt", ...names().flatMap((name) => [name, `${name} of version ${before}`])]], files = [];
    for (const item of chosen) {
      const place = item.querySelector(".layers"), number = item.dataset.number.padStart(4, "0");
      const address = place.dataset.video ?? item.querySelector("img.after").src.replace("?small=1", "");
      const name = `${number}.${address.split(".").at(-1)}`;
      files.push({ name, data: new Uint8Array(await (await fetch(address)).arrayBuffer()) });
      rows.push([name, after, item.dataset.prompt, ...scores(item).flat()]);
    }
    files.push({ name: "samples.csv", data: new TextEncoder().encode(rows.map((row) => row.map(cell).join()).join("\n")) });
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(zip(files)), download: `version-${after}.zip` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  // Videos: on tiles they play while pointed at or focused
  function video(src, name) {
    const found = Object.assign(document.createElement("video"), { src, loop: true, muted: true, playsInline: true, className: name });
    found.setAttribute("aria-label", name === "before" ? `version ${tiles().dataset.before}` : `version ${tiles().dataset.after}`);
    return found;
  }
  function play(place) {
    if (!place?.dataset.video || place.querySelector("video")) return;
    const shown = tiles().dataset.view;
    const films = [video(place.dataset.video, "after"), ...(shown === "after" ? [] : [video(place.dataset.videoBefore, "before")])];
    films.reverse().forEach((film) => { place.append(film); film.play().catch(() => {}); });
  }
  function stop(place) { place?.querySelectorAll("video").forEach((each) => each.remove()); }

  // The lightbox
  const opened = () => items().find((each) => each.dataset.number === box.dataset.number);
  function open(item) {
    if (!item) return;
    box.dataset.number = item.dataset.number;
    const place = item.querySelector(".layers"), list = items();
    find("lightbox-prompt").textContent = item.dataset.prompt;
    find("lightbox-place").textContent = `${list.indexOf(item) + 1} of ${list.length}`;
    const { before, after } = tiles().dataset;
    Object.assign(layers.dataset, { left: `version ${before}`, right: `version ${after}` });
    find("lightbox-before").textContent = before;
    find("lightbox-after").textContent = after;
    layers.replaceChildren(...(place.dataset.video
      ? [video(place.dataset.videoBefore, "before"), video(place.dataset.video, "after")]
      : ["before", "after"].map((name) => {
        const image = place.querySelector(`img.${name}`);
        return Object.assign(new Image(), { src: image.src.replace("?small=1", ""), alt: image.alt, className: name });
      })));
    box.querySelector(".frames").hidden = !place.dataset.video;
    layers.querySelectorAll("video").forEach((each) => each.play().catch(() => {}));
    showScores(item);
    move(1, 0, 0);
    if (!box.open) box.showModal();
    setView(state("view"));
    keep({ show: item.dataset.number });
  }
  // Names of scores, and of each [score of the version, score of the other version], null for none
  const names = () => JSON.parse(tiles().dataset.names);
  const scores = (item) => item.dataset.scores.split(";").slice(0, -1).map((pair) => pair.split(",").map((text) => (text === "" ? null : Number(text))));
  function showScores(item) {
    const number = (value) => (value === null ? "none" : value.toFixed(3)), { before, after } = tiles().dataset;
    find("lightbox-scores").replaceChildren(...scores(item).flatMap(([score, old], index) => [
      Object.assign(document.createElement("dt"), { textContent: names()[index] }),
      Object.assign(document.createElement("dd"), { textContent: before === after ? number(score) : `${number(old)} → ${number(score)}` }),
    ]));
  }
  function step(by) {
    const list = items(), next = list[list.indexOf(opened()) + by];
    if (next) open(next);
  }
  function move(size, left, top) {
    zoom = Math.min(16, Math.max(1, size));
    [x, y] = zoom === 1 ? [0, 0] : [left, top];
    layers.style.setProperty("--zoom", zoom);
    layers.style.setProperty("--x", `${x}px`);
    layers.style.setProperty("--y", `${y}px`);
  }
  function frame(by) {
    layers.querySelectorAll("video").forEach((each) => {
      each.pause();
      each.currentTime = Math.min(Math.max(0, each.currentTime + by * FRAME_S), Math.max(0, each.duration - FRAME_S / 2));
    });
  }
  function toggle() {
    const films = [...layers.querySelectorAll("video")], runs = films.some((each) => !each.paused);
    films.forEach((each) => (runs ? each.pause() : each.play()));
  }
  const DO = {
    close: () => box.close(), back: () => step(-1), on: () => step(1), play: toggle,
    "frame-back": () => frame(-1), "frame-on": () => frame(1),
    larger: () => move(zoom * 1.5, x * 1.5, y * 1.5), smaller: () => move(zoom / 1.5, x / 1.5, y / 1.5), whole: () => move(1, 0, 0),
  };
  const KEYS = {
    ArrowLeft: DO.back, ArrowRight: DO.on, "+": DO.larger, "=": DO.larger, "-": DO.smaller, 0: DO.whole,
    ",": DO["frame-back"], ".": DO["frame-on"], " ": toggle,
    p: () => setView("after"), s: () => setView("slider"), b: () => setView("beside"), d: () => setView("difference"),
  };

  box?.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    if (event.target.matches("input") && event.key.startsWith("Arrow")) return;
    if (event.target.matches("button") && event.key === " ") return;
    event.preventDefault();
    KEYS[event.key]();
  });
  box?.addEventListener("close", () => {
    layers.replaceChildren();
    keep({ show: null });
    opened()?.querySelector("a").focus();
  });
  const stage = box?.querySelector(".stage");
  stage?.addEventListener("wheel", (event) => {
    event.preventDefault();
    const by = event.deltaY > 0 ? 0.8 : 1.25;
    move(zoom * by, x * by, y * by);
  }, { passive: false });
  stage?.addEventListener("pointermove", (event) => { if (event.buttons && zoom > 1) move(zoom, x + event.movementX, y + event.movementY); });

  // Keys on tiles: arrows move, x chooses
  function beside(item, key) {
    const list = items(), at = list.indexOf(item);
    const columns = list.filter((each) => each.offsetTop === list[0].offsetTop).length;
    return list[at + { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[key]];
  }
  document.addEventListener("keydown", (event) => {
    const item = event.target.closest?.(".tiles > li");
    if (!item || box.open || event.target.matches('[type="range"]')) return;
    if (event.key.startsWith("Arrow")) {
      const next = beside(item, event.key);
      if (next) { event.preventDefault(); next.querySelector("a").focus(); }
    } else if (event.key === "x") { const pick = item.querySelector(".pick"); pick.checked = !pick.checked; count(); }
  });

  document.addEventListener("click", (event) => {
    const link = event.target.closest(".tiles > li > a");
    if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) { event.preventDefault(); open(link.closest("li")); }
    const what = event.target.closest("[data-do]")?.dataset.do;
    if (what) DO[what]();
    if (event.target.id === "choose-all") chooseAll(true);
    if (event.target.id === "choose-none") chooseAll(false);
  });
  document.addEventListener("input", ({ target }) => {
    if (target.matches(".slider")) target.closest("li").style.setProperty("--at", `${target.value}%`);
    if (target.id === "lightbox-slider") layers.style.setProperty("--at", `${target.value}%`);
  });
  document.addEventListener("change", ({ target }) => {
    const what = target.closest("[data-state]")?.dataset.state;
    if (what === "view") setView(target.value);
    if (what === "size") setSize(target.value);
    if (target.matches(".pick")) count();
    if (target.form?.id === "choose") choose();
  });
  document.addEventListener("submit", (event) => { 
    if (event.target.id === "choose") { event.preventDefault(); choose(); }
    if (event.target.id === "pick") { event.preventDefault(); download(); }
  });
  for (const [begin, end] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
    document.addEventListener(begin, (event) => play(event.target.closest?.(".tiles .layers, .tiles a")?.closest("a")?.querySelector(".layers")));
    document.addEventListener(end, (event) => {
      const link = event.target.closest?.(".tiles a");
      if (link && !link.contains(event.relatedTarget)) stop(link.querySelector(".layers"));
    });
  }
  addEventListener("popstate", load);
  restore();

  // Pictures further down are loaded while nothing else is done: scrolling to many new ones at once stutters
  const WAIT_MS = 500, AT_ONCE = 12;
  function loadAhead() {
    const shown = (each) => getComputedStyle(each).display !== "none";
    const next = [...document.querySelectorAll('.tiles img[loading="lazy"]')].filter(shown).slice(0, AT_ONCE);
    for (const each of next) each.loading = "eager";
    const loaded = Promise.all(next.map((each) => each.decode().catch(() => {})));
    loaded.then(() => setTimeout(loadAhead, next.length ? 0 : WAIT_MS));
  }
  if (!navigator.connection?.saveData) setTimeout(loadAhead, WAIT_MS);
}
