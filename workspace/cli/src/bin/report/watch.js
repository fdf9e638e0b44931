// Asks for the page again every some seconds, and keeps the place and the opened parts.
"use strict";

function openParts() {
  return Array.from(document.querySelectorAll("details"), (part) => part.open);
}

async function refresh() {
  try {
    const answer = await fetch("/", { cache: "no-store" });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const open = openParts();
    const main = page.querySelector("main");
    document.querySelector("main").replaceWith(main);
    document.title = page.title;
    main.querySelectorAll("details").forEach((part, index) => { part.open = Boolean(open[index]); });
  } catch {
    document.title = "(ended) " + document.title.replace("(ended) ", "");
  }
  wait();
}

function wait() {
  const seconds = Number(document.querySelector("main").dataset.seconds) || 5;
  setTimeout(document.hidden ? wait : refresh, 1000 * seconds);
}

wait();
