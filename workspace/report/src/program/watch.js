// Asks for the page again every some seconds, and keeps the opened parts open and the chosen axes.
"use strict";

const ENDED = "(ended) ";

// The opened parts by name: a page that shows an error has none, and the next one has them again.
const opened = new Set();

// The id of the chosen axes.
let axes = null;

function remember() {
  for (const part of document.querySelectorAll("details")) {
    if (part.open) opened.add(part.dataset.part);
    else opened.delete(part.dataset.part);
  }
  axes = document.querySelector("input[name=axes]:checked")?.id ?? axes;
}

async function refresh() {
  try {
    const answer = await fetch("/", { cache: "no-store" });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const main = page.querySelector("main");
    if (main === null) throw new Error("the answer is not a page");
    remember();
    for (const part of main.querySelectorAll("details")) part.open = opened.has(part.dataset.part);
    for (const choice of main.querySelectorAll("input[name=axes]")) if (choice.id === axes) choice.checked = true;
    document.querySelector("main").replaceWith(main);
    document.title = page.title;
  } catch {
    document.title = ENDED + document.title.replace(ENDED, "");
  }
  wait();
}

function wait() {
  const seconds = Number(document.querySelector("main").dataset.seconds) || 5;
  setTimeout(document.hidden ? wait : refresh, 1000 * seconds);
}

wait();
