// Samples a prompt of one's own, shows the progress, then the address of the result.
"use strict";
{
  const form = document.getElementById("try"), stage = document.getElementById("stage"), refused = document.getElementById("refused");
  const POLL_MS = 700;

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const given = new FormData(form), number = (name) => Number(given.get(name));
    const versions = [...new Set([number("against"), number("version")])];
    const body = { prompt: given.get("prompt"), versions, seed: number("seed"), num_each: number("num") };
    const button = document.getElementById("sample"), began = Date.now();
    button.disabled = true;
    refused.hidden = true;
    stage.hidden = false;
    document.getElementById("not-kept")?.remove();
    const bar = stage.querySelector("progress"), words = stage.querySelector("span");
    const show = ({ stage: now = "", prompt = "", share = null }) => {
      const isOwn = prompt === body.prompt.trim();
      words.textContent = `${now === "" ? "Waits for a process to start" : isOwn ? `${now[0].toUpperCase()}${now.slice(1)}` : `Waits for another prompt, which ${now}`} (${Math.round((Date.now() - began) / 1000)} s)`;
      if (isOwn && share !== null) bar.value = share; else bar.removeAttribute("value");
    };
    show({});
    const timer = setInterval(async () => {
      const answer = await fetch(`${BASE}/data/sampling`);
      if (answer.ok) show(await answer.json());
    }, POLL_MS);
    try {
      const answer = await fetch(`${BASE}/v1/samples`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
      if (answer.ok) { location.href = `${location.pathname}?${new URLSearchParams(given)}`; return; }
      refused.textContent = (await answer.json()).detail;
      refused.hidden = false;
    } finally {
      clearInterval(timer);
      stage.hidden = true;
      button.disabled = false;
    }
  });
}
