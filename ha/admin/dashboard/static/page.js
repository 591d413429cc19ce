// For every page: switches between light and dark, and refreshes in place, once or every 5 s while the page is visible.

import { morph } from "./morph.js";

const PERIOD_MS = 5000;
const ANSWER_MS_MAX = 10_000;

const root = document.documentElement;
const stale = document.getElementById("stale");

document.querySelectorAll(".page-tools [hidden]").forEach((each) => (each.hidden = false));

// ---- light or dark

const scheme = document.getElementById("scheme");
const system = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  return (root.dataset.scheme ?? (system.matches ? "dark" : "light")) === "dark";
}

function showScheme() {
  scheme.setAttribute("aria-pressed", String(isDark()));
}

scheme.addEventListener("click", () => {
  root.dataset.scheme = isDark() ? "light" : "dark";
  store(localStorage, "halog-scheme", root.dataset.scheme);
  showScheme();
});
system.addEventListener("change", showScheme);
showScheme();

// ---- refreshing

const repeat = document.getElementById("repeat");
const live = document.getElementById("live"); // the overview, which live.js keeps up to date
let timer = 0;
let isAsking = false;

async function refresh() {
  if (isAsking) return;
  isAsking = true;
  clearTimeout(timer);
  try {
    const signal = AbortSignal.timeout(ANSWER_MS_MAX);
    const answer = await fetch(location.href, { redirect: "manual", cache: "no-store", signal });
    if (answer.type === "opaqueredirect") return location.reload(); // the session is over
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    morph(document.getElementById("main"), page.getElementById("main"));
    stale.hidden = true;
  } catch (error) {
    console.warn(error);
    stale.textContent = "This node does not respond. The page is from before.";
    stale.hidden = false;
  } finally {
    isAsking = false;
  }
  plan();
}

function plan() {
  clearTimeout(timer);
  if (isRepeating() && !document.hidden) timer = setTimeout(refresh, PERIOD_MS);
}

function isRepeating() {
  return live === null && repeat.getAttribute("aria-pressed") === "true";
}

repeat.addEventListener("click", () => {
  repeat.setAttribute("aria-pressed", String(!isRepeating()));
  store(sessionStorage, "halog-repeat", String(isRepeating()));
  if (isRepeating()) refresh();
  else plan();
});

if (live === null && document.getElementById("main").dataset.form === undefined) {
  document.getElementById("refresh").addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    refresh();
  });
  repeat.setAttribute("aria-pressed", String(read(sessionStorage, "halog-repeat") === "true"));
  document.addEventListener("visibilitychange", plan);
  plan();
} else {
  repeat.hidden = true;
}

function store(place, key, value) {
  try {
    place.setItem(key, value);
  } catch {
    // The browser allows no storage for this page: the choice lasts until the page is left.
  }
}

function read(place, key) {
  try {
    return place.getItem(key);
  } catch {
    return null;
  }
}
