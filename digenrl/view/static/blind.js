// Keys vote: each belongs to a link of the page.
"use strict";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || (event.key === "Enter" && event.target.matches("a, button"))) return;
  const link = document.querySelector(`[data-key="${event.key}"]`);
  if (link) { event.preventDefault(); location.replace(link.href); }
});
