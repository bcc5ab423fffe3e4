"use strict";

// Pointing at a mark or at a row says below the frontier what that plan needs, and marks both.
const said = document.getElementById("said");
const found = document.querySelectorAll("[data-row]");

function show(row) {
  let text = "";
  for (const each of found) {
    const isMarked = each.dataset.row === row;
    each.classList.toggle("marked", isMarked);
    if (isMarked && each.dataset.said) text = each.dataset.said;
  }
  if (text) said.textContent = text;
}

for (const each of found) {
  each.addEventListener("pointerenter", () => show(each.dataset.row));
  each.addEventListener("focus", () => show(each.dataset.row));
  each.addEventListener("click", () => show(each.dataset.row));
}
