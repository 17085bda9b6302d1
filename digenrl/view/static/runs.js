// The page of all runs: search as one types, notes, and copies of recipes.
"use strict";
{
  const form = () => document.getElementById("find");
  let waiting = null;

  // The address has what is looked for, so that it can be sent to somebody.
  async function find() {
    const wanted = new URLSearchParams([...new FormData(form())].filter(([, value]) => value && value !== "newest"));
    history.replaceState(null, "", `${location.pathname}${wanted.size ? `?${wanted}` : ""}`);
    await refreshPart();
  }
  document.addEventListener("input", (event) => {
    if (event.target.closest("#find")) { clearTimeout(waiting); waiting = setTimeout(find, 150); }
  });
  document.addEventListener("submit", (event) => { if (event.target.id === "find") { event.preventDefault(); find(); } });

  async function post(address, body) {
    const answer = await fetch(address, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.detail);
    return found;
  }

  function plain(text) { if (text === "none" || text === "") return null; try { return JSON.parse(text); } catch { return text.replace(/^"|"$/g, ""); } }

  // Settings of a run with their values, as the page of its recipe has them.
  async function settings(run) {
    let own = document.getElementById("copy-fields");
    if (!own) {
      const answer = await fetch(`/runs/${run}/recipe?part`);
      own = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("copy-fields");
    }
    return own ? own.content.cloneNode(true) : "The recipe cannot be read.";
  }

  const SAVES = {
    async "words-dialog"(run, fields) {
      const tags = fields.tags.value.split(",").map((each) => each.trim()).filter(Boolean);
      await post(`/v1/runs/${run}/notes`, { tags, notes: fields.notes.value.trim() });
      return true;
    },
    async "copy-dialog"(run, fields, dialog, button) {
      const changed = [...dialog.querySelectorAll("[data-now]")].filter((each) => each.value.trim() !== each.dataset.now);
      const changes = Object.fromEntries(changed.map((each) => [each.name, plain(each.value.trim())]));
      const name = fields.name.value, copied = await post(`/v1/runs/${run}/copies`, { name, changes });
      dialog.querySelector(".result").hidden = false;
      dialog.querySelector("pre").textContent = copied.command;
      button.disabled = true;
      if (button.dataset.mayStart !== "true") return false;
      dialog.querySelector(".how").textContent = "It starts ...";
      await post(`/v1/runs/${name}/start`, {});
      if (!form()) location.href = `/runs/${name}/`;
      return true;
    },
  };

  document.addEventListener("click", async (event) => {
    const opens = event.target.closest("[data-dialog]");
    if (opens) {
      const dialog = document.getElementById(opens.dataset.dialog), fields = dialog.querySelector("form");
      dialog.dataset.run = opens.dataset.run;
      fields.reset();
      dialog.querySelector("[role=alert]").hidden = true;
      const result = dialog.querySelector(".result"), button = dialog.querySelector(".primary");
      if (result) result.hidden = true;
      button.disabled = false;
      for (const name of ["tags", "notes"]) if (name in fields.elements) fields.elements[name].value = opens.dataset[name] ?? "";
      if (fields.elements.name) fields.elements.name.value = `${opens.dataset.run}-2`;
      const list = dialog.querySelector(".settings div");
      if (list) list.textContent = "Reads the recipe ...";
      dialog.showModal();
      if (list) list.replaceChildren(await settings(dialog.dataset.run));
      return;
    }
    const button = event.target.closest("dialog button[value=save]");
    if (!button || !button.form.reportValidity()) return;
    event.preventDefault();
    const dialog = button.closest("dialog"), alarm = dialog.querySelector("[role=alert]");
    try {
      if (await SAVES[dialog.id](dialog.dataset.run, button.form.elements, dialog, button)) dialog.close();
      alarm.hidden = true;
      await refreshPart();
    } catch (error) { alarm.textContent = error.message.replace(/^--/gm, ""); alarm.hidden = false; button.disabled = false; }
  });
}
